"""Scale, offset and codes of one row by its ends, on a CPU (format §3.2).

The minimum and maximum are taken of integer keys that order binary32 values as numbers (−0 below
+0), because a compiler may vectorize integer minima but not floating ones, whose result for NaN and
±0 depends on the order. The keys also show NaN and infinities: they lie outside the finite ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from recpoint.kernels.bit_packing.words import pack_codes
from recpoint.kernels.intrinsics import compiled, copy_row, float_from_bits, pointer
from recpoint.kernels.quantize import binary16
from recpoint.kernels.quantize.method import WIDEST_STEP
from recpoint.kernels.quantize.vectors import (
    CODES_AT_ONCE,
    codes_of_row,
    half_bytes_of_row,
    quarter_bytes_of_row,
)

__all__ = ["plain_parameters", "write_row"]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY_KEY = np.int32(0x7F800000)
_MINUS_INFINITY_KEY = np.int32(-0x7F800001)
_MINUS_ZERO_KEY = np.int32(-1)
#: Of the smallest normal value; that of its negative is one less than minus this.
_SMALLEST_KEY = np.int32(0x00800000)
_TINY = np.float32(2.0**-126)
_LARGE = np.float32(2.0**126)
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_WIDEST_STEP = np.float32(WIDEST_STEP)


@compiled(nogil=True)
def plain_parameters(
    low_key: np.int32, high_key: np.int32, levels: np.float32, symmetric: bool, half: bool
) -> tuple[np.float32, np.float32, bool, bool]:
    """Scale, offset, exact and wide of a row with these ends; scale 0 if it has no codes."""
    if low_key <= _MINUS_INFINITY_KEY or high_key >= _INFINITY_KEY:
        return _ZERO, _ZERO, True, False
    low = float_from_bits(np.int32(low_key ^ (np.int32(low_key >> 31) & _MAGNITUDE)))
    high = float_from_bits(np.int32(high_key ^ (np.int32(high_key >> 31) & _MAGNITUDE)))
    # Keys, not numbers: a thread that takes subnormals for zeros (torch.set_flush_denormal) would
    # find 0 and 1e-40 equal, and 1e-40 a value of binary16.
    if low_key == high_key:
        if low_key == _MINUS_ZERO_KEY:
            return _ZERO, _ZERO, True, False
        normal = low_key >= _SMALLEST_KEY or low_key < -_SMALLEST_KEY
        fits = low_key == 0 or (
            normal and binary16.round_down(low) == low and np.float32(abs(low)) <= binary16.LARGEST
        )
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
def write_row(
    row: int, dim: int, bits: int, code_bits: int, scale: np.float32, offset: np.float32,
    buffer: Any, to: int, width: int, room: int,
) -> None:  # fmt: skip
    """Code a row and pack it at address `to`; zeros if the scale is 0.

    Args:
        row: address of its values.
        dim: how many.
        bits: width of a code.
        code_bits: width of a code as it is stored, `bits` or 8.
        scale: of the row; 0 for a row without codes.
        offset: of the row.
        buffer: u8 [dim + CODES_AT_ONCE] or longer.
        to: address of the packed row.
        width: bytes of the packed row.
        room: bytes at `to` that may be written: those behind the row are written later.
    """
    if not scale > _ZERO:
        place = carray(pointer(to), width, np.uint8)
        for b in range(width):
            place[b] = np.uint8(0)
        return
    top = np.float32((1 << bits) - 1)
    inverse = np.float32(_ONE / scale)
    if dim + CODES_AT_ONCE <= room and code_bits != 3:
        if code_bits == 8:
            codes_of_row(row, dim, inverse, offset, top, to)
        elif code_bits == 4:
            half_bytes_of_row(row, dim, inverse, offset, top, to)
        else:
            quarter_bytes_of_row(row, dim, inverse, offset, top, to)
        return
    codes = buffer.ctypes.data
    codes_of_row(row, dim, inverse, offset, top, codes)
    if code_bits == 8:
        copy_row(to, codes, dim)
    else:
        pack_codes(codes, to, dim, code_bits)
