"""Row states in half their bytes: each value rounded to the bfloat16 next to it (format §3.5)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_bfloat16"]

_LARGEST = float(torch.finfo(torch.bfloat16).max)


def to_bfloat16(values: Tensor) -> Tensor:
    """The bfloat16 next to each f32 value, ties to the even one; same shape.

    Signs stay, so that no second moment becomes negative; zero, infinity and NaN stay what they
    are; nothing finite becomes infinite. The error is at most 2^-8 of a value's magnitude, and at
    most 2^-134 below the smallest normal number.
    """
    finite = values.isfinite()
    within = torch.where(finite, values.clamp(-_LARGEST, _LARGEST), values)
    return within.to(torch.bfloat16)
