"""Names the row states of a keyed table, and finds the rows that keys have (format §3.8)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import torch
from torch import Tensor

__all__ = ["KEY", "KEYED_STATES", "LAST_USE", "USES", "has_keys", "rows_by_key", "used_rows"]

#: Row state: the key that has the row; 0 if none has.
KEY: Final = "keyed.key"
#: Row state: the table's clock when the key was last looked up in training; below 0: no key has it.
LAST_USE: Final = "keyed.last_use"
#: Row state: how often the key was looked up; only where the rule of eviction counts that.
USES: Final = "keyed.uses"
#: Row states that belong to a keyed table and not to its optimizer.
KEYED_STATES: Final = frozenset((KEY, LAST_USE, USES))


def has_keys(row_states: Collection[str]) -> bool:
    """Whether row states of these names are those of a keyed table."""
    return KEY in row_states and LAST_USE in row_states


def used_rows(last_use: Tensor) -> Tensor:
    """Return the rows that keys have, int64 [n], ascending.

    Args:
        last_use: the row state `LAST_USE`, int64 [rows].
    """
    return (last_use >= 0).nonzero().flatten()


def rows_by_key(key: Tensor, last_use: Tensor) -> Tensor:
    """Return the rows that keys have, int64 [n], in ascending order of keys.

    Args:
        key, last_use: the row states `KEY` and `LAST_USE`, int64 [rows] each.
    """
    rows = used_rows(last_use)
    return rows[torch.argsort(key[rows])]
