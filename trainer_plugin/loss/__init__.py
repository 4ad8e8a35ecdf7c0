"""Measures what quantized rows cost in loss, and finds the price of a bit that keeps it in bounds.

Losses of measured batches come in, and the price at which checkpoints allocate bits goes out. Read
the modules in this order: `ratio_interval` (bounds of a ratio that hold at every moment) and
`price` (which price is used, and which is tried next).
"""
