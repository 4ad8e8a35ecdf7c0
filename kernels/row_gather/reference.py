"""Row gather and scatter, row by row."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["gather", "gather_many", "move", "scatter"]


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]."""
    for i, row in enumerate(ids.tolist()):
        out[i] = source[row]


def gather_many(sources: Sequence[Tensor], ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """`gather` for each source."""
    for source, some, out in zip(sources, ids, outs, strict=True):
        gather(source, some, out)


def move(source: Tensor, positions: Tensor, dest: Tensor, ids: Tensor) -> None:
    """dest[ids[i]] = source[positions[i]]."""
    for position, row in zip(positions.tolist(), ids.tolist(), strict=True):
        dest[row] = source[position]


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]."""
    for i, row in enumerate(ids.tolist()):
        dest[row] = rows[i]
