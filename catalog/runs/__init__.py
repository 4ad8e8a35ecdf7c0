"""A run: its record, its generations, its manifests, and the chains that these make."""
