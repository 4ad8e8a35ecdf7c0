"""Keeps the rows of tables that training needs in memory, and all others at their home.

Read the modules in this order: `slots.py` (the rows in use), `gradients.py` (their gradients),
`residents.py` (which of them must stay), `settling.py` (the rows of a cut, as they were then),
`call_thread.py` (a thread that does calls in order), `cache.py` (brings rows before their first
use, and writes them back after their last), `view.py` (all rows of one moment, for a checkpoint),
`install.py` (puts a model's tables into a cache) and `clipping.py` (clips gradients by one norm on
all ranks).

Several trainers may share one home, as ranks of a data-parallel job: `channel.py` (how ranks
exchange bytes), `turns.py` (what ranks do next, before they exchange bytes for it),
`same_tables.py` (what ranks share), `batch_ids.py` (ids of coming batches), `exchange.py` (values
and gradients of rows), `later_step.py` (steps of rows whose gradients come late),
`step_agreement.py` (what all ranks do in a step), `data_parallel.py` (what must not be averaged,
and what must be) and `shared.py` (the cache of one rank).
"""
