"""Measures what quantized rows cost in loss, and finds the price of a bit that keeps it in bounds.

Batches that are not trained yet come in, and the price at which checkpoints allocate bits goes out.
Read the modules in this order: `suitability` (what can be measured), `meter` (which batches are,
and what a cut is told), `measure` (what rounding costs in the loss of one batch), `table_watch`
(every lookup of a forward pass, in other rows), `rounded_rows` (rows as a restore would have them),
`ratio_interval` (bounds of a ratio that hold at every moment), `price` (which price is used, and
which is tried next), `pace` (when the next batch is measured) and `rank_sums` (what ranks tell each
other when they agree on a checkpoint).
"""
