"""Scale, offset and codes of one row by its ends, on a CPU (format §3.2).

The minimum and maximum are taken of integer keys that order binary32 values as numbers (−0 below
+0), because a compiler may vectorize integer minima but not floating ones, whose result for NaN and
±0 depends on the order. The keys also show NaN and infinities: they lie outside the finite ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from recpoint.kernels.intrinsics import compiled, float_from_bits, pointer
from recpoint.kernels.quantize import binary16
from recpoint.kernels.quantize.method import WIDEST_STEP

__all__ = ["code_row", "plain_parameters", "row_ends"]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY_KEY = np.int32(0x7F800000)
_MINUS_INFINITY_KEY = np.int32(-0x7F800001)
_MINUS_ZERO_KEY = np.int32(-1)
_TINY = np.float32(2.0**-126)
_LARGE = np.float32(2.0**126)
_HALF = np.float32(0.5)
_ZERO = np.float32(0.0)
_WIDEST_STEP = np.float32(WIDEST_STEP)


@compiled(nogil=True)
def row_ends(address: int, dim: int) -> tuple[np.int32, np.int32]:
    """The smallest and the largest integer key of the row at `address`."""
    bit_patterns = carray(pointer(address), dim, np.int32)
    low_key = _MAGNITUDE
    high_key = np.int32(~_MAGNITUDE)
    for k in range(dim):
        pattern = bit_patterns[k]
        key = np.int32(pattern ^ (np.int32(pattern >> 31) & _MAGNITUDE))
        low_key = min(low_key, key)
        high_key = max(high_key, key)
    return low_key, high_key


@compiled(nogil=True)
def plain_parameters(
    low_key: np.int32, high_key: np.int32, levels: np.float32, symmetric: bool, half: bool
) -> tuple[np.float32, np.float32, bool, bool]:
    """Scale, offset, exact and wide of a row with these ends; scale 0 if it has no codes."""
    if low_key <= _MINUS_INFINITY_KEY or high_key >= _INFINITY_KEY:
        return _ZERO, _ZERO, True, False
    low = float_from_bits(np.int32(low_key ^ (np.int32(low_key >> 31) & _MAGNITUDE)))
    high = float_from_bits(np.int32(high_key ^ (np.int32(high_key >> 31) & _MAGNITUDE)))
    if low == high:
        if low_key == _MINUS_ZERO_KEY:
            return _ZERO, _ZERO, True, False
        fits = binary16.round_down(low) == low and np.float32(abs(low)) <= binary16.LARGEST
        return _ZERO, low, False, half and not fits
    span = np.float32(high - low)
    if not (span >= np.float32(_TINY * levels) and span <= _LARGE):
        return _ZERO, _ZERO, True, False
    if symmetric:
        high = max(np.float32(abs(low)), np.float32(abs(high)))
        low = np.float32(-high)
        span = np.float32(high - low)
        if span > _LARGE:
            return _ZERO, _ZERO, True, False
    scale = np.float32(span / levels)
    if not half:
        return scale, low, False, False
    half_offset = binary16.round_down(low)
    half_scale = binary16.round_up(np.float32(np.float32(high - half_offset) / levels))
    if (
        half_scale <= np.float32(scale * _WIDEST_STEP)
        and half_scale <= binary16.LARGEST
        and np.float32(abs(half_offset)) <= binary16.LARGEST
    ):
        return half_scale, half_offset, False, False
    return scale, low, False, True


@compiled(nogil=True)
def code_row(
    values: Any, dim: int, scale: np.float32, offset: np.float32, top: np.float32, codes: Any
) -> None:
    """The codes of a row, for finite parameters and a scale above 0."""
    for k in range(dim):
        place = np.float32(np.float32(np.float32(values[k] - offset) / scale) + _HALF)
        place = place if place < top else top
        place = place if place > _ZERO else _ZERO
        codes[k] = np.uint8(np.int32(place))  # not negative: dropping the fraction is floor
