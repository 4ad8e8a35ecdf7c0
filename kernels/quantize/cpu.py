"""Quantization on a CPU: one pass a row, with the row's codes in a buffer that stays in cache.

The minimum and maximum are taken of integer keys that order binary32 values as numbers (−0 below
+0), because a compiler may vectorize integer minima but not floating ones, whose result for NaN and
±0 depends on the order. The keys also show NaN and infinities: they lie outside the finite ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing.cpu import pack_row, unpack_row
from recpoint.kernels.bit_packing.widths import packed_width, require_packed
from recpoint.kernels.intrinsics import compiled, float_from_bits, pointer
from recpoint.kernels.quantize import binary16
from recpoint.kernels.quantize.method import ASYMMETRIC, WIDEST_STEP, Method
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_rows,
)
from recpoint.kernels.threads import over_rows

__all__ = ["dequantize", "dequantize_packed", "quantize", "quantize_packed"]

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
    values: Any, dim: int, scale: np.float32, offset: np.float32, top: np.int32, codes: Any
) -> None:
    """The codes of a row whose values are nowhere below `offset`."""
    for k in range(dim):
        step = np.float32(np.float32(values[k] - offset) / scale)
        # Not negative, so dropping the fraction is floor; and at most a little above `top`.
        code = np.int32(np.float32(step + _HALF))
        codes[k] = np.uint8(min(code, top))


@compiled(nogil=True)
def _quantize(
    rows: int,
    dim: int,
    bits: int,
    symmetric: bool,
    half: bool,
    packed: int,
    code_bits: int,
    width: int,
    scales: int,
    offsets: int,
    exacts: int,
    wides: int,
    start: int,
    stop: int,
) -> None:
    scale_of = carray(pointer(scales), stop, np.float32)
    offset_of = carray(pointer(offsets), stop, np.float32)
    exact_of = carray(pointer(exacts), stop, np.uint8)
    wide_of = carray(pointer(wides), stop, np.uint8)
    codes = np.empty(dim, np.uint8)
    levels = np.float32((1 << bits) - 1)
    top = np.int32((1 << bits) - 1)
    for i in range(start, stop):
        low_key, high_key = row_ends(rows + 4 * dim * i, dim)
        scale, offset, exact, wide = plain_parameters(low_key, high_key, levels, symmetric, half)
        scale_of[i] = scale
        offset_of[i] = offset
        exact_of[i] = np.uint8(exact)
        wide_of[i] = np.uint8(wide)
        # An array for each row: its indices are seen not to be negative, and cost no test.
        to = carray(pointer(packed + i * width), width, np.uint8)
        if scale > _ZERO:
            values = carray(pointer(rows + 4 * dim * i), dim, np.float32)
            code_row(values, dim, scale, offset, top, codes)
            pack_row(codes, to, 0, dim, code_bits)
        else:
            for b in range(width):
                to[b] = np.uint8(0)


@compiled(nogil=True)
def _dequantize(
    packed: int,
    width: int,
    scales: int,
    offsets: int,
    rows: int,
    dim: int,
    bits: int,
    start: int,
    stop: int,
) -> None:
    scale_of = carray(pointer(scales), stop, np.float32)
    offset_of = carray(pointer(offsets), stop, np.float32)
    codes = np.empty(dim, np.uint8)
    for i in range(start, stop):
        source = carray(pointer(packed + i * width), width, np.uint8)
        values = carray(pointer(rows + 4 * dim * i), dim, np.float32)
        unpack_row(source, 0, codes, 0, dim, bits)
        scale = scale_of[i]
        offset = offset_of[i]
        for k in range(dim):
            product = np.float32(np.float32(codes[k]) * scale)
            values[k] = np.float32(product + offset)


def _encode(
    rows: Tensor, bits: int, code_bits: int, method: Method, half_parameters: bool
) -> PackedRows:
    """Quantize to `bits` bits and store each code in `code_bits` bits."""
    require_rows(rows, bits)
    n, dim = rows.shape
    width = packed_width(dim, code_bits)
    packed = torch.empty(n, width, dtype=torch.uint8)
    scale = torch.empty(n, dtype=torch.float32)
    offset = torch.empty(n, dtype=torch.float32)
    exact = torch.empty(n, dtype=torch.bool)
    wide = torch.empty(n, dtype=torch.bool)
    symmetric = method.name == "symmetric"
    inputs = rows.data_ptr(), dim, bits, symmetric, half_parameters
    codes = packed.data_ptr(), code_bits, width
    outputs = scale.data_ptr(), offset.data_ptr(), exact.data_ptr(), wide.data_ptr()

    def part(start: int, stop: int) -> None:
        _quantize(*inputs, *codes, *outputs, start, stop)

    over_rows(part, n, row_bytes=4 * dim + width)
    return PackedRows(packed, scale, offset, exact, wide)


def _decode(packed: Tensor, scale: Tensor, offset: Tensor, dim: int, bits: int) -> Tensor:
    n, width = packed.shape
    require_parameters(n, packed.device, scale, offset)
    rows = torch.empty(n, dim, dtype=torch.float32)
    inputs = packed.data_ptr(), width, scale.data_ptr(), offset.data_ptr(), rows.data_ptr()

    def part(start: int, stop: int) -> None:
        _dequantize(*inputs, dim, bits, start, stop)

    over_rows(part, n, row_bytes=4 * dim + width)
    return rows


def quantize(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> Quantized:
    """Quantize f32 rows [n, dim] to codes of `bits` bits, one byte a code."""
    return Quantized(*_encode(rows, bits, 8, method, half_parameters))


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """f32 [n, dim]: code · scale + offset."""
    require("codes", codes, torch.uint8, 2)
    return _decode(codes, scale, offset, codes.shape[1], 8)


def quantize_packed(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> PackedRows:
    """`quantize` and `pack` in one pass."""
    return _encode(rows, bits, bits, method, half_parameters)


def dequantize_packed(
    packed: Tensor, scale: Tensor, offset: Tensor, *, dim: int, bits: int
) -> Tensor:
    """`unpack` and `dequantize` in one pass."""
    require_packed(packed, dim, bits)
    return _decode(packed, scale, offset, dim, bits)
