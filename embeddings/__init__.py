"""Finds a model's embedding tables and marks which of their rows have changed.

The input is a model and its optimizers. The output is the model's tables, each with a tracker; the
tracker's bitmap has one bit for each row, set if the row changed since the last checkpoint. The
package also holds tables in memory that only answer lookups. No module here knows of training,
checkpoints or serving. Read the modules in this order: `tables.py` (what a table is, and where
tables come from), `marks.py` (the dirty rows of one table), `lookups.py` (hooks into the lookups of
a table's module) and `optimizers.py` (which rows an optimizer step changes, and marking them after
each step). `served_tables.py` stands alone: it holds values, or codes that lookups decode.
"""
