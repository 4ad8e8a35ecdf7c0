"""Counting the dirty rows of many tables, then copying them out: the two halves of a stall.

`row_gather.gather(source, dirty_bitmap.collect(bitmap))` for every table and row state of a
snapshot at once. On CPUs only: on a GPU ids and rows go through a buffer of the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recpoint.kernels.dirty_rows import cpu
from recpoint.kernels.dirty_rows.destination import Destination, Room, into

__all__ = ["Destination", "Room", "Tally", "count", "into"]

Tally = cpu.Tally


def count(bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> Tally:
    """Count the marked rows of each table.

    Args:
        bitmaps: of each table, int32 [ceil(rows / 32)], on the CPU (`dirty_bitmap`).
        rows: rows of each table.

    Returns:
        `Tally.counts`, and what `Tally.copy` needs to copy those rows.

    Raises:
        ValueError: a bitmap does not fit its table.
    """
    return cpu.count(bitmaps, rows=rows)
