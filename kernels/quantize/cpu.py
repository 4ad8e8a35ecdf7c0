"""Quantization on a CPU: one pass a row, with the row's codes in a buffer that stays in cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing.cpu import unpack_row
from recpoint.kernels.bit_packing.widths import packed_width, require_packed
from recpoint.kernels.intrinsics import compiled, pointer
from recpoint.kernels.quantize import grid
from recpoint.kernels.quantize.method import ASYMMETRIC, Method
from recpoint.kernels.quantize.plain import plain_parameters, write_row
from recpoint.kernels.quantize.search import search_rows
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_rows,
)
from recpoint.kernels.quantize.vectors import CODES_AT_ONCE, ends_of_row
from recpoint.kernels.threads import over_rows

__all__ = ["dequantize", "dequantize_packed", "quantize", "quantize_packed"]

_ZERO = np.float32(0.0)


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
    codes = np.empty(dim + CODES_AT_ONCE, np.uint8)
    buffer = codes.ctypes.data
    levels = np.float32((1 << bits) - 1)
    for i in range(start, stop):
        row = rows + 4 * dim * i
        low_key, high_key = ends_of_row(row, dim)
        scale, offset, exact, wide = plain_parameters(low_key, high_key, levels, symmetric, half)
        scale_of[i] = scale
        offset_of[i] = offset
        exact_of[i] = np.uint8(exact)
        wide_of[i] = np.uint8(wide)
        to, room = packed + i * width, (stop - i) * width
        write_row(row, dim, bits, code_bits, scale, offset, buffer, to, width, room)


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
    codes = packed.data_ptr(), code_bits, width
    outputs = scale.data_ptr(), offset.data_ptr(), exact.data_ptr(), wide.data_ptr()
    kernel, settings = _kernel(dim, bits, method, half_parameters)

    def part(start: int, stop: int) -> None:
        kernel(rows.data_ptr(), dim, bits, *settings, *codes, *outputs, start, stop)

    # A search takes as long as reading some thirty times as much.
    weight = 1 if kernel is _quantize else 32
    over_rows(part, n, row_bytes=weight * (4 * dim + width))
    return PackedRows(packed, scale, offset, exact, wide)


def _kernel(
    dim: int, bits: int, method: Method, half_parameters: bool
) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The compiled loop of a method, and the arguments of its own."""
    greedy = method.name == "greedy" and dim <= grid.LARGEST_DIM
    places = grid.fraction_bits(dim, bits) if method.name == "refit" else 0
    if not greedy and not places:
        return _quantize, (method.name == "symmetric", half_parameters)
    limits = np.float32(grid.error_unit(dim)), np.float32(grid.largest_error(dim))
    none = np.float32(0.0)
    if greedy:
        steps = grid.greedy_steps(method.bins, method.ratio_permille)
        search = 0, 0, none, 0, none, method.bins, steps
    else:
        table = grid.candidates(dim, bits, method.bins)
        nearby = np.float32(grid.half_spacing(dim, bits, method.bins))
        fraction = np.float32(1 << places)
        search = table.ctypes.data, len(table), nearby, method.refits, fraction, 0, 0
    return search_rows, (half_parameters, *search, *limits)


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
