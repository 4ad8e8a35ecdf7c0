"""Dirty rows on a CPU: one pass over the bitmaps of all tables to count, and one to copy.

A table is cut into parts. Threads take part after part from a shared counter, inside one native
call without the GIL. A late or slow thread delays the others by one part at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recpoint.kernels.dirty_bitmap.cpu import PART_WORDS
from recpoint.kernels.dirty_bitmap.shapes import require_fit
from recpoint.kernels.dirty_rows.destination import Destination, row_bytes
from recpoint.kernels.native import library, team_size

__all__ = ["Tally", "count"]

_NO_ROW = (0, 0, 0)  # a destination


class Tally:
    """The result of `count`. The bitmaps must not change until the copy is done.

    Attributes:
        counts: the number of marked rows of each table.
    """

    def __init__(self, bitmaps: Sequence[Tensor], rows: Sequence[int]) -> None:
        tables: list[int] = []
        parts = 0
        for bitmap, expected in zip(bitmaps, rows, strict=True):
            if not bitmap.is_cpu:
                raise ValueError(f"bitmap: device {bitmap.device}, expected cpu")
            require_fit(bitmap, expected)
            words = bitmap.numel()
            tables += bitmap.data_ptr(), words, expected
            parts += -(-words // PART_WORDS)
        self._bitmaps = tuple(bitmaps)  # kept alive, because `_tables` holds their addresses
        self._rows = tuple(rows)
        # Neither numpy's arrays nor tensors: with cold caches, getting their addresses takes long.
        self._tables = array("q", tables)
        self._parts = array("q", bytes(8 * parts))
        counts = array("q", bytes(8 * len(self._rows)))
        library.count_tables(
            _address(self._tables), len(self._rows), _address(self._parts), _address(counts),
            min(max(parts, 1), team_size(sum(bitmap.nbytes for bitmap in bitmaps))),
        )  # fmt: skip
        self._counts = counts
        self.counts = tuple(counts)

    def copy(
        self,
        destinations: Sequence[Destination | None],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Copy the rows out of the tables.

        Args:
            destinations: one for each table, in the order given to `count`. None: no row of the
                table is wanted.
            meanwhile: this thread calls it once while other threads copy, and then takes part in
                the copy. It is also called if there is nothing to copy.

        Raises:
            ValueError: a destination does not fit its table; nothing was copied or called.
            RuntimeError: a bitmap was changed since it was counted; the copy must not be used.
            BaseException: `meanwhile` raised it; the rows are copied nevertheless.
        """
        arrays: list[int] = []  # three integers for each array, as in native.cpp
        places: list[int] = []
        # `meanwhile` may give a source other memory, so the old memory is kept until the end.
        storages: list[torch.UntypedStorage] = []
        total_bytes = 0
        for count, rows, destination in zip(self.counts, self._rows, destinations, strict=True):
            if destination is None or count == 0:
                places += _NO_ROW
                continue
            first = len(arrays) // 3
            for size, (source, room) in zip(
                row_bytes(destination, count=count, rows=rows), destination.arrays, strict=True
            ):
                storages.append(source.untyped_storage())
                arrays += source.data_ptr(), room.address, size
                total_bytes += 2 * count * size
            places += destination.ids.address, first, len(arrays) // 3
        all_places, all_arrays = array("q", places), array("q", arrays)
        # This is one call. Signal handlers can run only inside `meanwhile`, so they cannot end the
        # call early. After the call no thread writes to the caller's memory.
        changed = library.copy_tables(
            _address(self._tables), len(self._rows), _address(self._parts), _address(self._counts),
            _address(all_places), _address(all_arrays), len(arrays) // 3, team_size(total_bytes),
            meanwhile,
        )  # fmt: skip
        del storages
        if changed:
            raise RuntimeError(f"dirty bitmap: {changed} parts have changed while they were read")


def _address(values: array[int]) -> int:
    return values.buffer_info()[0]


def count(bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> Tally:
    """Count the marked rows of each table."""
    return Tally(bitmaps, rows)
