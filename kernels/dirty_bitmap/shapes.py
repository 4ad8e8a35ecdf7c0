"""What bitmaps, ids and tables must have in common."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["require_bitmap", "require_fit", "require_pair"]


def require_bitmap(name: str, bitmap: Tensor) -> None:
    """Refuse what is not a contiguous vector of int32 words."""
    if bitmap.dtype is not torch.int32 or bitmap.dim() != 1 or not bitmap.is_contiguous():
        raise ValueError(
            f"{name}: {bitmap.dtype} {tuple(bitmap.shape)}, expected a contiguous int32 vector"
        )


def require_fit(bitmap: Tensor, rows: int) -> None:
    """Refuse a bitmap that is not one of a table of `rows` rows."""
    require_bitmap("bitmap", bitmap)
    if bitmap.numel() != (rows + 31) // 32 or rows < 0:
        raise ValueError(f"bitmap: {bitmap.numel()} words, expected ceil({rows} / 32)")


def require_pair(a: Tensor, b: Tensor) -> None:
    """Refuse two bitmaps that are not of one table on one device."""
    require_bitmap("first bitmap", a)
    require_bitmap("second bitmap", b)
    if a.numel() != b.numel() or a.device != b.device:
        raise ValueError(
            f"bitmaps: {a.numel()} words on {a.device} and {b.numel()} words on {b.device},"
            " expected two of the same table"
        )
