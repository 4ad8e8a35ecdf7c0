"""Format §3.2, written with whole-matrix operations that each round once."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.bit_packing import reference as packing
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_rows,
)

__all__ = ["dequantize", "dequantize_packed", "quantize", "quantize_packed"]


def quantize(rows: Tensor, bits: int) -> Quantized:
    """Quantize f32 rows [n, dim] to codes of `bits` bits."""
    require_rows(rows, bits)
    n, dim = rows.shape
    levels = torch.tensor(float(2**bits - 1), dtype=torch.float32)
    finite = rows.isfinite().all(dim=1)
    usable = torch.where(finite[:, None], rows, torch.zeros_like(rows))
    low, high = usable.amin(dim=1), usable.amax(dim=1)
    negative_zero = ((usable == 0) & usable.signbit()).any(dim=1)
    # The sign of a minimum that is zero: -0 counts as less than +0.
    low = torch.where((low == 0) & negative_zero, torch.full_like(low, -0.0), low + 0.0)
    span = high - low

    constant = (high == low) & ~((low == 0) & negative_zero)
    smallest = torch.tensor(2.0**-126, dtype=torch.float32) * levels
    spread = (span >= smallest) & (span <= 2.0**126)
    exact = ~(finite & (constant | spread))

    scale = torch.where(spread & ~exact, span / levels, torch.zeros_like(span))
    offset = torch.where(exact, torch.zeros_like(low), low)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    steps = (usable - low[:, None]) / divisor[:, None]
    codes = (steps + 0.5).floor().clamp(0.0, float(levels))
    codes = torch.where((scale > 0)[:, None], codes, torch.zeros_like(codes))
    return Quantized(codes.to(torch.uint8), scale, offset, exact)


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """f32 [n, dim]: the product is rounded before the sum, because it is a tensor of its own."""
    require_parameters(codes.shape[0], codes.device, scale, offset)
    product = codes.to(torch.float32) * scale[:, None]
    return product + offset[:, None]


def quantize_packed(rows: Tensor, bits: int) -> PackedRows:
    """`quantize`, then `pack`."""
    codes, scale, offset, exact = quantize(rows, bits)
    return PackedRows(packing.pack(codes, bits), scale, offset, exact)


def dequantize_packed(
    packed: Tensor, scale: Tensor, offset: Tensor, *, dim: int, bits: int
) -> Tensor:
    """`unpack`, then `dequantize`."""
    return dequantize(packing.unpack(packed, dim=dim, bits=bits), scale, offset)
