"""Trains on real purchases, kills the trainer, restores, and proves that nothing was lost.

Walk: `demo` (the story), `processes` (what it starts, watches and ends).
"""
