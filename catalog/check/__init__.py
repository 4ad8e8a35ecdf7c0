"""Proves that stored checkpoints are undamaged, restore, and equal what the trainer had.

Its input is a run, its output a report. Read the modules in this order: `check` (finds damage,
without a model) with `representation_graph` (how manifests depend on each other), `validate`
(compares one checkpoint with what its trainer recorded), `rows` (does so for one table), `evaluate`
(calls a user's function with a restored checkpoint).
"""
