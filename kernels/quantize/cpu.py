"""Quantization on a CPU: one pass a row, with the row's codes in a buffer that stays in cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing.cpu import unpack_row
from recpoint.kernels.bit_packing.widths import packed_width, require_packed
from recpoint.kernels.intrinsics import compiled, pointer, prefetch
from recpoint.kernels.quantize import grid
from recpoint.kernels.quantize.method import ASYMMETRIC, Method
from recpoint.kernels.quantize.plain_rows import quantize_plain
from recpoint.kernels.quantize.search import search_rows
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_places,
    require_rows,
)
from recpoint.kernels.threads import over_rows

__all__ = ["dequantize", "dequantize_packed", "dequantize_rows", "quantize", "quantize_packed"]

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
#: How far ahead a row's place is asked for, and at most how much of it (`row_gather`).
_ROWS_AHEAD = np.uint64(32)
_REACH_BYTES = 256
_NO_PAIRS = np.empty((0, 2), np.float32)


@compiled(nogil=True)
def _dequantize(
    packed: int,
    width: int,
    scales: int,
    offsets: int,
    rows: int,
    dim: int,
    bits: int,
    positions: int,
    ids: int,
    start: int,
    stop: int,
) -> None:
    """Row positions[i] of the codes to row ids[i]; an address of 0 stands for 0, 1, 2, …"""
    chosen = carray(pointer(positions + 8 * start), stop - start, np.int64)
    places = carray(pointer(ids + 8 * start), stop - start, np.int64)
    codes = np.empty(dim, np.uint8)
    last = np.uint64(max(stop - start, 1) - 1)
    for i in range(stop - start):
        if ids:
            # Rows that lie apart: the processor does not see by itself which one comes next.
            coming = places[min(np.uint64(i) + _ROWS_AHEAD, last)]
            for at in range(0, min(4 * dim, _REACH_BYTES), 64):
                prefetch(rows + 4 * dim * coming + at)
        position = chosen[i] if positions else start + i
        place = places[i] if ids else start + i
        source = carray(pointer(packed + position * width), width, np.uint8)
        values = carray(pointer(rows + 4 * dim * place), dim, np.float32)
        unpack_row(source, 0, codes, 0, dim, bits)
        scale = carray(pointer(scales + 4 * position), 1, np.float32)[0]
        offset = carray(pointer(offsets + 4 * position), 1, np.float32)[0]
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
    packed = torch.empty(n, width, dtype=torch.uint8, device="cpu")
    scale = torch.empty(n, dtype=torch.float32, device="cpu")
    offset = torch.empty(n, dtype=torch.float32, device="cpu")
    exact = torch.empty(n, dtype=torch.bool, device="cpu")
    wide = torch.empty(n, dtype=torch.bool, device="cpu")
    parameters = scale.data_ptr(), offset.data_ptr(), exact.data_ptr(), wide.data_ptr()
    to = packed.data_ptr(), code_bits, width, *parameters
    search = _search(dim, bits, method)
    if search is None:
        symmetric = method.name == "symmetric"
        quantize_plain(n, rows.data_ptr(), dim, bits, symmetric, half_parameters, *to)
        return PackedRows(packed, scale, offset, exact, wide)

    pairs = search.pairs.ctypes.data, len(search.pairs)
    given = rows.data_ptr(), dim, bits, half_parameters, *pairs, *search.arguments, *to

    def part(start: int, stop: int) -> None:
        search_rows(*given, start, stop)

    # A search takes as long as reading some thirty times as much.
    over_rows(part, n, row_bytes=32 * (4 * dim + width))
    return PackedRows(packed, scale, offset, exact, wide)


class _Search(NamedTuple):
    """What a search takes beside rows and outputs.

    Attributes:
        pairs: f32 [n, 2], what it tries; kept here for as long as its address is in use, since two
            threads that make the first one of a kind have one each, and only one of the two stays.
        arguments: those behind the pairs.
    """

    pairs: npt.NDArray[Any]
    arguments: tuple[Any, ...]


def _search(dim: int, bits: int, method: Method) -> _Search | None:
    """None if there is to be none."""
    if not method.searches:
        return None
    limits = np.float32(grid.error_unit(dim)), np.float32(grid.largest_error(dim))
    none = np.float32(0.0)
    if method.name == "greedy" and dim <= grid.LARGEST_DIM:
        steps = grid.greedy_steps(method.bins, method.ratio_permille)
        return _Search(_NO_PAIRS, (none, 0, none, method.bins, steps, *limits))
    places = grid.fraction_bits(dim, bits) if method.name == "refit" else 0
    if not places:
        return None
    pairs = grid.candidates(dim, bits, method.bins)
    nearby = np.float32(grid.half_spacing(dim, bits, method.bins))
    fraction = np.float32(1 << places)
    return _Search(pairs, (nearby, method.refits, fraction, 0, 0, *limits))


def _decode(packed: Tensor, scale: Tensor, offset: Tensor, dim: int, bits: int) -> Tensor:
    rows = torch.empty(packed.shape[0], dim, dtype=torch.float32, device="cpu")
    _decode_into(rows, packed, scale, offset, bits, None, None)
    return rows


def _decode_into(
    rows: Tensor,
    packed: Tensor,
    scale: Tensor,
    offset: Tensor,
    bits: int,
    positions: Tensor | None,
    ids: Tensor | None,
) -> None:
    (n, width), dim = packed.shape, rows.shape[1]
    require_parameters(n, packed.device, scale, offset)
    inputs = packed.data_ptr(), width, scale.data_ptr(), offset.data_ptr(), rows.data_ptr()
    chosen = [0 if some is None else some.data_ptr() for some in (positions, ids)]

    def part(start: int, stop: int) -> None:
        _dequantize(*inputs, dim, bits, *chosen, start, stop)

    n = n if positions is None else positions.numel()
    over_rows(part, n, row_bytes=4 * dim + width)


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


def dequantize_rows(
    packed: Tensor,
    scale: Tensor,
    offset: Tensor,
    table: Tensor,
    ids: Tensor | None,
    *,
    bits: int,
    positions: Tensor | None = None,
) -> None:
    """`dequantize_packed` of chosen rows to their places in a table."""
    require_places(packed, table, ids, bits, positions)
    _decode_into(table, packed, scale, offset, bits, positions, ids)
