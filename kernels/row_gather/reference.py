"""Row gather and scatter, row by row."""

from __future__ import annotations

from torch import Tensor

__all__ = ["gather", "scatter"]


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]."""
    for i, row in enumerate(ids.tolist()):
        out[i] = source[row]


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]."""
    for i, row in enumerate(ids.tolist()):
        dest[row] = rows[i]
