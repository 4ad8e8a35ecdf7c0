"""Embedding tables, where they come from, and which of their rows have changed.

A model and its optimizers go in. Out come its tables, each with a tracker whose bitmap has one bit
for each row that changed since the last checkpoint; and tables in memory that only answer lookups.
Nothing here knows of training, checkpoints or serving. Walk the modules in this order: `tables.py`
(what a table is, and where tables come from), `marks.py` (the dirty rows of one table) with
`lookups.py` (hooks into the lookups of its module), `optimizers.py` (which rows a step of an
optimizer changes, and marking them after each step), and on its own `served_tables.py` (values or
codes that lookups decode).
"""
