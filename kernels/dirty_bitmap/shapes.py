"""What bitmaps, ids and tables must have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "require_bags",
    "require_bitmap",
    "require_bitmaps",
    "require_features",
    "require_fit",
    "require_lookup",
    "require_pair",
]


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


def require_features(
    bitmaps: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    bags: Sequence[tuple[int, int]],
    rows: Sequence[int],
) -> None:
    """Refuse ids of features that are not as `mark_features` takes them."""
    require_bitmaps(bitmaps, rows)
    require_lookup(ids, offsets)
    require_bags(bags, offsets, features=len(bitmaps))


def require_bitmaps(bitmaps: Sequence[Tensor], rows: Sequence[int]) -> None:
    """Refuse bitmaps of features that do not fit their tables, or are on several devices."""
    for bitmap, count in zip(bitmaps, rows, strict=True):
        require_fit(bitmap, count)
        if count == 0 or bitmap.device != bitmaps[0].device:
            raise ValueError(
                f"bitmaps: {count} rows on {bitmap.device} beside {bitmaps[0].device}, expected 1 "
                "row or more, on one device a call"
            )


def require_lookup(ids: Tensor, offsets: Tensor) -> None:
    """Refuse ids and offsets that are not vectors of int32 or int64."""
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != 1:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected a vector of int32 or int64"
            )


def require_bags(bags: Sequence[tuple[int, int]], offsets: Tensor, *, features: int) -> None:
    """Refuse bags that are not two ascending positions in `offsets` for each feature."""
    are_inside = all(0 <= first <= end < offsets.numel() for first, end in bags)
    if len(bags) != features or not are_inside:
        raise ValueError(
            f"bags: {list(bags)!s:.200}, expected two ascending indexes of {offsets.numel()} "
            f"offsets for each of {features} features"
        )


def require_pair(a: Tensor, b: Tensor) -> None:
    """Refuse two bitmaps that are not of one table on one device."""
    require_bitmap("first bitmap", a)
    require_bitmap("second bitmap", b)
    if a.numel() != b.numel() or a.device != b.device:
        raise ValueError(
            f"bitmaps: {a.numel()} words on {a.device} and {b.numel()} words on {b.device},"
            " expected two of the same table"
        )
