"""The bytes of docs/format.md: keys, records, chunks, staged jobs; no input or output."""
