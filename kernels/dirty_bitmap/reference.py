"""The dirty bitmap in plain Python integers: what the fast versions must equal."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["clear", "collect", "count", "mark", "mark_all", "merge", "swap"]


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
    bitmap.copy_(torch.tensor(signed, dtype=torch.int32))


def mark(bitmap: Tensor, ids: Tensor, *, rows: int) -> None:
    """Set the bits of `ids` (int32 or int64, any shape)."""
    wanted = ids.reshape(-1).tolist()
    for row in wanted:
        if not 0 <= row < rows:
            raise IndexError(f"ids: {row}, expected 0 <= id < {rows}")
    _write(bitmap, _read(bitmap) | set(wanted))


def mark_all(bitmap: Tensor, *, rows: int) -> None:
    """Set the bits of all rows."""
    _write(bitmap, set(range(rows)))


def merge(into: Tensor, other: Tensor) -> None:
    """Mark in `into` what is marked in `other`."""
    _write(into, _read(into) | _read(other))


def clear(bitmap: Tensor) -> None:
    """Mark no row."""
    _write(bitmap, set())


def count(bitmap: Tensor) -> int:
    """How many rows are marked."""
    return len(_read(bitmap))


def collect(bitmap: Tensor, *, rows: int, out: Tensor | None = None) -> Tensor:
    """The marked rows: int64 [n], ascending; in `out` if it is given."""
    ids = torch.tensor(sorted(_read(bitmap)), dtype=torch.int64)
    return ids if out is None else out.copy_(ids)


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange the contents of two bitmaps."""
    first, second = _read(a), _read(b)
    _write(a, second)
    _write(b, first)
