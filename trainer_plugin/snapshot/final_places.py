"""Moves rows that were copied before their cut to the places that a plain cut would have chosen.

Places are chosen when the window opens. At the cut, a place is a hole if its row was predicted and
never marked. A row that was marked and not predicted has no place; it lies in the tail, outside the
slot. `move_to_final_places` drops the holes, merges the tail in, and moves every array to its final
place. It runs in the background thread, before anything reads the slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recpoint.catalog.staging.slot import Placed
from recpoint.kernels import dirty_bitmap, row_gather

__all__ = ["Move", "MovedTable", "move_to_final_places"]

#: Rows are moved through a buffer of at most this size.
_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class MovedTable:
    """The rows of a table whose places change, or that has rows in the tail.

    Attributes:
        rows: rows of the table.
        dirty: bitmap of the rows that the checkpoint holds; nothing else uses it.
        ids: place of the final ids; None: the checkpoint holds every row and lists no ids.
        provisional_ids: place of the ids of all rows with a place; None: all rows have one.
        tail_ids: int64 [n], ascending: the rows of the tail.
    """

    rows: int
    dirty: Tensor
    ids: Placed | None
    provisional_ids: Placed | None
    tail_ids: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Move:
    """An array in the slot, and where it goes.

    Attributes:
        source: the array as it lies in the slot.
        target: its final place; it has as many rows as the checkpoint holds.
        table: the table of which the array has a row for each place; None: the array stays whole.
        tail: [n, ...]: rows of the array in the tail.
    """

    source: Placed
    target: Placed
    table: MovedTable | None = None
    tail: Tensor | None = None

    @property
    def goes_up(self) -> bool:
        """Whether the final place begins behind the present one."""
        return self.target.offset > self.source.offset


def move_to_final_places(data: Tensor, moves: Sequence[Move]) -> None:
    """Move arrays to their final places.

    Args:
        data: the slot's bytes, uint8 [n].
        moves: all arrays with rows or bytes, in the order in which they lie in the slot. The final
            places are in the same order. Each has room for its rows.
    """
    tables = {id(move.table): move.table for move in moves if move.table is not None}
    order = {key: _RowOrder(data, table) for key, table in tables.items()}
    for move in moves:
        if move.table is not None:
            _drop_holes(data, move, order[id(move.table)])
    # No array is overwritten before it is moved: an array that goes up ends before the final place
    # of the next begins, and that one has either gone up before or comes down later.
    for move in [move for move in reversed(moves) if move.goes_up]:
        _bring(data, move, order.get(id(move.table)))
    for move in [move for move in moves if not move.goes_up]:
        _bring(data, move, order.get(id(move.table)))
    for key, table in tables.items():
        if table.ids is not None:
            table.ids.view(data).copy_(order[key].ids)


class _RowOrder:
    """Which places of a table are no holes, and where the rows of the tail belong.

    Attributes:
        ids: int64 [n]: the rows that the checkpoint holds, ascending.
        kept: int64 [m]: the places that are no holes, ascending; None: there is no hole.
        kept_rows: m, also without holes.
        merged: bool [n]: whether the row comes from the tail; None: none does.
    """

    def __init__(self, data: Tensor, table: MovedTable) -> None:
        self.ids = dirty_bitmap.collect(table.dirty, rows=table.rows)
        tail = table.tail_ids.numel()
        placed: Tensor | None = None
        places = table.rows
        if table.provisional_ids is not None:
            # Copied, because arrays may be moved there.
            placed = table.provisional_ids.view(data).clone()
            places = placed.numel()
        self.kept_rows = self.ids.numel() - tail
        self.kept: Tensor | None = None
        if self.kept_rows < places:
            if placed is None:
                self.kept = self.ids
            else:
                words = table.dirty[placed >> 5]
                self.kept = ((words >> (placed & 31)) & 1).nonzero().reshape(-1)
        self.merged: Tensor | None = None
        if tail:
            self.merged = torch.zeros(self.ids.numel(), dtype=torch.bool, device="cpu")
            self.merged[torch.searchsorted(self.ids, table.tail_ids)] = True


def _rows(data: Tensor, offset: int, count: int, row_bytes: int) -> Tensor:
    return data[offset : offset + count * row_bytes].view(count, row_bytes)


def _chunks(count: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, _BUFFER_BYTES // row_bytes)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def _row_bytes(move: Move) -> int:
    return move.target.size_bytes // move.target.shape[0]


def _drop_holes(data: Tensor, move: Move, order: _RowOrder) -> None:
    """Move the rows that are no holes to the front of the array, in place."""
    if order.kept is None or not order.kept_rows:
        return
    size = _row_bytes(move)
    rows = _rows(data, move.source.offset, move.source.shape[0], size)
    for part in _chunks(order.kept_rows, size):
        block = torch.empty((part.stop - part.start, size), dtype=torch.uint8, device="cpu")
        row_gather.gather(rows, order.kept[part], block)  # kept places are never before their rank
        rows[part] = block


def _bring(data: Tensor, move: Move, order: _RowOrder | None) -> None:
    """Move the array, without holes now, to its final place, and merge the tail in."""
    source, target, start = move.source.offset, move.target.offset, data.data_ptr()
    if order is None:
        ctypes.memmove(start + target, start + source, move.target.size_bytes)
        return
    size = _row_bytes(move)
    if order.merged is None or move.tail is None:
        if source != target:
            ctypes.memmove(start + target, start + source, order.kept_rows * size)
        return
    tail = move.tail.contiguous().view(torch.uint8).reshape(-1, size)
    # First behind the room for the tail: then a row is read before its memory is written.
    behind = target + len(tail) * size
    ctypes.memmove(start + behind, start + source, order.kept_rows * size)
    rows = _rows(data, target, len(order.merged), size)
    own_rows = _rows(data, behind, order.kept_rows, size)
    from_tail = from_own = 0
    for part in _chunks(len(order.merged), size):
        is_tail = order.merged[part]
        tail_count = int(is_tail.sum())
        own_count = len(is_tail) - tail_count
        block = torch.empty((len(is_tail), size), dtype=torch.uint8, device="cpu")
        block[is_tail] = tail[from_tail : from_tail + tail_count]
        block[~is_tail] = own_rows[from_own : from_own + own_count]
        rows[part] = block
        from_tail += tail_count
        from_own += own_count
