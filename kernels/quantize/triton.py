"""Quantization on a GPU, with the operations of format §3.2 in their order.

One kernel gathers, quantizes and packs: a row is read from the table once and only its codes,
scale, offset and flags are written.
"""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing import triton as packing
from recpoint.kernels.bit_packing.widths import packed_width
from recpoint.kernels.quantize import grid
from recpoint.kernels.quantize.method import ASYMMETRIC, Method
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_rows,
    require_table,
)
from recpoint.kernels.quantize.triton_rows import (
    find_rows,
    load,
    load_parts,
    parameters,
    row_ends,
    store_codes,
    store_parameters,
    store_parts,
)
from recpoint.kernels.quantize.triton_search import greedy_parameters, refit_parameters

__all__ = ["dequantize", "dequantize_packed", "quantize", "quantize_packed", "quantize_rows"]

#: Values a program works on, and the most columns it holds at once; longer rows are read twice.
_TILE: Final = 2048
_COLUMNS: Final = 2048
_MOST_ROWS: Final = 128
_DECODE_BLOCK: Final = 1024
_WARPS: Final = 4

_grids: dict[tuple[int, int, int, torch.device], Tensor] = {}


@triton.jit(do_not_specialize=["n", "limit"], do_not_specialize_on_alignment=["exacts", "wides"])
def _quantize(
    table, ids, packed, scales, offsets, exacts, wides, n, limit,
    DIM: tl.constexpr, LEVELS: tl.constexpr, CODE_BITS: tl.constexpr, PAIRS: tl.constexpr,
    HAS_IDS: tl.constexpr, SYMMETRIC: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows; those of more than PARTS · PART columns are read twice."""
    COLUMNS: tl.constexpr = PART * PARTS
    WIDTH: tl.constexpr = (DIM * CODE_BITS + 7) // 8
    i, in_block, index, has_row = find_rows(ids, n, limit, HAS_IDS, ROWS)
    row = packed + i * (WIDTH // 2 if PAIRS else WIDTH)
    if DIM <= COLUMNS:
        a, b, c, d = load_parts(table, index, has_row, 0, DIM, PART, PARTS)
        low, high = row_ends(a, b, c, d, 0, DIM, PART, PARTS)
        # A row that is not there counts as one of infinities: exact, without codes.
        high = tl.where(has_row, high, 0x7FFFFFFF)
        scale, offset, exact, wide = parameters(low, high, LEVELS, SYMMETRIC, HALF)
        inverse = store_parameters(
            scale, offset, exact, wide, scales, offsets, exacts, wides, i, in_block
        )
        store_parts(
            a, b, c, d, scale, offset, inverse, row, in_block, 0, DIM, LEVELS, CODE_BITS, PAIRS,
            PART, PARTS,
        )  # fmt: skip
    else:
        low = tl.full([ROWS], 0x7FFFFFFF, tl.int32)
        high = tl.full([ROWS], -0x80000000, tl.int32)
        for start in range(0, DIM, COLUMNS):
            a, b, c, d = load_parts(table, index, has_row, start, DIM, PART, PARTS)
            part_low, part_high = row_ends(a, b, c, d, start, DIM, PART, PARTS)
            low = tl.minimum(low, part_low)
            high = tl.maximum(high, part_high)
        high = tl.where(has_row, high, 0x7FFFFFFF)
        scale, offset, exact, wide = parameters(low, high, LEVELS, SYMMETRIC, HALF)
        inverse = store_parameters(
            scale, offset, exact, wide, scales, offsets, exacts, wides, i, in_block
        )
        for start in range(0, DIM, COLUMNS):
            a, b, c, d = load_parts(table, index, has_row, start, DIM, PART, PARTS)
            store_parts(
                a, b, c, d, scale, offset, inverse, row, in_block, start, DIM, LEVELS, CODE_BITS,
                PAIRS, PART, PARTS,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["n", "limit", "nearby"],
    do_not_specialize_on_alignment=["exacts", "wides"],
)
def _quantize_searched(
    table, ids, packed, scales, offsets, exacts, wides, n, limit, candidates, nearby,
    DIM: tl.constexpr, LEVELS: tl.constexpr, CODE_BITS: tl.constexpr, PAIRS: tl.constexpr,
    HAS_IDS: tl.constexpr, HALF: tl.constexpr, GREEDY: tl.constexpr, TRIALS: tl.constexpr,
    STEPS: tl.constexpr, LEVELINGS: tl.constexpr, FRACTION: tl.constexpr, COARSER: tl.constexpr,
    UNIT: tl.constexpr, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS rows with parameters that are searched for. COLUMNS holds a whole row.

    TRIALS and STEPS are the bins and the steps of the greedy search, or the candidates of the grid
    and the refits after it, which LEVELINGS fits of codes to values follow.
    """
    WIDTH: tl.constexpr = (DIM * CODE_BITS + 7) // 8
    i, in_block, index, has_row = find_rows(ids, n, limit, HAS_IDS, ROWS)
    x = load(table, index, has_row, 0, DIM, COLUMNS)
    low, high = row_ends(x, x, x, x, 0, DIM, COLUMNS, 1)
    high = tl.where(has_row, high, 0x7FFFFFFF)
    step, least, exact, wide = parameters(low, high, LEVELS, False, False)
    scale, offset, exact, wide = parameters(low, high, LEVELS, False, HALF)
    searched = scale > 0.0
    # One and zero where there is nothing to search: what comes of it is not used.
    step = tl.where(searched, step, 1.0)
    least = tl.where(searched, least, 0.0)
    plain = tl.where(searched, scale, 1.0)
    real = searched[:, None] & (tl.arange(0, COLUMNS) < DIM)[None, :]
    x_real = tl.where(real, x, 0.0)
    halves = searched & (wide == 0) & HALF
    if GREEDY:
        its_scale, its_offset = greedy_parameters(
            x_real, real, step, least, plain, offset, halves,
            DIM, LEVELS, TRIALS, STEPS, UNIT, LARGEST,
        )  # fmt: skip
    else:
        its_scale, its_offset = refit_parameters(
            x_real, real, step, least, plain, offset, halves, candidates, nearby,
            DIM, LEVELS, FRACTION, TRIALS, STEPS, LEVELINGS, COARSER, UNIT, LARGEST,
        )  # fmt: skip
    scale = tl.where(searched, its_scale, scale)
    offset = tl.where(searched, its_offset, offset)
    inverse = store_parameters(
        scale, offset, exact, wide, scales, offsets, exacts, wides, i, in_block
    )
    row = packed + i * (WIDTH // 2 if PAIRS else WIDTH)
    store_codes(x, scale, offset, inverse, row, in_block, 0, DIM, LEVELS, CODE_BITS, PAIRS, COLUMNS)


@triton.jit
def _dequantize(codes, scales, offsets, rows, total, dim, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = index < total
    i = index // dim
    code = tl.load(codes + index, mask=valid, other=0).to(tl.float32)
    product = code * tl.load(scales + i, mask=valid, other=0.0)
    tl.store(rows + index, product + tl.load(offsets + i, mask=valid, other=0.0), mask=valid)


def _searches(method: Method, dim: int, bits: int) -> bool:
    """Whether there is anything to search: not in rows too long for exact sums."""
    if method.name == "greedy":
        return dim <= grid.LARGEST_DIM
    return method.fits and grid.fraction_bits(dim, bits) > 0


def _candidates(dim: int, bits: int, bins: int, device: torch.device) -> Tensor:
    """The grid's slopes and shifts on a device, f32 [candidates, 2]; copied there once."""
    key = (dim, bits, bins, device)
    if key not in _grids:
        _grids[key] = torch.from_numpy(grid.candidates(dim, bits, bins).copy()).to(device)
    return _grids[key]


def _encode(
    table: Tensor, ids: Tensor | None, bits: int, code_bits: int, method: Method, half: bool
) -> PackedRows:
    """Quantize rows of `table` to `bits` bits and store each code in `code_bits` bits."""
    rows, dim = table.shape
    n = rows if ids is None else ids.numel()
    width = packed_width(dim, code_bits)
    device = table.device
    packed = torch.empty(n, width, dtype=torch.uint8, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    offset = torch.empty(n, dtype=torch.float32, device=device)
    flags = torch.empty(2, n, dtype=torch.uint8, device=device)
    exact, wide = flags.view(torch.bool)
    packed_rows = PackedRows(packed, scale, offset, exact, wide)
    if n == 0:
        return packed_rows
    pairs = code_bits == 4 and width % 2 == 0
    values = table.view(torch.int16) if table.dtype == torch.bfloat16 else table
    places = table if ids is None else ids
    codes = packed.view(torch.int16) if pairs else packed
    arguments = (values, places, codes, scale, offset, flags[0], flags[1], n, rows)
    columns = max(8, triton.next_power_of_2(dim))
    searches = _searches(method, dim, bits)
    tile = columns if searches else min(columns, _COLUMNS)
    block = max(1, min(_TILE // tile, _MOST_ROWS))
    common = {
        "DIM": dim, "LEVELS": 2**bits - 1, "CODE_BITS": code_bits, "PAIRS": pairs,
        "HAS_IDS": ids is not None, "HALF": half, "ROWS": block, "enable_fp_fusion": False,
    }  # fmt: skip
    grid_size = (triton.cdiv(n, block),)
    if searches:
        _launch_search(grid_size, arguments, common, method, bits, tile)
    else:
        parts = min(4, tile // 8)
        _quantize[grid_size](
            *arguments, SYMMETRIC=method.name == "symmetric", PART=tile // parts, PARTS=parts,
            num_warps=_WARPS, **common,
        )  # fmt: skip
    return packed_rows


def _launch_search(
    grid_size: tuple[int],
    arguments: tuple[Any, ...],
    common: dict[str, Any],
    method: Method,
    bits: int,
    columns: int,
) -> None:
    table, dim = arguments[0], common["DIM"]
    greedy = method.name == "greedy"
    if greedy:
        trials, steps = method.bins, grid.greedy_steps(method.bins, method.ratio_permille)
        candidates, nearby = arguments[3], 0.0  # not looked at
    else:
        candidates = _candidates(dim, bits, method.bins, table.device)
        trials, steps = candidates.shape[0] if method.bins else 0, method.refits
        nearby = grid.half_spacing(dim, bits, method.bins)
    _quantize_searched[grid_size](
        *arguments, candidates, nearby, GREEDY=greedy, TRIALS=trials, STEPS=steps,
        FRACTION=2.0 ** grid.fraction_bits(dim, bits), UNIT=float(grid.error_unit(dim)),
        LARGEST=grid.largest_error(dim), COLUMNS=columns, LEVELINGS=method.levelings,
        COARSER=grid.coarser(dim, bits),
        num_warps=_WARPS if columns <= _COLUMNS else 4 * _WARPS, **common,
    )  # fmt: skip


def quantize(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> Quantized:
    """Quantize f32 rows [n, dim] to codes of `bits` bits, one byte a code."""
    require_rows(rows, bits)
    return Quantized(*_encode(rows, None, bits, 8, method, half_parameters))


def quantize_packed(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> PackedRows:
    """`quantize` and `pack` in one pass."""
    require_rows(rows, bits)
    return _encode(rows, None, bits, bits, method, half_parameters)


def quantize_rows(
    table: Tensor,
    ids: Tensor | None,
    bits: int,
    method: Method = ASYMMETRIC,
    *,
    half_parameters: bool = False,
) -> PackedRows:
    """Gather, `quantize` and `pack` in one pass; rows of ids out of range come back `exact`."""
    require_table(table, ids, bits)
    return _encode(table, ids, bits, bits, method, half_parameters)


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """f32 [n, dim]: code · scale + offset."""
    require("codes", codes, torch.uint8, 2)
    n, dim = codes.shape
    require_parameters(n, codes.device, scale, offset)
    rows = torch.empty(n, dim, dtype=torch.float32, device=codes.device)
    total = rows.numel()
    if total:
        _dequantize[(triton.cdiv(total, _DECODE_BLOCK),)](
            codes, scale, offset, rows, total, dim, BLOCK=_DECODE_BLOCK, enable_fp_fusion=False
        )
    return rows


def dequantize_packed(
    packed: Tensor, scale: Tensor, offset: Tensor, *, dim: int, bits: int
) -> Tensor:
    """`unpack`, then `dequantize`."""
    return dequantize(packing.unpack(packed, dim=dim, bits=bits), scale, offset)
