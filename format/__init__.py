"""Turns bytes into objects and back: keys, records, jobs, chunks, state trees. No I/O."""
