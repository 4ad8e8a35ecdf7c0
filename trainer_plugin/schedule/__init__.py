"""Decides when a checkpoint is due and with how many bits it is stored.

What a checkpoint costs and how often jobs fail come in, a batch number and widths go out. Walk:
`schedule` (when), `outlook` (restores to expect, widths), `ledger` (what became of checkpoints).
"""
