"""Says what to do about each mismatch between a checkpoint and the process that restores it.

`state`, `restore/target.py` and `fused_optimizers.py` compare, and give each mismatch that they
find its next step from this module. `incompatible` makes one error of all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, NamedTuple

from recpoint.errors import IncompatibleModel
from recpoint.format.manifest import Manifest

__all__ = [
    "Mismatch",
    "incompatible",
    "more_rows",
    "reader_of_ranks",
    "renamed_table",
    "seeded_with",
]


class Mismatch(NamedTuple):
    """One thing that does not fit.

    Attributes:
        found: what differs, as a sentence that names the object and both sides.
        next_step: what to change. It names no object if it holds for all objects of the kind, so
            that `incompatible` says it once.
    """

    found: str
    next_step: str


def incompatible(
    manifest: Manifest, mismatches: Sequence[Mismatch], *, otherwise: str
) -> IncompatibleModel:
    """Return an error that names every mismatch and, once each, their next steps.

    Args:
        manifest: the checkpoint.
        mismatches: at least one.
        otherwise: what helps against any mismatch; comes after the next steps.
    """
    next_steps = dict.fromkeys(mismatch.next_step for mismatch in mismatches)
    return IncompatibleModel(
        f"checkpoint of {manifest.ref}",
        found="; ".join(mismatch.found for mismatch in mismatches),
        # It does not say that nothing was loaded: rows of a newer, damaged checkpoint may be.
        expected="a model that fits the checkpoint",
        next_step="; ".join([*next_steps, otherwise]),
    )


LOAD_BY_NAME: Final = (
    'or load parts of the checkpoint by name: restore(partial={"tables": [...], "dense": [...]})'
)
LOAD_BY_NAME_OF_RANKS: Final = (
    "or load parts of the checkpoint by name, in a process without other ranks: "
    "restore(partial=...)"
)
LIST_PARTS: Final = "recpoint seed URL lists what a checkpoint holds"

# Tables.
TABLE_ONLY_HERE: Final = "build the model without tables that the checkpoint lacks"
TABLE_ONLY_THERE: Final = "build the model with every table of the checkpoint"


def renamed_table(name_here: str, name_stored: str) -> str:
    """Return the next step for a table of the checkpoint that probably has another name here."""
    names = f"{json.dumps(name_here)}: {json.dumps(name_stored)}"
    return (
        f"rename table {name_here!r} to {name_stored!r}, or load its rows under the new name with "
        f'restore(partial={{"tables": {{{names}}}}})'
    )


TABLE_ROWS: Final = (
    "build the table with the checkpoint's rows; recpoint.restore_parts reads rows of a table that "
    "now has another size into tensors"
)


def fewer_rows(table: str, stored_rows: int) -> str:
    """Return the next step for a table that has fewer rows than the checkpoint."""
    return (
        f"{TABLE_ROWS}. Or give the table as many rows before restore(): "
        f"recpoint.grow(model, optimizers, {table!r}, {stored_rows}, initial=...)"
    )


def more_rows(table: str) -> str:
    """Return the next step for a table that has more rows than the checkpoint."""
    rule = f"{json.dumps(table)}: recpoint.embeddings.Uniform(seed=0)"
    return (
        "build the table with the checkpoint's rows, or say what values its new rows begin with: "
        f"Checkpointer(options=Options(grow={{{rule}}}))"
    )


MORE_ROWS_OF_PARTS: Final = (
    "restore the whole checkpoint with Options(grow=...), which takes larger tables; or "
    f"{TABLE_ROWS}"
)
STATE_OF_NEW_ROWS: Final = (
    "make the row state before restore(), with the same entry for each row, as the optimizer "
    "begins it; or go on with as many rows as the checkpoint has"
)
WHOLE_STATE_OF_NEW_ROWS: Final = (
    "go on with as many rows as the checkpoint has, or begin a new run with the table's values "
    "(docs/how-to/add-rows.md)"
)
TABLE_VALUES: Final = "build the table with the checkpoint's number of values a row"
TABLE_DTYPE: Final = "build the table in the checkpoint's dtype"
ROW_STATES: Final = "train the table with the optimizer that the checkpoint has for it"
CACHED_TABLE: Final = "load the whole checkpoint, or load parts into a model without a cache"
TABLE_WITHOUT_IDS: Final = (
    "begin without the table's rows, or with a checkpoint that recpoint has made of this training"
)


def seeded_with(path: str) -> str:
    """Return the next step for a table that cannot begin with the import of another checkpoint."""
    seed = f'recpoint.Seed({path!r}, tables=["*"], dense=["*"])'
    return f"begin a new run with restore(seed={seed})"


PIECES_OF_STATE: Final = 'load sharded and fused tables with optimizer_states="drop"'
PIECES_OF_ONE_TABLE: Final = (
    "load a sharded or fused table from a table that no other is loaded from"
)
NAMES: Final = "name parts that the checkpoint and the model have"

# Dense layers, buffers, modules.
DENSE_ONLY_HERE: Final = "build the model without parameters and buffers that the checkpoint lacks"
DENSE_ONLY_THERE: Final = "build the model with every parameter and buffer of the checkpoint"
DENSE_FORM: Final = "build parameters and buffers with the checkpoint's shapes and dtypes"
SHARED_MEMORY: Final = "give each element memory of its own: tensor.clone() after expand()"
EXTRA_STATE: Final = "build the model with the modules that had extra state, and no others"

# Optimizers and schedulers.
OPTIMIZER_COUNT: Final = "give the Checkpointer as many optimizers as the checkpoint has, in order"
OPTIMIZER_CLASS: Final = "train with the optimizer classes of the checkpoint"
PARAMETER_GROUPS: Final = (
    "build optimizers with the checkpoint's parameter groups, including those that training had "
    "added (add_param_group before restore())"
)
CARRIED_STATE: Final = (
    "train the parameter with the optimizer class of the checkpoint, or load it with "
    'optimizer_states="drop"'
)
OTHER_UPDATE: Final = (
    "train the table with an optimizer that does the same, with the same hyperparameters"
)
OWN_GROUP: Final = "give the parameter a group of its own, with the checkpoint's hyperparameters"
SOURCE_SETTINGS: Final = (
    "build these tables with the checkpoint's optimizers and hyperparameters; where these differ "
    "between tables, with an optimizer for each, so that TorchRec puts them into separate modules"
)
KEYED_SETTINGS: Final = (
    "build the keyed table with the checkpoint's rules of admission and eviction"
)
COLLISION_SETTINGS: Final = (
    "build the managed collision modules with the checkpoint's policy and interval, sharded as "
    "there, and go on with as many ranks, or with one"
)
ROWS_AND_IDS: Final = "name a table and the dense tensors that map its ids together, or neither"
MAPPED_TABLE: Final = "restore the whole checkpoint: restore() without partial and seed"
STATE_OF_KEYS: Final = 'leave out optimizer_states="carry"; a whole restore() keeps them'
SOURCE_ONLY_HERE: Final = "build these tables without that library, as the checkpoint had them"
SOURCE_ONLY_THERE: Final = "build these tables with that library, as the checkpoint had them"
SCHEDULER_COUNT: Final = (
    "pass Checkpointer(schedulers=[...]) the checkpoint's schedulers; leave a new scheduler out, "
    "and set its last_epoch"
)
WARM_UP: Final = "build the optimizers with the checkpoint's WarmupOptimizers and stages"
SCHEDULER_RATES: Final = (
    "build the scheduler when its optimizer has as many parameter groups as in the checkpoint"
)

# Reader and extras.
READER_ONLY_HERE: Final = (
    "leave out reader=, because the checkpoint has no position in the batches, and skip "
    "checkpoints.batches_done batches in the script"
)
READER_ONLY_THERE: Final = "pass Checkpointer(reader=...), with a reader of the checkpoint's kind"
READ_FORWARD: Final = "pass recpoint.Lookahead(reader), or a reader that yields batches"
EXTRA_ONLY_HERE: Final = "leave out extras that the checkpoint lacks"
EXTRA_ONLY_THERE: Final = "pass Checkpointer(extras={...}) every extra of the checkpoint"
NO_STATE: Final = "restore another checkpoint: recpoint list URL names them"


def reader_of_ranks(ranks: int) -> str:
    """Return the next step for readers of `ranks` ranks that cannot be divided anew."""
    return f"give the reader load_state_dicts(states, rank, ranks), or train on {ranks} ranks"
