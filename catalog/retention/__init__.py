"""Which checkpoints are kept, and the removal of the others (format §6.6)."""
