"""Keeps the stored rows of a keyed table at its home until they get their places there.

Which row of the checkpoint goes where is known once all rows and their keys were read. A table in a
cache may be larger than memory, so its rows wait at their home, in a table of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.cache.cached_keys import CachedKeys

__all__ = ["ShelvedRows"]

_ROWS_AT_A_TIME: Final = 65_536

#: Each has a table of its own at the home, which has no way to forget a table's form.
_numbers = itertools.count(1)


class ShelvedRows:
    """Rows of one table of a checkpoint, by their numbers there.

    Args:
        keys: the table here, in its cache; the slots have the form of the row states.
        rows: rows of the table in the checkpoint.
        states: the row states of keys that the checkpoint has: name -> int64 [rows], filled by
            whoever writes rows.

    Attributes:
        rows: the numbers of the rows.
        states: as given.
    """

    def __init__(self, keys: CachedKeys, rows: int, states: Mapping[str, Tensor]) -> None:
        self._mover = keys.cache.mover
        self._name = keys.name
        # Of each rank, because one may give its rows up while another still reads.
        self._shelf = f"{keys.name} (restored {next(_numbers)} on rank {keys.rank})"
        self.rows = range(rows)
        self.states = states
        layout = self._mover.tables[keys.name].slots.fix_layout()
        self._record_bytes = layout.size_bytes
        self._mover.home.add_table(self._shelf, rows=rows, record_bytes=layout.size_bytes)

    def fetch(self, ids: Tensor, records: Tensor) -> None:
        """Read rows that were written; see `Home.fetch`."""
        self._mover.home.fetch(self._shelf, ids, records)

    def write(self, ids: Tensor, records: Tensor) -> None:
        """Write rows, int64 [n], ascending; see `Home.write_back`."""
        self._mover.home.write_back(self._shelf, ids, records, batch=0)

    def place(self, places: Tensor, rows: Tensor) -> None:
        """Write rows to their places in the table, and give up the shelf.

        Args:
            places: int64 [n]: the rows of the table here, all different.
            rows: int64 [n]: the rows of the checkpoint, all different.
        """
        self._mover.put_at_home(self._mover.tables[self._name])
        order = torch.argsort(rows)
        for part in order.split(_ROWS_AT_A_TIME):
            records = torch.empty(len(part), self._record_bytes, dtype=torch.uint8, device="cpu")
            self.fetch(rows[part], records)
            order_here = torch.argsort(places[part])
            self._mover.write_idle(self._name, places[part][order_here], records[order_here])
        self.give_up()

    def give_up(self) -> None:
        """Have the home forget the rows."""
        self._mover.home.clear(self._shelf)
