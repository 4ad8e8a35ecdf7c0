"""Chooses the rows that changed most, as they come, in memory of two budgets.

What a row counts is how far it is from the row that the sink holds, times its importance: the
fourth root of the mean second moment that the trainer's optimizer keeps for it, if it keeps any.
The square root would weigh rows by what errors in them cost in training
(docs/understanding/allocation.md). But the next requests are not those of the past, and rows that
were trained often took nearly all of a small budget (docs/understanding/benchmarks.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["ID_BYTES", "MostChanged", "change_of"]

#: Bytes of a row's id, which is published with the row.
ID_BYTES: Final = 8


def change_of(rows: Tensor, held_rows: Tensor, importance: Tensor | None) -> Tensor:
    """Return how much rows changed: f32 [n], infinite where it is not a number.

    Args:
        rows: [n, dim].
        held_rows: what the sink holds, of the same shape; zeros where it holds none.
        importance: f32 [n]; None: 1.
    """
    distances = (rows.float() - held_rows.float()).norm(dim=1)
    changes = distances if importance is None else distances * importance
    return torch.nan_to_num(changes, nan=math.inf, posinf=math.inf)


class _Candidates(NamedTuple):
    """Rows of one table that may be chosen.

    Attributes:
        table: its name.
        ids: int64 [n].
        rows: [n, dim].
        changes: f32 [n].
        numbers: int64 [n]: what `leave` is told of them.
    """

    table: str
    ids: Tensor
    rows: Tensor
    changes: Tensor
    numbers: Tensor

    def of(self, chosen: Tensor) -> _Candidates:
        """Return some of the rows; `chosen`: bool [n]."""
        return _Candidates(
            self.table,
            self.ids[chosen],
            self.rows[chosen],
            self.changes[chosen],
            self.numbers[chosen],
        )


class MostChanged:
    """Keeps the rows that changed most, as many as there is room for.

    Args:
        budget_bytes: of the rows that are chosen, and of their ids.
        row_bytes: name of each table -> bytes of one of its rows.
        leave: is told which rows are not chosen: table, ids and numbers, int64 [n].
    """

    def __init__(
        self,
        budget_bytes: int,
        row_bytes: Mapping[str, int],
        leave: Callable[[str, Tensor, Tensor], None],
    ) -> None:
        self._budget_bytes = self._room_bytes = budget_bytes
        self._row_bytes = row_bytes
        self._leave = leave
        self._candidates: list[_Candidates] = []
        self._candidate_bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Have less room: so many bytes go out of turn."""
        self._room_bytes = max(0, self._room_bytes - size_bytes)

    def add(self, table: str, ids: Tensor, rows: Tensor, changes: Tensor, numbers: Tensor) -> None:
        """Take rows that may be chosen.

        Args:
            table: name of the table.
            ids: int64 [n].
            rows: [n, dim]; kept.
            changes: f32 [n], not NaN.
            numbers: int64 [n].
        """
        if not len(ids):
            return
        self._candidates.append(_Candidates(table, ids, rows, changes, numbers))
        self._candidate_bytes += len(ids) * self._size_of(table)
        if self._candidate_bytes > 2 * self._budget_bytes:
            self._keep_most()

    def chosen(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the rows that were chosen: table, ids and rows; call it after the last `add`."""
        self._keep_most()
        for candidates in self._candidates:
            if len(candidates.ids):
                yield candidates.table, candidates.ids, candidates.rows

    def _keep_most(self) -> None:
        """Leave all rows but those that changed most and have room; of equal ones the first."""
        if not self._candidates:
            return
        changes = torch.cat([candidates.changes for candidates in self._candidates])
        sizes = torch.cat(
            [
                torch.full_like(candidates.ids, self._size_of(candidates.table))
                for candidates in self._candidates
            ]
        )
        order = changes.argsort(descending=True, stable=True)
        is_kept = torch.zeros(len(order), dtype=torch.bool, device="cpu")
        is_kept[order[sizes[order].cumsum(0) <= self._room_bytes]] = True
        counts = [len(candidates.ids) for candidates in self._candidates]
        kept: list[_Candidates] = []
        for candidates, is_chosen in zip(self._candidates, is_kept.split(counts), strict=True):
            rows_left = candidates.of(~is_chosen)
            self._leave(candidates.table, rows_left.ids, rows_left.numbers)
            kept.append(candidates.of(is_chosen))
        self._candidates = [candidates for candidates in kept if len(candidates.ids)]
        self._candidate_bytes = int(sizes[is_kept].sum())

    def _size_of(self, table: str) -> int:
        return self._row_bytes[table] + ID_BYTES
