"""Takes the rows that differ from their home's as they were at one moment, while training goes on.

A row's value of that moment is in its slot, until a step changes it: then it is saved first.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.home.contract import TableRows

__all__ = ["ChangedRows"]

#: Slots that are copied while a step may have to wait: about a millisecond's work.
_SLOTS_AT_A_TIME: Final = 16_384


class ChangedRows:
    """The rows of a trainer's slots that differ from their home's at the moment when it is made.

    Args:
        tables: name -> slots.
        lock: held while rows are saved, or taken from slots.
    """

    def __init__(self, tables: Mapping[str, CachedRows], lock: Lock) -> None:
        self._tables = tables
        self._lock = lock
        self._is_seen = {
            name: torch.zeros_like(rows.slots.changed) for name, rows in tables.items()
        }
        self._saved: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in tables}

    def save(self, name: str, slots: Tensor) -> None:
        """Save rows that are about to change, int64 [n] slots; the lock is held.

        A slot may come several times.
        """
        slots_of_table, is_seen = self._tables[name].slots, self._is_seen[name]
        new = torch.unique(slots[~is_seen[slots]])
        is_seen[new] = True
        new = new[slots_of_table.changed[new] & (slots_of_table.ids[new] >= 0)]
        if len(new):
            self._saved[name].append((slots_of_table.ids[new], slots_of_table.records(new)))

    def take(self, name: str) -> TableRows | None:
        """Return the rows of one table, which then count as equal to their home's.

        Rows that a step has changed since then still differ. The home thread calls it, once for
        each table, before any row enters or leaves a slot. Returns None if there is no such row.
        """
        slots_of_table, is_seen = self._tables[name].slots, self._is_seen[name]
        copied: list[tuple[Tensor, Tensor]] = []
        for first in range(0, len(is_seen), _SLOTS_AT_A_TIME):
            part = slice(first, first + _SLOTS_AT_A_TIME)
            with self._lock:  # what is not seen stays as it is until it is seen
                differs = (
                    slots_of_table.changed[part] & ~is_seen[part] & (slots_of_table.ids[part] >= 0)
                )
                slots = first + differs.nonzero().view(-1)
                if len(slots):
                    copied.append((slots_of_table.ids[slots], slots_of_table.records(slots)))
                    slots_of_table.changed[slots] = False
                is_seen[part] = True
        with self._lock:
            copied += self._saved.pop(name)  # all are seen: nothing is saved any more
        if not copied:
            return None
        ids, order = torch.cat([ids for ids, _ in copied]).sort()
        return TableRows(name, ids, torch.cat([records for _, records in copied])[order])
