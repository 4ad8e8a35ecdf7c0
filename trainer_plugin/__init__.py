"""Runs inside the training process: marks rows, takes snapshots, restores. Never imports Prefect.

The input is a model, its optimizers and a reader; the output is staged jobs. Read the modules in
this order: `checkpointer`, `training` (its starts, rewinds and end), `generation` (what runs beside
training), `assembly` (which builds the parts), `named_tables`, `settings` with `setting_checks`,
`schedule` (when a checkpoint is due), `policy` (a full or an increment), `tables` (which weights
are tables), `integrations` and `fused_optimizers` (tables of other libraries), `mismatches` (what
to do about a checkpoint that does not fit), `ranks` (which rank holds which rows), `state`
(everything but tables), `snapshot` (the cut), `pipeline` (from a due checkpoint to its outcome),
`restore` (how a trainer starts), `servers_note` (how its embedding servers are, for a page), `loop`
(training up to a bound), `grow` with `larger_table` (more rows while it trains) and `lightning`
(the same inside Lightning's loops). The marks of changed rows are in `embeddings`.
"""
