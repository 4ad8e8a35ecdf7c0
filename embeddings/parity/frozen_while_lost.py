"""Reads frozen rows of a server that has not recovered all its rows yet.

A row that was lost when it was frozen is recovered before it is read. No write comes before that:
a write to a lost row recovers the row first. So the recovered row is the row that was frozen. The
home cannot know that: it takes the recovered row for a later write, and its reader says that no row
was there at the freeze. So this class keeps the recovered rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows
from recpoint.embeddings.home.memory import MemoryHome

__all__ = ["FrozenWhileLost"]

_ROWS = "rows"


class FrozenWhileLost(FrozenRows):
    """Frozen rows, of which some were lost.

    Args:
        reader: the frozen rows of the home.
        was_known: bool [slots], which rows were not lost when they were frozen.
        record_bytes: of the table.
        recover: called with slots, int64 [n]. Recovers those that are lost, and calls `reveal`.
        at_release: called when the rows are given up.
    """

    def __init__(
        self,
        reader: FrozenRows,
        was_known: Tensor,
        record_bytes: int,
        *,
        recover: Callable[[Tensor], None],
        at_release: Callable[[], None],
    ) -> None:
        self._reader = reader
        self._was_known = was_known
        self._recover = recover
        self._at_release = at_release
        self._recovered = MemoryHome()
        self._recovered.add_table(_ROWS, rows=max(1, len(was_known)), record_bytes=record_bytes)

    def reveal(self, slots: Tensor, records: Tensor) -> None:
        """Take up rows that were just recovered.

        Args:
            slots: int64 [n], ascending.
            records: uint8 [n, record_bytes].
        """
        chosen = (~self._was_known[slots]).nonzero().view(-1)
        self._recovered.write_back(_ROWS, slots[chosen], records[chosen], batch=0)

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        """See `FrozenRows`. Recovers rows first, and so also raises what a recovery raises."""
        self._recover(ids)
        is_written = self._reader.fetch(ids, out)
        lost = (~self._was_known[ids]).nonzero().view(-1)
        records = torch.empty(len(lost), out.shape[1], dtype=torch.uint8, device="cpu")
        is_recovered = self._recovered.fetch(_ROWS, ids[lost], records)
        out[lost[is_recovered]] = records[is_recovered]
        is_written[lost] = is_recovered
        return is_written

    def release(self) -> None:
        """See `FrozenRows`."""
        self._at_release()
        self._reader.release()
        self._recovered.close()
