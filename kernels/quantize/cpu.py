"""Quantization on a CPU: one pass a row, with the row's codes in a buffer that stays in cache.

The minimum and maximum are taken of integer keys that order binary32 values as numbers (−0 below
+0), because a compiler may vectorize integer minima but not floating ones, whose result for NaN and
±0 depends on the order. The keys also show NaN and infinities: they lie outside the finite ones.
"""

from __future__ import annotations

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing.cpu import pack_row, unpack_row
from recpoint.kernels.bit_packing.widths import packed_width, require_packed
from recpoint.kernels.intrinsics import compiled, float_from_bits, pointer
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


@compiled(nogil=True)
def _quantize(
    rows: int,
    dim: int,
    bits: int,
    packed: int,
    code_bits: int,
    width: int,
    scales: int,
    offsets: int,
    exacts: int,
    start: int,
    stop: int,
) -> None:
    scale_of = carray(pointer(scales), stop, np.float32)
    offset_of = carray(pointer(offsets), stop, np.float32)
    exact_of = carray(pointer(exacts), stop, np.uint8)
    codes = np.empty(dim, np.uint8)
    levels = np.float32((1 << bits) - 1)
    top = np.int32((1 << bits) - 1)
    smallest = np.float32(_TINY * levels)

    for i in range(start, stop):
        # An array for each row: its indices are seen not to be negative, and cost no test.
        bit_patterns = carray(pointer(rows + 4 * dim * i), dim, np.int32)
        values = carray(pointer(rows + 4 * dim * i), dim, np.float32)
        low_key = _MAGNITUDE
        high_key = np.int32(~_MAGNITUDE)
        for k in range(dim):
            pattern = bit_patterns[k]
            key = np.int32(pattern ^ (np.int32(pattern >> 31) & _MAGNITUDE))
            low_key = min(low_key, key)
            high_key = max(high_key, key)

        scale = _ZERO
        offset = _ZERO
        exact = True
        if low_key > _MINUS_INFINITY_KEY and high_key < _INFINITY_KEY:
            low = float_from_bits(np.int32(low_key ^ (np.int32(low_key >> 31) & _MAGNITUDE)))
            high = float_from_bits(np.int32(high_key ^ (np.int32(high_key >> 31) & _MAGNITUDE)))
            if low == high:
                exact = low_key == _MINUS_ZERO_KEY
            else:
                span = np.float32(high - low)
                exact = not (span >= smallest and span <= _LARGE)
                if not exact:
                    scale = np.float32(span / levels)
            if not exact:
                offset = low

        scale_of[i] = scale
        offset_of[i] = offset
        exact_of[i] = np.uint8(exact)
        to = carray(pointer(packed + i * width), width, np.uint8)
        if scale > _ZERO:
            for k in range(dim):
                step = np.float32(np.float32(values[k] - offset) / scale)
                # Not negative, so dropping the fraction is floor; and at most a little above `top`.
                code = np.int32(np.float32(step + _HALF))
                codes[k] = np.uint8(min(code, top))
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


def _encode(rows: Tensor, bits: int, code_bits: int) -> PackedRows:
    """Quantize to `bits` bits and store each code in `code_bits` bits."""
    require_rows(rows, bits)
    n, dim = rows.shape
    width = packed_width(dim, code_bits)
    packed = torch.empty(n, width, dtype=torch.uint8)
    scale = torch.empty(n, dtype=torch.float32)
    offset = torch.empty(n, dtype=torch.float32)
    exact = torch.empty(n, dtype=torch.bool)
    inputs = rows.data_ptr(), dim, bits, packed.data_ptr(), code_bits, width
    outputs = scale.data_ptr(), offset.data_ptr(), exact.data_ptr()

    def part(start: int, stop: int) -> None:
        _quantize(*inputs, *outputs, start, stop)

    over_rows(part, n, row_bytes=4 * dim + width)
    return PackedRows(packed, scale, offset, exact)


def _decode(packed: Tensor, scale: Tensor, offset: Tensor, dim: int, bits: int) -> Tensor:
    n, width = packed.shape
    require_parameters(n, packed.device, scale, offset)
    rows = torch.empty(n, dim, dtype=torch.float32)
    inputs = packed.data_ptr(), width, scale.data_ptr(), offset.data_ptr(), rows.data_ptr()

    def part(start: int, stop: int) -> None:
        _dequantize(*inputs, dim, bits, start, stop)

    over_rows(part, n, row_bytes=4 * dim + width)
    return rows


def quantize(rows: Tensor, bits: int) -> Quantized:
    """Quantize f32 rows [n, dim] to codes of `bits` bits, one byte a code."""
    return Quantized(*_encode(rows, bits, 8))


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """f32 [n, dim]: code · scale + offset."""
    require("codes", codes, torch.uint8, 2)
    return _decode(codes, scale, offset, codes.shape[1], 8)


def quantize_packed(rows: Tensor, bits: int) -> PackedRows:
    """`quantize` and `pack` in one pass."""
    return _encode(rows, bits, bits)


def dequantize_packed(
    packed: Tensor, scale: Tensor, offset: Tensor, *, dim: int, bits: int
) -> Tensor:
    """`unpack` and `dequantize` in one pass."""
    require_packed(packed, dim, bits)
    return _decode(packed, scale, offset, dim, bits)
