"""Which rows of a table have changed: one bit a row.

A bitmap is an int32 tensor [ceil(rows / 32)]. Row r is bit r % 32 of word r // 32. Bits past `rows`
are always zero. All functions change bitmaps in place and work on the bitmap's device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recpoint.kernels.arguments import unsupported_device
from recpoint.kernels.dirty_bitmap import cpu

mark_tables = cpu.mark_tables

__all__ = [
    "clear",
    "collect",
    "collect_many",
    "count",
    "feature_marker",
    "mark",
    "mark_features",
    "mark_many",
    "mark_new",
    "mark_nonzero",
    "mark_tables",
    "marker",
    "merge",
    "new",
]


def new(rows: int, *, device: torch.device | str = "cpu") -> Tensor:
    """A bitmap of `rows` rows with no row marked: int32 [ceil(rows / 32)].

    Raises:
        ValueError: rows is negative.
    """
    if rows < 0:
        raise ValueError(f"rows: {rows}, expected 0 or more")
    return torch.zeros((rows + 31) // 32, dtype=torch.int32, device=device)


def mark(bitmap: Tensor, ids: Tensor, *, rows: int) -> None:
    """Set the bits of `ids`, an int32 or int64 tensor of any shape; duplicates are welcome.

    On a GPU nothing waits for the device, so an id that is out of range is not reported: it marks
    nothing and touches no memory (the lookup with the same id fails on its own).

    Raises:
        IndexError: on a CPU, an id is negative or >= rows; the bitmap is then unchanged.
        ValueError: the bitmap does not fit `rows`, or the ids are not int32 or int64.
    """
    if bitmap.is_cpu:
        cpu.mark(bitmap, ids, rows=rows)
    elif bitmap.is_cuda:
        from recpoint.kernels.dirty_bitmap import triton

        with torch.cuda.device_of(bitmap):  # Triton launches on the current device
            triton.mark(bitmap, ids, rows=rows)
    else:
        raise unsupported_device("bitmap", bitmap)


def marker(bitmap: Tensor, *, rows: int) -> Callable[[Tensor], None]:
    """A function of ids that does what `mark` does to this bitmap, with less to check each time.

    Raises:
        ValueError: the bitmap does not fit `rows`.
    """
    if bitmap.is_cpu:
        return cpu.marker(bitmap, rows=rows)
    return lambda ids: mark(bitmap, ids, rows=rows)


def mark_many(bitmaps: Sequence[Tensor], ids: Sequence[Tensor], *, rows: Sequence[int]) -> None:
    """`mark` for several tables, on a GPU in one launch.

    Args:
        bitmaps: one a table, all on one device.
        ids: for each table, int32 or int64 of any shape.
        rows: of each table.

    Raises:
        IndexError: on a CPU, an id is negative or >= the rows of its table. The bitmap of that
            table and those after it are unchanged.
        ValueError: a bitmap does not fit its rows, the ids are not int32 or int64, or the numbers
            of bitmaps, ids and rows differ.
    """
    if not bitmaps or bitmaps[0].is_cpu:
        cpu.mark_many(bitmaps, ids, rows=rows)
    elif bitmaps[0].is_cuda:
        from recpoint.kernels.dirty_bitmap import triton

        with torch.cuda.device_of(bitmaps[0]):  # Triton launches on the current device
            triton.mark_many(bitmaps, ids, rows=rows)
    else:
        raise unsupported_device("bitmaps", bitmaps[0])


def mark_features(
    bitmaps: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    bags: Sequence[tuple[int, int]],
    *,
    rows: Sequence[int],
) -> None:
    """Set the bits of the ids of many features that lie in one tensor, one feature after another.

    A feature has the bags from its first up to its end, and bag b the ids from `offsets[b]` up to
    `offsets[b + 1]`. The features of one call are those of one lookup in many tables. An id of -1
    marks nothing. Any other id out of range marks row 0, which FBGEMM trains in its place.

    On a GPU this is one launch, and nothing waits for the device.

    Args:
        bitmaps: for each feature, the bitmap of its table, all on one device; one may come twice.
        ids: int32 or int64 [n], on that device.
        offsets: int32 or int64 [bags + 1], ascending, on that device.
        bags: for each feature, its first bag and the end of its bags.
        rows: for each feature, the rows of its table, 1 or more.

    Raises:
        ValueError: a bitmap does not fit its rows; ids or offsets are not int32 or int64 vectors;
            or the numbers of bitmaps, bags and rows do not fit.
    """
    if not bitmaps or bitmaps[0].is_cpu:
        cpu.mark_features(bitmaps, ids, offsets, bags, rows=rows)
    elif bitmaps[0].is_cuda:
        from recpoint.kernels.dirty_bitmap import triton

        with torch.cuda.device_of(bitmaps[0]):  # Triton launches on the current device
            triton.mark_features(bitmaps, ids, offsets, bags, rows=rows)
    else:
        raise unsupported_device("bitmaps", bitmaps[0])


def feature_marker(
    bitmaps: Sequence[Tensor], *, rows: Sequence[int]
) -> Callable[[Tensor, Tensor, Sequence[tuple[int, int]]], None]:
    """A function of ids, offsets and bags that does what `mark_features` does to these bitmaps.

    On a CPU, one native call marks all features. The bitmaps are checked once, here. Bags are
    checked once for each list, so a list that is given again must not have been changed.

    Raises:
        ValueError: a bitmap does not fit its rows, or their numbers differ.
    """
    if not bitmaps or bitmaps[0].is_cpu:
        return cpu.FeatureMarker(bitmaps, rows=rows)
    return lambda ids, offsets, bags: mark_features(bitmaps, ids, offsets, bags, rows=rows)


def mark_new(bitmap: Tensor, ids: Tensor | range, *, rows: int) -> Tensor:
    """Set the bits of `ids`, and say which of them were not set: positions in ids, int64 [m].

    Positions ascend. Of an id that comes twice only the first is new.

    Args:
        bitmap: of a table of `rows` rows, on the CPU.
        ids: int64 [n] on the CPU, or a range of step 1.
        rows: rows of the table.

    Raises:
        IndexError: an id is negative or >= rows; the bitmap is then unchanged.
        ValueError: the bitmap does not fit `rows`, or the ids are not as said.
    """
    if not bitmap.is_cpu:
        raise ValueError(f"bitmap: device {bitmap.device}, expected cpu")
    return cpu.mark_new(bitmap, ids, rows=rows)


def mark_nonzero(bitmap: Tensor, values: Tensor, *, rows: int) -> None:
    """Set the bits of the rows that are not all zeros, in memory of the CPU.

    A row with a -0.0 counts as one that is not: more is marked than has to be, never less.

    Args:
        bitmap: of a table of `rows` rows, on the CPU.
        values: [rows, *e] of any dtype, on the CPU; a dense gradient, for instance.
        rows: rows of the table.

    Raises:
        ValueError: bitmap or values do not fit `rows`, or are elsewhere.
    """
    if not bitmap.is_cpu:
        raise ValueError(f"bitmap: device {bitmap.device}, expected cpu")
    cpu.mark_nonzero(bitmap, values, rows=rows)


def merge(into: Tensor, other: Tensor) -> None:
    """Mark in `into` what is marked in `other`, a bitmap of the same table on the same device."""
    if into.is_cpu:
        cpu.merge(into, other)
    elif into.is_cuda:
        from recpoint.kernels.dirty_bitmap import triton

        with torch.cuda.device_of(into):  # Triton launches on the current device
            triton.merge(into, other)
    else:
        raise unsupported_device("into", into)


def clear(bitmap: Tensor) -> None:
    """Mark no row."""
    if bitmap.is_cpu:
        cpu.clear(bitmap)
    elif bitmap.is_cuda:
        from recpoint.kernels.dirty_bitmap import triton

        with torch.cuda.device_of(bitmap):  # Triton launches on the current device
            triton.clear(bitmap)
    else:
        raise unsupported_device("bitmap", bitmap)


def count(bitmap: Tensor) -> int:
    """How many rows are marked. Waits for the device."""
    if bitmap.is_cpu:
        return cpu.count(bitmap)
    if bitmap.is_cuda:
        from recpoint.kernels.dirty_bitmap import triton

        with torch.cuda.device_of(bitmap):  # Triton launches on the current device
            return triton.count(bitmap)
    raise unsupported_device("bitmap", bitmap)


def collect(bitmap: Tensor, *, rows: int) -> Tensor:
    """The marked rows: int64 [n], ascending, on the bitmap's device. Waits for the device.

    Args:
        bitmap: of a table of `rows` rows.
        rows: rows of the table.
    """
    if bitmap.is_cpu:
        return cpu.collect(bitmap, rows=rows)
    if bitmap.is_cuda:
        from recpoint.kernels.dirty_bitmap import triton

        with torch.cuda.device_of(bitmap):  # Triton launches on the current device
            return triton.collect(bitmap, rows=rows)
    raise unsupported_device("bitmap", bitmap)


def collect_many(bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> list[Tensor]:
    """The marked rows of each: int64 [n], ascending, on the bitmaps' device. Waits for it once.

    Args:
        bitmaps: of many tables, all on one device.
        rows: rows of each table.

    Raises:
        ValueError: the bitmaps are on several devices, or one does not fit its table.
    """
    if not any(bitmap.is_cuda for bitmap in bitmaps):
        return [collect(bitmap, rows=limit) for bitmap, limit in zip(bitmaps, rows, strict=True)]
    from recpoint.kernels.dirty_bitmap import triton

    with torch.cuda.device_of(bitmaps[0]):  # Triton launches on the current device
        return triton.collect_many(bitmaps, rows=rows)
