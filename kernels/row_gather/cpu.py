"""Row gather, scatter and move on a CPU: one copy of known length for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.native import library, team_size
from recpoint.kernels.row_gather.shapes import require_rows, require_same_rows

__all__ = ["first_unordered", "gather", "move", "scatter"]


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]; nothing is copied if an id is out of range."""
    row_bytes = require_rows(source, ids, out)
    _check_ids("ids", ids, source.shape[0])
    _move(source, ids.data_ptr(), out, 0, row_bytes, ids.numel())


def move(source: Tensor, positions: Tensor, dest: Tensor, ids: Tensor) -> None:
    """dest[ids[i]] = source[positions[i]]; nothing is copied if an index is out of range."""
    require("positions", positions, torch.int64, 1)
    if not positions.is_cpu:
        raise ValueError(f"positions: device {positions.device}, expected cpu")
    if positions.numel() != ids.numel():
        raise ValueError(f"positions: {positions.numel()}, expected {ids.numel()} as ids")
    row_bytes = require_same_rows(dest, ids, source)
    _check_ids("positions", positions, source.shape[0])
    _check_ids("ids", ids, dest.shape[0])
    _move(source, positions.data_ptr(), dest, ids.data_ptr(), row_bytes, ids.numel())


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]; nothing is copied if an id is out of range."""
    row_bytes = require_rows(dest, ids, rows)
    _check_ids("ids", ids, dest.shape[0])
    _move(rows, 0, dest, ids.data_ptr(), row_bytes, ids.numel())


def first_unordered(ids: Tensor, start: int, stop: int) -> int:
    """The position of the first id out of range, or not above the one before it; -1: none."""
    require("ids", ids, torch.int64, 1)
    position: int = library.first_unordered(ids.data_ptr(), ids.numel(), start, stop)
    return position


def _move(source: Tensor, first: int, dest: Tensor, to: int, row_bytes: int, n: int) -> None:
    if n and row_bytes:
        threads = min(n, team_size(2 * n * row_bytes))
        library.move_rows(source.data_ptr(), first, dest.data_ptr(), to, row_bytes, n, threads)


def _check_ids(name: str, ids: Tensor, limit: int) -> None:
    wrong = library.first_outside(ids.data_ptr(), ids.numel(), limit)
    if wrong >= 0:
        raise IndexError(f"{name}: {int(ids[wrong])}, expected 0 <= id < {limit}")
