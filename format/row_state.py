"""Halves the bytes of row states: rounds each value to the nearest bfloat16 (format §3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_bfloat16"]


_PART = 1 << 15
_INFINITY = 0x7F80
_LARGEST = float(torch.finfo(torch.bfloat16).max)


def to_bfloat16(values: Tensor) -> Tensor:
    """Return the nearest bfloat16 of each f32 value, ties to even; same shape, on the CPU.

    Signs stay, so no second moment becomes negative. Zero, infinity and NaN stay what they are. No
    finite value becomes infinite. The error is at most 2^-8 of a value's magnitude, and at most
    2^-134 for values below the smallest normal number.
    """
    rounded = torch.empty(values.shape, dtype=torch.bfloat16, device="cpu")
    # Each part stays in the caches, because reading fresh memory costs more than the rounding.
    parts = zip(values.reshape(-1).split(_PART), rounded.view(-1).split(_PART), strict=True)
    for part, target in parts:
        target.copy_(part)  # rounds to nearest, ties to even
        magnitudes = target.view(torch.int16) & 0x7FFF
        if bool((magnitudes >= _INFINITY).any()):
            finite = part.clamp(-_LARGEST, _LARGEST)
            target.copy_(torch.where(part.isfinite(), finite, part))
    return rounded
