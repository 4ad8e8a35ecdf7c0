"""Decides when a checkpoint is due and with how many bits it is stored.

The input is the cost of a checkpoint and the failure rate of the job; the output is a batch number
and widths. Read the modules in this order: `schedule` (when a checkpoint is due), `outlook` (the
restores to expect, and widths) and `ledger` (checkpoints on their way, and counters).
"""
