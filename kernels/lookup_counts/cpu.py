"""Counts of lookups in one compiled pass, which keeps the GIL as marking does."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.lookup_counts.steps import require_counts
from recpoint.kernels.native import library

__all__ = ["count"]


def count(codes: Tensor, ids: Tensor, *, start: int) -> None:
    """Count one lookup of a row for each id that names it, in place."""
    require_counts(codes, ids, start)
    ids = ids.contiguous()
    kernel = library.count_lookups64 if ids.dtype is torch.int64 else library.count_lookups32
    wrong = kernel(codes.data_ptr(), codes.numel(), ids.data_ptr(), ids.numel(), start)
    if wrong >= 0:
        raise IndexError(f"ids: {int(ids.reshape(-1)[wrong])}, expected 0 <= id < {codes.numel()}")
