"""What no checkpoint will ever need, in the store and on a host, and its removal (format §6.5)."""
