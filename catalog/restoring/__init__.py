"""From a chain to a model, to parts of one, or to files (format §6.3, §6.11)."""
