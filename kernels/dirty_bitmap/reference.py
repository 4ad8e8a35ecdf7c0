"""The dirty bitmap in plain Python integers: what the fast versions must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "clear",
    "collect",
    "collect_many",
    "count",
    "mark",
    "mark_features",
    "mark_many",
    "mark_new",
    "mark_nonzero",
    "merge",
]


def _read(bitmap: Tensor) -> set[int]:
    words = [word & 0xFFFFFFFF for word in bitmap.tolist()]
    return {
        32 * index + bit for index, word in enumerate(words) for bit in range(32) if word >> bit & 1
    }


def _write(bitmap: Tensor, marked: set[int]) -> None:
    words = [0] * bitmap.numel()
    for row in marked:
        words[row // 32] |= 1 << row % 32
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    bitmap.copy_(torch.tensor(signed, dtype=torch.int32, device="cpu"))


def mark(bitmap: Tensor, ids: Tensor, *, rows: int) -> None:
    """Set the bits of `ids` (int32 or int64, any shape)."""
    row_ids = ids.reshape(-1).tolist()
    for row in row_ids:
        if not 0 <= row < rows:
            raise IndexError(f"ids: {row}, expected 0 <= id < {rows}")
    _write(bitmap, _read(bitmap) | set(row_ids))


def mark_many(bitmaps: Sequence[Tensor], ids: Sequence[Tensor], *, rows: Sequence[int]) -> None:
    """`mark` for several tables; at an id out of range, the tables before it are marked."""
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
    """Set the bits of the ids of many features.

    A feature has the bags from its first up to its end, and bag b the ids from `offsets[b]` up to
    `offsets[b + 1]`. The features of one call are those of one lookup in many tables. An id of -1
    marks nothing. Any other id out of range marks row 0, which FBGEMM trains in its place.
    """
    row_ids, starts = ids.tolist(), offsets.tolist()
    for bitmap, (first, end), limit in zip(bitmaps, bags, rows, strict=True):
        of_feature = row_ids[starts[first] : starts[end]]
        rows_marked = {row if 0 <= row < limit else 0 for row in of_feature if row != -1}
        _write(bitmap, _read(bitmap) | rows_marked)


def mark_new(bitmap: Tensor, ids: Tensor | range, *, rows: int) -> Tensor:
    """Set the bits of `ids`; the positions of those that were not set."""
    marked = _read(bitmap)
    row_ids = list(ids) if isinstance(ids, range) else ids.tolist()
    new: list[int] = []
    for position, row in enumerate(row_ids):
        if not 0 <= row < rows:
            raise IndexError(f"ids: {row}, expected 0 <= id < {rows}")
        if row not in marked:
            new.append(position)
            marked.add(row)
    _write(bitmap, marked)
    return torch.tensor(new, dtype=torch.int64, device="cpu")


def mark_nonzero(bitmap: Tensor, values: Tensor, *, rows: int) -> None:
    """Set the bits of the rows of `values` that have a bit set."""
    data = values.contiguous().reshape(rows, -1).view(torch.uint8)
    rows_nonzero = {row for row, row_bytes in enumerate(data.tolist()) if any(row_bytes)}
    _write(bitmap, _read(bitmap) | rows_nonzero)


def merge(into: Tensor, other: Tensor) -> None:
    """Mark in `into` what is marked in `other`."""
    _write(into, _read(into) | _read(other))


def clear(bitmap: Tensor) -> None:
    """Mark no row."""
    _write(bitmap, set())


def count(bitmap: Tensor) -> int:
    """How many rows are marked."""
    return len(_read(bitmap))


def collect(bitmap: Tensor, *, rows: int) -> Tensor:
    """The marked rows: int64 [n], ascending."""
    return torch.tensor(sorted(_read(bitmap)), dtype=torch.int64, device="cpu")


def collect_many(bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> list[Tensor]:
    """The marked rows of each: int64 [n], ascending."""
    return [collect(bitmap, rows=limit) for bitmap, limit in zip(bitmaps, rows, strict=True)]
