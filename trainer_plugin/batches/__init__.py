"""Counts the batches that training has done, and yields those that are left.

In: a reader of batches, and the signs of training. Out: `batches_done`, and the position to store.
Read `signs`, then `count` with its parts `since_count`, `loop_pipeline` and `threads`, then `loop`
and `pipelined`.
"""
