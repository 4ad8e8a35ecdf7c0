"""Quantization on a GPU, with the operations of format §3.2 in their order.

Division is `div_rn`, since the plain operator is an approximation on a GPU, and kernels are built
without fusing multiply and add. Minimum and maximum use the integer keys that `cpu.py` describes.
"""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing import triton as packing
from recpoint.kernels.quantize.method import ASYMMETRIC, Method
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_rows,
)

__all__ = ["dequantize", "dequantize_packed", "quantize", "quantize_packed"]

_TILE = 2048
_COLUMNS = 1024


@triton.jit
def _quantize(
    rows, codes, scales, offsets, exacts, n, dim, smallest,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    low_key = tl.full([ROWS], 0x7FFFFFFF, tl.int32)
    high_key = tl.full([ROWS], -0x80000000, tl.int32)
    for start in range(0, dim, COLUMNS):
        k = start + column
        inside = (i < n)[:, None] & (k < dim)[None, :]
        x = tl.load(rows + i[:, None] * dim + k[None, :], mask=inside, other=0.0)
        pattern = x.to(tl.int32, bitcast=True)
        key = pattern ^ ((pattern >> 31) & 0x7FFFFFFF)
        low_key = tl.minimum(low_key, tl.min(tl.where(inside, key, 0x7FFFFFFF), axis=1))
        high_key = tl.maximum(high_key, tl.max(tl.where(inside, key, -0x80000000), axis=1))

    finite = (low_key > -0x7F800001) & (high_key < 0x7F800000)
    low = (low_key ^ ((low_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    high = (high_key ^ ((high_key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    low = tl.where(finite, low, 0.0)
    high = tl.where(finite, high, 0.0)
    span = high - low
    constant = (low == high) & (low_key != -1)
    spread = (span >= smallest) & (span <= 8.507059173023462e37)
    exact = (finite & (constant | spread)) == 0
    levels = tl.full([ROWS], LEVELS, tl.float32)
    scale = tl.where(exact | (spread == 0), 0.0, tl.div_rn(span, levels))
    offset = tl.where(exact, 0.0, low)
    tl.store(scales + i, scale, mask=i < n)
    tl.store(offsets + i, offset, mask=i < n)
    tl.store(exacts + i, exact.to(tl.uint8), mask=i < n)

    divisor = tl.where(scale > 0.0, scale, 1.0)
    for start in range(0, dim, COLUMNS):
        k = start + column
        inside = (i < n)[:, None] & (k < dim)[None, :]
        live = inside & (scale > 0.0)[:, None]
        x = tl.load(rows + i[:, None] * dim + k[None, :], mask=live, other=0.0)
        difference = tl.where(live, x - offset[:, None], 0.0)
        steps = tl.div_rn(difference, tl.broadcast_to(divisor[:, None], [ROWS, COLUMNS]))
        # Not negative, so dropping the fraction is floor.
        code = tl.minimum((steps + 0.5).to(tl.int32), LEVELS)
        code = tl.where(live, code, 0)
        tl.store(codes + i[:, None] * dim + k[None, :], code.to(tl.uint8), mask=inside)


@triton.jit
def _dequantize(codes, scales, offsets, rows, total, dim, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    i = at // dim
    code = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
    product = code * tl.load(scales + i, mask=inside, other=0.0)
    tl.store(rows + at, product + tl.load(offsets + i, mask=inside, other=0.0), mask=inside)


def quantize(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> Quantized:
    """Quantize f32 rows [n, dim] to codes of `bits` bits, one byte a code."""
    require_rows(rows, bits)
    if method != ASYMMETRIC or half_parameters:
        raise ValueError(f"method: {method} on {rows.device}, expected asymmetric with f32")
    n, dim = rows.shape
    device = rows.device
    codes = torch.empty(n, dim, dtype=torch.uint8, device=device)
    scale = torch.empty(n, dtype=torch.float32, device=device)
    offset = torch.empty(n, dtype=torch.float32, device=device)
    exact = torch.empty(n, dtype=torch.bool, device=device)
    if n:
        levels = 2**bits - 1
        columns = min(triton.next_power_of_2(dim), _COLUMNS)
        block = max(1, min(_TILE // columns, 128))
        _quantize[(triton.cdiv(n, block),)](
            rows, codes, scale, offset, exact.view(torch.uint8), n, dim, levels * 2.0**-126,
            LEVELS=levels, ROWS=block, COLUMNS=columns, enable_fp_fusion=False,
        )  # fmt: skip
    return Quantized(codes, scale, offset, exact, torch.zeros_like(exact))


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """f32 [n, dim]: code · scale + offset."""
    require("codes", codes, torch.uint8, 2)
    n, dim = codes.shape
    require_parameters(n, codes.device, scale, offset)
    rows = torch.empty(n, dim, dtype=torch.float32, device=codes.device)
    if rows.numel():
        _dequantize[(triton.cdiv(rows.numel(), _COLUMNS),)](
            codes, scale, offset, rows, rows.numel(), dim, BLOCK=_COLUMNS, enable_fp_fusion=False
        )
    return rows


def quantize_packed(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> PackedRows:
    """`quantize`, then `pack`."""
    codes, *others = quantize(rows, bits, method, half_parameters=half_parameters)
    return PackedRows(packing.pack(codes, bits), *others)


def dequantize_packed(
    packed: Tensor, scale: Tensor, offset: Tensor, *, dim: int, bits: int
) -> Tensor:
    """`unpack`, then `dequantize`."""
    return dequantize(packing.unpack(packed, dim=dim, bits=bits), scale, offset)
