"""Proves that what is stored is sound, restores, and equals what the trainer had.

A run comes in, a report goes out. Walk: `check` (damage, without a model), `validate` (one
checkpoint against what its trainer recorded), `rows` (one table of it), `evaluate` (a user's own
function on a restored checkpoint).
"""
