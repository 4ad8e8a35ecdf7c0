"""What table, ids and rows must have in common."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recpoint.kernels.arguments import require, require_dense

__all__ = ["require_rows", "require_same_rows"]


def require_rows(table: Tensor, ids: Tensor, part: Tensor) -> int:
    """Check table [R, *e], ids int64 [n] and part [n, *e]; return the bytes of one row.

    Raises:
        ValueError: names what does not fit.
    """
    row_bytes = require_same_rows(table, ids, part)
    if part.shape[0] != ids.numel():
        raise ValueError(f"rows: {part.shape[0]} rows for {ids.numel()} ids")
    return row_bytes


def require_same_rows(table: Tensor, ids: Tensor, part: Tensor) -> int:
    """The same for a part [m, *e] with any number of rows."""
    require("ids", ids, torch.int64, 1)
    if table.dim() < 1 or part.dim() < 1 or table.shape[1:] != part.shape[1:]:
        raise ValueError(f"rows: shape {tuple(part.shape)} does not fit {tuple(table.shape)}")
    if table.dtype != part.dtype:
        raise ValueError(f"rows: dtype {part.dtype}, expected {table.dtype}")
    if table.device != part.device or table.device != ids.device:
        raise ValueError(
            f"devices: table on {table.device}, ids on {ids.device}, rows on {part.device}"
        )
    require_dense("table", table)
    require_dense("rows", part)
    return table.element_size() * math.prod(table.shape[1:])
