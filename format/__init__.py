"""Turns bytes into objects and back, without I/O: keys, records, jobs, chunks, state trees."""
