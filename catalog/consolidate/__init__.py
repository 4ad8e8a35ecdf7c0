"""Shortens a chain by copying its stored rows into chunks of one more manifest.

Its input is a checkpoint, its output a further manifest of it, which replaces no other. Read the
modules in this order: `plan` (what to merge, and whether it pays), `merged_manifest` (the most
bytes of a merge's manifest), `merge` (runs the merge up to the commit), `moves` (copies rows from
chunks to chunks).
"""
