"""Tables that are looked up by keys, which are any int64, and that have rows for some of them.

A table has slots, which are the rows of its weight. A key that is looked up in training gets a slot
if it is admitted; if no slot is free, the rows that are needed least leave. All of this follows
from the lookups and the steps alone, so a training that is repeated has the same rows.

Read the modules in this order: `admission.py` (which keys get rows), `stored_state.py` (what a
checkpoint may say of that), `eviction.py` (which rows leave first), `expiry.py` (which rows leave
because of their age), `slot_memory.py` (where the rows of slots lie), `slot_values.py` (their
values and optimizer state), `open_lookups.py` (whose gradients come too late), `key_slots.py`
(gives slots to keys), `steps.py` (what a step of an optimizer means for them), `callers.py` (which
lookups are refused), `all_ranks.py` (what several ranks look up together),
`loaded_states.py` (whose optimizer state was loaded), `keyed_module.py` (the weight and its keys)
and `embedding.py` (the modules that a model has).
"""
