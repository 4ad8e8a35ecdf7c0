"""Collects and restores what training needs besides the rows of tables.

Models, optimizers, readers and generators come in, a tree of tensors and values goes out. Walk:
`training_state` (the whole tree), `model`, `optimizers`, `unknown_optimizers` (those that were not
given), `reader`, `rng`.
"""
