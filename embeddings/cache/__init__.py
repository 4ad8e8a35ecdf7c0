"""Keeps the rows of tables that training needs in memory, and all others at their home.

Read the modules in this order: `slots.py` (the rows in use), `gradients.py` (their gradients),
`reserved_slots.py` (which are kept free for new keys), `residents.py` (which rows must stay),
`progress.py` (at which batch a cache is), `mover.py` (the home thread, which moves rows between
slots and home), `planner.py` (plans the rows of batches and hands these out), `slot_lookups.py`
(the slots of rows that a module looks up), `cuts.py` with `changed_rows.py` and `view.py` (all rows
of one moment, for a checkpoint), `steps.py` (the steps of optimizers), `cache.py` (puts these parts
together), `lookup_hooks.py` (gives modules slots in place of ids), `lookup_places.py` (where a
lookup reads its rows), `cached_keys.py` (the rows of keyed tables), `cached_table.py` (a cached
table as the rest of recpoint sees it), `refused_uses.py` (uses of a cached model that are refused),
`reader_plans.py` (plans the batches of a reader), `install.py` (puts a model's tables into a cache)
and `clipping.py` (clips gradients by one norm on all ranks). `call_thread.py` has the thread that
does calls in order.

`trainers.py` says what a cache asks of other trainers that share its rows, and answers for a single
trainer; `shared.py` answers for the ranks of a data-parallel job, and `shared_lookups.py` makes
their lookups of keyed tables. They stand on `rank_channels.py`
(how ranks exchange bytes), `turns.py` (what ranks do next, before they exchange bytes for it),
`meeting.py` (where home threads wait for each other), `membership.py` (how a rank works with the
others, and leaves them), `same_tables.py` (what ranks share), `batch_ids.py` (ids of coming
batches), `exchange.py` and `planned_exchanges.py` (values and gradients of rows), `reduction.py`
(adds gradients at the owners of rows), `later_step.py` (steps of rows whose gradients come late),
`step_agreement.py` (what all ranks do in a step) and `data_parallel.py` (what must not be averaged,
and what must be).
"""
