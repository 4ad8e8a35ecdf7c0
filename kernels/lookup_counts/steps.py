"""What a code stands for, and which arguments are allowed.

A code below 8 is the count. Any other has 3 bits of a fraction and 5 of an exponent, so the counts
of 8 codes in a row are evenly spaced, and each 8 codes double the space:
0, 1, … 15, 16, 18, … 30, 32, 36, …
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

__all__ = ["MOST", "require_counts", "values"]

#: Codes in which the space between counts stays the same.
_STEADY: Final = 8


def _count_of(code: int) -> int:
    if code < _STEADY:
        return code
    return (_STEADY + code % _STEADY) << (code // _STEADY - 1)


_COUNTS: Final = np.array([_count_of(code) for code in range(256)], np.float32)

#: The largest count that has a code.
MOST: Final = _count_of(255)


def values(codes: Tensor) -> Tensor:
    """Return the counts that codes stand for, exactly: f32 of the same shape.

    Args:
        codes: u8 of any shape, on the CPU.

    Raises:
        ValueError: codes have another dtype or lie elsewhere.
    """
    if codes.dtype is not torch.uint8 or not codes.is_cpu:
        raise ValueError(f"codes: {codes.dtype} on {codes.device}, expected torch.uint8 on cpu")
    return torch.from_numpy(np.take(_COUNTS, codes.numpy()))


def require_counts(codes: Tensor, ids: Tensor, start: int) -> None:
    """Refuse what cannot be counted; ids may still be out of range.

    Raises:
        ValueError: codes or ids have another form, or start is negative.
    """
    if codes.dtype is not torch.uint8 or codes.dim() != 1 or not codes.is_contiguous():
        raise ValueError(
            f"codes: {codes.dtype} of shape {tuple(codes.shape)}, expected torch.uint8 [rows]"
        )
    if not (codes.is_cpu and ids.is_cpu):
        raise ValueError(f"codes on {codes.device}, ids on {ids.device}, expected both on cpu")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids: dtype {ids.dtype}, expected torch.int32 or torch.int64")
    if start < 0:
        raise ValueError(f"start: {start}, expected 0 or more")
