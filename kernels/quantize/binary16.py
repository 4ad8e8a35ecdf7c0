"""Rounding of binary32 values to those of binary16, for CPU kernels.

Results are binary32. A magnitude beyond the largest of binary16 comes back above `LARGEST`: callers
test for that.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from recpoint.kernels.intrinsics import bits_of_float, compiled, float_from_bits

__all__ = ["LARGEST", "nearest", "round_down", "round_up"]

LARGEST: Final = np.float32(65504.0)

_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
#: The smallest normal magnitude; below it lie multiples of 2^-24.
_NORMAL = np.float32(2.0**-14)
_UNITS = np.float32(2.0**24)
_UNIT = np.float32(2.0**-24)
#: A binary32 has 13 bits of fraction more.
_REST = np.int32(0x1FFF)


@compiled(nogil=True)
def toward_zero(magnitude: np.float32) -> np.float32:
    if magnitude >= _NORMAL:
        return np.float32(float_from_bits(np.int32(bits_of_float(magnitude) & ~_REST)))
    return np.float32(np.float32(np.int32(np.float32(magnitude * _UNITS))) * _UNIT)


@compiled(nogil=True)
def from_zero(magnitude: np.float32) -> np.float32:
    if magnitude >= _NORMAL:
        return np.float32(float_from_bits(np.int32((bits_of_float(magnitude) + _REST) & ~_REST)))
    units = np.float32(magnitude * _UNITS)  # exact: a power of two, and the result is normal
    whole = np.float32(np.int32(units))
    if whole < units:
        whole = np.float32(whole + _ONE)
    return np.float32(whole * _UNIT)


@compiled(nogil=True)
def round_down(value: np.float32) -> np.float32:
    """The largest value of binary16 that is not above a finite `value`; -0 stays -0."""
    if value > _ZERO:
        return np.float32(toward_zero(value))
    if value < _ZERO:
        return np.float32(-from_zero(np.float32(-value)))
    return value


@compiled(nogil=True)
def round_up(value: np.float32) -> np.float32:
    """The smallest value of binary16 that is not below a finite `value`, which is not negative."""
    return np.float32(from_zero(value))


@compiled(nogil=True)
def nearest(value: np.float32) -> np.float32:
    """The value of binary16 next to a finite `value`, ties to the even one; -0 stays -0."""
    if value == _ZERO:
        return value
    magnitude = np.float32(abs(value))
    if magnitude >= _NORMAL:
        pattern = bits_of_float(magnitude)
        odd = np.int32((pattern >> 13) & 1)
        rounded = np.float32(float_from_bits(np.int32((pattern + (_REST >> 1) + odd) & ~_REST)))
    else:
        units = np.float32(magnitude * _UNITS)
        whole = np.int32(units)
        rest = np.float32(units - np.float32(whole))
        whole += np.int32(rest > _HALF or (rest == _HALF and whole & 1 == 1))
        rounded = np.float32(np.float32(whole) * _UNIT)
    return np.float32(-rounded if value < _ZERO else rounded)
