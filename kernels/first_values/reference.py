"""First values of rows, in operations of torch on whole tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.first_values.shapes import require_columns

__all__ = ["uniform_values"]


def uniform_values(
    key: int,
    ids: Tensor,
    *,
    low: float,
    high: float,
    row_values: int,
    columns: range,
    dtype: torch.dtype,
) -> Tensor:
    """Return values from a uniform distribution: [n, columns], of the dtype, on the CPU."""
    require_integers("ids", ids)
    require_columns(columns)
    numbers = torch.arange(columns.start + 1, columns.stop + 1, dtype=torch.int64, device="cpu")
    offsets = numbers + _mixed(torch.tensor([_signed(key)], device="cpu"))
    hashes = _mixed((ids * row_values)[:, None] + offsets)
    values = low + _moved_down(hashes, 40).double() * 2.0**-24 * (high - low)
    return values if dtype == torch.float64 else values.float().to(dtype)


def _mixed(words: Tensor) -> Tensor:
    """Return the SplitMix64 hash of each word; int64 holds the bits of a word."""
    words = words * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ _moved_down(words, shift)) * _signed(factor)
    return words ^ _moved_down(words, 31)


def _moved_down(words: Tensor, shift: int) -> Tensor:
    """Move the bits of each word down; zeros follow, whatever its sign."""
    return (words >> shift) & ((1 << (64 - shift)) - 1)


def _signed(word: int) -> int:
    """Return the number of int64 that has the bits of a word."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
