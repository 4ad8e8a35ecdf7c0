"""The dirty bitmap on a CPU.

The functions that change a bitmap keep the GIL. So no bit is lost if the trainer's thread marks
while a background thread merges a refused checkpoint back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.dirty_bitmap.shapes import (
    require_bags,
    require_bitmap,
    require_bitmaps,
    require_fit,
    require_lookup,
    require_pair,
)
from recpoint.kernels.native import library, team_size

__all__ = [
    "PART_WORDS",
    "FeatureMarker",
    "clear",
    "collect",
    "count",
    "mark",
    "mark_features",
    "mark_many",
    "mark_new",
    "mark_nonzero",
    "mark_tables",
    "marker",
    "merge",
]

_INT32 = torch.int32
_INT64 = torch.int64

#: Words of a bitmap that are counted and collected together. The same as PART_WORDS of bits.h.
PART_WORDS: Final = 2048


def mark(bitmap: Tensor, ids: Tensor, *, rows: int) -> None:
    """Set the bits of `ids` (int32 or int64, any shape); none is set if an id is out of range.

    This runs for each lookup of a training step, so the checks are complete but cheap.
    """
    if bitmap.dtype is not _INT32 or not bitmap.is_contiguous():
        require_bitmap("bitmap", bitmap)
    if bitmap.numel() != (rows + 31) >> 5:
        require_fit(bitmap, rows)
    stride = 1
    if not ids.is_cpu:
        ids = ids.cpu()
    if not ids.is_contiguous():
        # The ids of a table are usually a column of a batch. A copy would cost more than all else.
        if ids.dim() == 1:
            stride = ids.stride(0)
        else:
            ids = ids.contiguous()
    if ids.dtype is _INT64:
        wrong = library.mark64(bitmap.data_ptr(), ids.data_ptr(), ids.numel(), stride, rows)
    elif ids.dtype is _INT32:
        wrong = library.mark32(bitmap.data_ptr(), ids.data_ptr(), ids.numel(), stride, rows)
    else:
        raise ValueError(f"ids: dtype {ids.dtype}, expected torch.int32 or torch.int64")
    if wrong >= 0:
        raise IndexError(f"ids: {int(ids.reshape(-1)[wrong])}, expected 0 <= id < {rows}")


def mark_tables(*tables: int) -> int:
    """Mark int64 ids of several tables, for callers that have checked everything but the ids.

    Args:
        tables: four integers for each table: the address of its bitmap, the address of the ids
            (contiguous), the number of ids, the rows of the table.

    Returns:
        -1, or the index of the first table with an id out of range. That table and the tables after
        it are not marked.
    """
    return int(library.mark_tables(*tables))


def marker(bitmap: Tensor, *, rows: int) -> Callable[[Tensor], None]:
    """`mark` for one bitmap and many batches. The bitmap is checked once, here."""
    require_fit(bitmap, rows)
    address, kernel, int64 = bitmap.data_ptr(), library.mark64, _INT64

    def mark_ids(ids: Tensor) -> None:
        # This runs for each table of each step, after work that has filled the caches with other
        # data. So it touches as little memory as possible.
        if ids.dtype is int64 and ids.is_cpu and ids.is_contiguous():
            if kernel(address, ids.data_ptr(), ids.numel(), 1, rows) < 0:
                return
        mark(bitmap, ids, rows=rows)  # the closure keeps the bitmap alive, so `address` stays valid

    return mark_ids


def mark_many(bitmaps: Sequence[Tensor], ids: Sequence[Tensor], *, rows: Sequence[int]) -> None:
    """`mark` for several tables. If an id is out of range, the tables before it are marked."""
    for bitmap, table_ids, length in zip(bitmaps, ids, rows, strict=True):
        mark(bitmap, table_ids, rows=length)


def mark_features(
    bitmaps: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    bags: Sequence[tuple[int, int]],
    *,
    rows: Sequence[int],
) -> None:
    """Set the bits of the ids of many features that lie in one tensor; see the reference."""
    FeatureMarker(bitmaps, rows=rows)(ids, offsets, bags)


class FeatureMarker:
    """`mark_features` for the same bitmaps and many lookups; one native call marks a lookup.

    The bitmaps are checked once, here.

    Args:
        bitmaps: for each feature, the bitmap of its table, on the CPU; one may come twice.
        rows: for each feature, the rows of its table, 1 or more.

    Raises:
        ValueError: a bitmap does not fit its rows, or their numbers differ.
    """

    __slots__ = ("_bags", "_bitmaps", "_features", "_most_offsets", "_rows")

    def __init__(self, bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> None:
        require_bitmaps(bitmaps, rows)
        self._bitmaps = bitmaps  # kept alive, so that the addresses stay valid
        self._rows = rows
        self._bags: Sequence[tuple[int, int]] | None = None
        self._most_offsets = 0
        self._features = torch.empty(0, dtype=torch.int64, device="cpu")

    def __call__(self, ids: Tensor, offsets: Tensor, bags: Sequence[tuple[int, int]]) -> None:
        """Set the bits of the ids of one lookup.

        Args:
            ids: int32 or int64 [n].
            offsets: int32 or int64 [bags + 1], ascending.
            bags: for each feature, its first bag and the end of its bags. The caller must not
                change a list that it gives again.

        Raises:
            ValueError: ids or offsets are not int32 or int64 vectors, or the bags do not fit.
        """
        require_lookup(ids, offsets)
        if bags is not self._bags or offsets.numel() < self._most_offsets:
            require_bags(bags, offsets, features=len(self._bitmaps))
            self._features = torch.tensor(
                [
                    (bitmap.data_ptr(), limit, *ends)
                    for bitmap, limit, ends in zip(self._bitmaps, self._rows, bags, strict=True)
                ],
                dtype=torch.int64,
                device="cpu",
            )
            self._most_offsets = max((end for _, end in bags), default=-1) + 1
            self._bags = bags
        ids, offsets = ids.contiguous(), offsets.contiguous()
        library.mark_features(
            self._features.data_ptr(),
            len(self._bitmaps),
            ids.data_ptr(),
            ids.dtype is _INT64,
            ids.numel(),
            offsets.data_ptr(),
            offsets.dtype is _INT64,
        )


def mark_new(bitmap: Tensor, ids: Tensor | range, *, rows: int) -> Tensor:
    """Set the bits of `ids`. Return the positions of the ids whose bits were not set before."""
    require_fit(bitmap, rows)
    address, first, n = 0, 0, len(ids)
    if isinstance(ids, range):
        if ids.step != 1:
            raise ValueError(f"ids: {ids}, expected a range of step 1")
        first = ids.start
        if n and (first < 0 or ids.stop > rows):
            raise IndexError(f"ids: {ids}, expected 0 <= id < {rows}")
    else:
        require("ids", ids, torch.int64, 1)
        if not ids.is_cpu:
            raise ValueError(f"ids: device {ids.device}, expected cpu")
        address = ids.data_ptr()
    positions = torch.empty(n, dtype=torch.int64, device="cpu")
    if n == 0:
        return positions
    new = library.mark_new(bitmap.data_ptr(), address, first, n, rows, positions.data_ptr())
    if new < 0:
        assert not isinstance(ids, range)
        wrong = ids[(ids < 0) | (ids >= rows)]
        raise IndexError(f"ids: {int(wrong[0])}, expected 0 <= id < {rows}")
    return positions[:new]


def mark_nonzero(bitmap: Tensor, values: Tensor, *, rows: int) -> None:
    """Mark the rows of `values` in which any bit is set.

    The rows are read without the GIL, into a bitmap of their own. Only the merge holds the GIL.
    """
    require_fit(bitmap, rows)
    if values.dim() < 1 or values.shape[0] != rows or not values.is_cpu:
        raise ValueError(
            f"values: {tuple(values.shape)} on {values.device}, expected {rows} rows on the CPU"
        )
    if rows == 0:
        return
    values = values.contiguous()
    nonzero_bits = torch.empty_like(bitmap)
    library.find_nonzero(
        values.data_ptr(),
        values.nbytes // rows,
        rows,
        nonzero_bits.data_ptr(),
        team_size(values.nbytes),
    )
    library.merge_bits(bitmap.data_ptr(), nonzero_bits.data_ptr(), bitmap.numel())


def merge(into: Tensor, other: Tensor) -> None:
    """Mark in `into` the rows that are marked in `other`."""
    require_pair(into, other)
    library.merge_bits(into.data_ptr(), other.data_ptr(), into.numel())


def clear(bitmap: Tensor) -> None:
    """Clear the bits of all rows."""
    require_bitmap("bitmap", bitmap)
    library.clear_bits(bitmap.data_ptr(), bitmap.numel())


def count(bitmap: Tensor) -> int:
    """The number of marked rows."""
    require_bitmap("bitmap", bitmap)
    return _count(bitmap)[1]


def collect(bitmap: Tensor, *, rows: int) -> Tensor:
    """The marked rows: int64 [n], ascending.

    The first pass counts the marked rows of each part, so that the result has its exact size. The
    second pass writes the ids. A part writes at most as many ids as it counted, even if a bit is
    set in between.
    """
    require_fit(bitmap, rows)
    counts, total = _count(bitmap)
    ids = torch.empty(total, dtype=torch.int64, device="cpu")
    changed = library.collect_bits(
        bitmap.data_ptr(), bitmap.numel(), counts.data_ptr(), ids.data_ptr(), _threads(bitmap)
    )
    if changed:
        raise RuntimeError(
            f"bitmap: {changed} parts were changed while it was collected; hold it still"
        )
    return ids


def _count(bitmap: Tensor) -> tuple[Tensor, int]:
    """The numbers of marked rows: of each part (int64) and of all parts."""
    parts = -(-bitmap.numel() // PART_WORDS)
    counts = torch.empty(parts, dtype=torch.int64, device="cpu")
    total = library.count_bits(
        bitmap.data_ptr(), bitmap.numel(), counts.data_ptr(), _threads(bitmap)
    )
    return counts, int(total)


def _threads(bitmap: Tensor) -> int:
    return team_size(32 * bitmap.nbytes)
