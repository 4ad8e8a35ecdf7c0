"""Quantization on a CPU: one pass over the rows. Unpacked codes stay in a buffer in the cache."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing.widths import require_packed
from recpoint.kernels.native import library, team_size
from recpoint.kernels.quantize import grid
from recpoint.kernels.quantize.method import ASYMMETRIC, Method
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_places,
    require_rows,
    room_for_packed,
)

__all__ = ["dequantize", "dequantize_packed", "dequantize_rows", "quantize", "quantize_packed"]

#: A search takes as long as reading and writing some thirty times as many bytes.
_SEARCH_BYTES = 32


def _encode(
    rows: Tensor, bits: int, code_bits: int, method: Method, half_parameters: bool
) -> PackedRows:
    """Quantize to `bits` bits and store each code in `code_bits` bits."""
    require_rows(rows, bits)
    n, dim = rows.shape
    packed_rows = room_for_packed(n, dim, code_bits)
    parameters = array(
        "q",
        (
            rows.data_ptr(), dim, bits, code_bits, method.name == "symmetric", half_parameters,
            *(tensor.data_ptr() for tensor in packed_rows),
        ),
    )  # fmt: skip
    given_at, _ = parameters.buffer_info()
    traffic = rows.nbytes + packed_rows.packed.nbytes
    if not _search(given_at, n, dim, bits, method, team_size(_SEARCH_BYTES * traffic)):
        library.quantize_plain(given_at, n, team_size(traffic))
    return packed_rows


def _search(given_at: int, n: int, dim: int, bits: int, method: Method, threads: int) -> bool:
    """Quantize by the search of the method. Return False if there is no search for such rows."""
    limits = float(grid.error_unit(dim)), float(grid.largest_error(dim))
    if method.name == "greedy" and dim <= grid.LARGEST_DIM:
        steps = grid.greedy_steps(method.bins, method.ratio_permille)
        none = 0, 0, 0.0, 0, 0, 0.0, 0.0
        library.quantize_by_search(given_at, n, *none, method.bins, steps, *limits, threads)
        return True
    places = grid.fraction_bits(dim, bits) if method.fits else 0
    if not places:
        return False
    # This variable keeps the array alive while its address is in use. The cache alone does not: if
    # two threads compute the same array at once, the cache keeps only one of the two.
    pairs = grid.candidates(dim, bits, method.bins)
    compared = len(pairs) if method.bins else 0
    nearby = grid.half_spacing(dim, bits, method.bins)
    library.quantize_by_search(
        given_at, n, pairs.ctypes.data, compared, nearby, method.refits, method.levelings,
        float(1 << places), grid.coarser(dim, bits), 0, 0, *limits, threads,
    )  # fmt: skip
    return True


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
    n = n if positions is None else positions.numel()
    chosen = [0 if addresses is None else addresses.data_ptr() for addresses in (positions, ids)]
    library.dequantize(
        packed.data_ptr(), scale.data_ptr(), offset.data_ptr(), rows.data_ptr(), dim, bits,
        *chosen, n, team_size(n * (4 * dim + width)),
    )  # fmt: skip


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
    """`dequantize_packed` for chosen rows, into their places in a table."""
    require_places(packed, table, ids, bits, positions)
    _decode_into(table, packed, scale, offset, bits, positions, ids)
