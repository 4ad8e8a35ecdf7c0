"""Runs inside the training process: marks rows, takes snapshots, restores. Never imports Prefect.

A model, its optimizers and a reader come in, staged jobs go out. Walk: `checkpointer`, `assembly`
(what it is built of), `settings` with `setting_checks`, `schedule` (when a checkpoint is due),
`policy` (a full or an increment), `tables` (which weights are tables), `integrations` and
`fused_optimizers` (tables of other libraries), `ranks` (who holds which rows), `state` (everything
but tables), `snapshot` (the cut), `pipeline` (from a due checkpoint to its outcome), `restore` (a
trainer's start), `loop` (batches that end where they were told to), `lightning` (the same inside
Lightning's loops). Marks are in `embeddings`.
"""
