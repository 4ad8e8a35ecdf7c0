"""Copying ahead row by row: what the fast version must equal."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.kernels.copy_ahead.tables import STEP_WORDS, LastUses, Left, TableAhead
from recpoint.kernels.dirty_bitmap import reference as dirty_bitmap

__all__ = ["Copier", "first_places", "last_uses", "places"]


def _marked(bitmap: Tensor) -> set[int]:
    return set(dirty_bitmap.collect(bitmap, rows=32 * bitmap.numel()).tolist())


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _set(bitmap: Tensor, rows: set[int]) -> None:
    dirty_bitmap.clear(bitmap)
    ids = _integers(sorted(rows))
    dirty_bitmap.mark(bitmap, ids, rows=32 * bitmap.numel())


def last_uses(batches: Sequence[Tensor], *, rows: int, seen: Tensor) -> LastUses:
    """List each row that the batches look up once, under the last batch that looks it up."""
    last: dict[int, int] = {}
    for number, ids in enumerate(batches):
        last.update({row: number for row in ids.tolist() if 0 <= row < rows})
    _set(seen, set(last))
    lists = [[row for row, batch in last.items() if batch == b] for b in range(len(batches))]
    starts = [sum(map(len, lists[:b])) for b in range(len(batches) + 1)]
    return LastUses(
        torch.tensor(sum(lists, []), dtype=torch.int64, device="cpu"),
        torch.tensor(starts, dtype=torch.int64, device="cpu"),
    )


def first_places(taken: Tensor, seen: Tensor) -> Tensor:
    """Return the number of rows set in either bitmap before each part, and of all rows set."""
    placed = _marked(taken) | _marked(seen)
    parts = -(-taken.numel() // STEP_WORDS)
    edges = [32 * STEP_WORDS * part for part in range(parts)] + [32 * taken.numel()]
    return torch.tensor(
        [sum(row < edge for row in placed) for edge in edges], dtype=torch.int64, device="cpu"
    )


def places(ids: Tensor, taken: Tensor, seen: Tensor, first: Tensor) -> Tensor:
    """Return how many rows before each id are set in either bitmap."""
    placed = sorted(_marked(taken) | _marked(seen))
    positions = [sum(row < id for row in placed) for id in ids.tolist()]
    return _integers(positions)


class Copier:
    """Copies rows of tables to their places, each at once."""

    def __init__(self, tables: Sequence[TableAhead]) -> None:
        self._tables = tuple(tables)
        self._handed = [0] * len(self._tables)
        self._places: list[dict[int, int]] = []
        self._rows = [0, 0]
        for table in self._tables:
            rows = set(range(table.rows))
            if table.first_places is not None:
                rows = _marked(table.taken) | _marked(table.seen)
            self._places.append({row: place for place, row in enumerate(sorted(rows))})
            if table.ids is not None:
                ids = _integers(sorted(rows))
                ctypes.memmove(table.ids.address, ids.data_ptr(), ids.nbytes)
        for index, table in enumerate(self._tables):
            self._copy(index, self._places[index].keys() - _marked(table.seen))

    def _copy(self, index: int, rows: set[int], *, late: bool = False) -> None:
        self._rows[late] += len(rows)
        for row in rows:
            for source, room in self._tables[index].arrays:
                row_bytes = source[row].clone()
                place = room.address + row_bytes.nbytes * self._places[index][row]
                ctypes.memmove(place, row_bytes.data_ptr(), row_bytes.nbytes)

    def hand_over(self, batches: Sequence[int], *, late: bool = False) -> None:
        """Copy the rows that no batch of the window after these looks up, and move their marks."""
        for index, (table, batch_end) in enumerate(zip(self._tables, batches, strict=True)):
            starts = table.uses.starts
            rows = set(table.uses.ids[starts[self._handed[index]] : starts[batch_end]].tolist())
            self._handed[index] = batch_end
            fresh, taken_rows = _marked(table.fresh), _marked(table.taken)
            _set(table.fresh, fresh - rows)
            _set(table.taken, taken_rows | (fresh & rows))
            copied = rows if table.first_places is None else rows & (taken_rows | fresh)
            self._copy(index, copied, late=late)

    def hand_over_marked(self, index: int) -> int:
        """Copy the marked rows of a table, and move their marks."""
        table = self._tables[index]
        if table.first_places is not None:
            raise ValueError(f"table {index}: not every row has a place, expected a full")
        fresh = _marked(table.fresh)
        _set(table.taken, _marked(table.taken) | fresh)
        _set(table.fresh, set())
        self._copy(index, fresh)
        return len(fresh)

    def stop(self) -> None:
        """Do nothing: everything is copied at once."""

    def left(self) -> list[Left]:
        """Return the rows that are marked and were not handed over, table by table."""
        copies = []
        for index, table in enumerate(self._tables):
            fresh, row_places = _marked(table.fresh), self._places[index]
            placed = sorted(fresh & row_places.keys())
            lists = placed, [row_places[row] for row in placed], sorted(fresh - row_places.keys())
            copies.append(Left(*map(_integers, lists)))
        return copies

    def finish(self, left: Sequence[Left]) -> None:
        """Copy the rows that are left, and move all marks to `taken`."""
        for index, (table, (ids, _, _)) in enumerate(zip(self._tables, left, strict=True)):
            self._copy(index, set(ids.tolist()), late=True)
            _set(table.taken, _marked(table.taken) | _marked(table.fresh))
            _set(table.fresh, set())
