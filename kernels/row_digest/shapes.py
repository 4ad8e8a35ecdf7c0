"""Constants of format §3.6, and which arguments can be digested."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require, require_dense

__all__ = ["FIRST", "FOLD", "LAST", "MASK", "require_digestible"]

MASK: Final = 2**64 - 1

# Odd, so that no multiplication loses a bit. FOLD is the golden ratio's, LAST is splitmix64's.
FIRST: Final = 0xD6E8FEB86659FD93
FOLD: Final = 0x9E3779B97F4A7C15
LAST: Final = 0xBF58476D1CE4E5B9


def require_digestible(rows: Tensor, ids: Tensor | int) -> tuple[int, int]:
    """(rows, bytes of a row).

    Raises:
        ValueError: the rows are not contiguous on the CPU, or the ids do not fit them.
    """
    if not rows.is_cpu or rows.dim() < 1:
        raise ValueError(f"rows: {tuple(rows.shape)} on {rows.device}, expected [n, …] on a CPU")
    require_dense("rows", rows)
    n = rows.shape[0]
    if not isinstance(ids, int):
        require("ids", ids, torch.int64, 1)
        if ids.numel() != n or not ids.is_cpu:
            raise ValueError(f"ids: {ids.numel()} on {ids.device} for {n} rows, expected one each")
    return n, rows.nbytes // n if n else 0
