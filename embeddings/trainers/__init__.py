"""Caches of several trainers that share one home, as ranks of a data-parallel job.

Read the modules in this order: `channel` (how ranks exchange bytes), `turns` (what ranks do next,
before they exchange bytes for it), `same_tables` (what ranks share), `coming` (ids of coming
batches), `row_exchange` (values and gradients of rows), `later_step` (steps of rows whose gradients
come late), `step_agreement` (what all ranks do in a step), `data_parallel` (what must not be
averaged, and what must be), `shared_cache` (the cache of one rank).
"""
