"""Row gather and scatter, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["first_unordered", "gather", "gather_many", "move", "scatter"]


def first_unordered(ids: Tensor, start: int, stop: int) -> int:
    """The position of the first id out of range, or not above the one before it; -1: none."""
    listed = ids.tolist()
    for i, row in enumerate(listed):
        if not start <= row < stop or (i > 0 and row <= listed[i - 1]):
            return i
    return -1


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]."""
    for i, row in enumerate(ids.tolist()):
        out[i] = source[row]


def gather_many(sources: Sequence[Tensor], ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """`gather` for each source."""
    for source, row_ids, out in zip(sources, ids, outs, strict=True):
        gather(source, row_ids, out)


def move(source: Tensor, positions: Tensor, dest: Tensor, ids: Tensor) -> None:
    """dest[ids[i]] = source[positions[i]]."""
    for position, row in zip(positions.tolist(), ids.tolist(), strict=True):
        dest[row] = source[position]


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]."""
    for i, row in enumerate(ids.tolist()):
        dest[row] = rows[i]
