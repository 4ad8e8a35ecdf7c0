"""Whether what is stored restores, and is what the trainer had (format §10)."""
