"""Collects and restores the training state outside the rows of tables.

The input is models, optimizers, readers and random generators; the output is a tree of tensors and
values. Read the modules in this order: `training_state` (the whole tree), `not_given` (warnings of
state that it lacks), `model`, `optimizers`, `writable` (tensors that a restore could not write),
`grad_scalers` and `unknown_optimizers` (those that the Checkpointer was not given), `lookahead`
(reads ahead of training) with its parts `held_batches`, `anchors`, `reader_inside` and
`lookahead_state`, `batch_ids` (which rows a batch looks up), `reader` with `loader_parts`,
`rng`, `second_moments` (how much errors in rows matter), and `import_note` (the sign of a
checkpoint without a trainer's state).
"""
