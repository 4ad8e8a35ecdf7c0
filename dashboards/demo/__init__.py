"""Trains on real purchases, kills the trainer, restores, and proves that nothing was lost.

Walk: `demo` (the steps of the demo), `processes` (what it starts, watches and ends).
"""
