"""What is stored, and in which order it is written, read, checked and deleted."""
