"""Chooses the keys that a keyed table keeps of those it is restored with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from recpoint.catalog.restore.keyed_rows import LAST_USE, used_rows
from recpoint.embeddings.tables.keyed import KeyedSlots
from recpoint.trainer_plugin.integrations.keyed import KeyedTable

__all__ = ["begun_state", "kept_slots"]

_log = logging.getLogger("recpoint")


def kept_slots(table: KeyedTable, own_states: Mapping[str, Tensor]) -> Tensor:
    """Return the slots whose keys stay, ascending, int64 [n]; say in the log how many leave.

    Args:
        table: the table here, which may have fewer slots.
        own_states: row states of keys, of as many slots as there were.
    """
    used = used_rows(own_states[LAST_USE])
    evicted_count = max(len(used) - (table.table_rows - 1), 0)
    _log.log(
        logging.WARNING if evicted_count else logging.INFO,
        "keyed table %r: %d keys of the checkpoint go to %d slots, and %d keys were evicted; "
        "the next checkpoint is a full",
        table.name,
        len(used) - evicted_count,
        table.table_rows - 1,
        evicted_count,
    )
    if not evicted_count:
        return used
    return table.slots.leaving_order(own_states)[evicted_count:].sort().values


def begun_state(slots: KeyedSlots, *, steps: int) -> dict[str, Any]:
    """Return the state of a table whose keys come from one that was not keyed.

    Args:
        slots: have the rules.
        steps: the clock.
    """
    return {
        "settings": slots.state_dict()["settings"],
        "steps": steps,
        "inserted": 0,
        "evicted": 0,
        "refused": 0,
        "admission": {},
    }
