"""Dirty rows, table by table and row by row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recpoint.kernels.dirty_bitmap import reference as dirty_bitmap
from recpoint.kernels.dirty_rows.destination import Destination, Room, row_bytes
from recpoint.kernels.row_gather import reference as row_gather

__all__ = ["Tally", "count"]


class Tally:
    """What `count` found."""

    def __init__(self, bitmaps: Sequence[Tensor], rows: Sequence[int]) -> None:
        self._tables = list(zip(bitmaps, rows, strict=True))
        self.counts = tuple(dirty_bitmap.count(bitmap) for bitmap in bitmaps)

    def copy(
        self,
        destinations: Sequence[Destination | None],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Copy the rows out."""
        for (bitmap, rows), count, destination in zip(
            self._tables, self.counts, destinations, strict=True
        ):
            if destination is None:
                continue
            row_bytes(destination, count=count, rows=rows)
            ids = dirty_bitmap.collect(bitmap, rows=rows)
            _fill(destination.ids, ids)
            for source, room in destination.arrays:
                out = torch.empty((count, *source.shape[1:]), dtype=source.dtype, device="cpu")
                row_gather.gather(source, ids, out)
                _fill(room, out)
        if meanwhile is not None:
            meanwhile()


def count(bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> Tally:
    """Count the marked rows of each table."""
    return Tally(bitmaps, rows)


def _fill(room: Room, array: Tensor) -> None:
    ctypes.memmove(room.address, array.data_ptr(), room.size_bytes)
