"""Embedding tables, and which of their rows have changed since the last checkpoint.

Read the modules in this order: `tables.py` (what a table is, and where tables come from),
`lookups.py` (hooks into the lookups of a table's module), `marked_lookups.py` (marks rows at these
lookups), `marks.py` (the dirty rows of one table), `optimizers.py` (which rows an optimizer step
changes, and marking them after each step) and `new_rows.py` (row states of a row that was never
trained). `managed_collisions.py` and `keyed.py` say how rows are known to belong to other ids than
their numbers.
"""
