"""The staging area of a host as trainer and agent share it (format §7)."""
