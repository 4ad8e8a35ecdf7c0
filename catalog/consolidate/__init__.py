"""Shortens a chain by copying its stored rows into chunks of one more manifest.

Its input is a checkpoint, its output a further manifest of it, which replaces no other. Read the
modules in this order: `consolidate` (runs all steps, around damage), `plan` (what to merge, and
whether it pays), `merge_sizes` (what each merge of a chain reads, writes and leaves), `choice` (the
cheapest merge), `merged_manifest` (the most bytes of a merge's manifest), `merge` with `moves`
(copies rows from chunks to chunks), `commit`.
"""
