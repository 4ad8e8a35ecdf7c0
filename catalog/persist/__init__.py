"""From a staged job to a committed checkpoint (format §6.1)."""
