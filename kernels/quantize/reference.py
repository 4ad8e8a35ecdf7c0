"""Format §3.2, written with whole-matrix operations that each round once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.bit_packing import reference as packing
from recpoint.kernels.quantize.method import ASYMMETRIC, WIDEST_STEP, Method
from recpoint.kernels.quantize.reference_search import found_parameters
from recpoint.kernels.quantize.shapes import (
    PackedRows,
    Quantized,
    require_parameters,
    require_rows,
)

__all__ = ["dequantize", "dequantize_packed", "dequantize_rows", "quantize", "quantize_packed"]


def quantize(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> Quantized:
    """Quantize f32 rows [n, dim] to codes of `bits` bits."""
    require_rows(rows, bits)
    levels = torch.tensor(float(2**bits - 1), dtype=torch.float32, device="cpu")
    finite = rows.isfinite().all(dim=1)
    usable = torch.where(finite[:, None], rows, torch.zeros_like(rows))
    low, high = usable.amin(dim=1), usable.amax(dim=1)
    negative_zero = ((usable == 0) & usable.signbit()).any(dim=1)
    # The sign of a minimum that is zero: -0 counts as less than +0.
    low = torch.where((low == 0) & negative_zero, torch.full_like(low, -0.0), low + 0.0)

    constant = (high == low) & ~((low == 0) & negative_zero)
    smallest = torch.tensor(2.0**-126, dtype=torch.float32, device="cpu") * levels
    spread = (high - low >= smallest) & (high - low <= 2.0**126)
    if method.name == "symmetric":
        high = torch.where(spread, torch.maximum(low.abs(), high.abs()), high)
        low = torch.where(spread, -high, low)
        spread &= high - low <= 2.0**126
    exact = ~(finite & (constant | spread))

    zeros = torch.zeros_like(low)
    scale = torch.where(spread & ~exact, (high - low) / levels, zeros)
    offset = torch.where(exact, zeros, low)
    wide = torch.zeros_like(exact)
    plain = scale.clone(), offset.clone()
    if half_parameters:
        half_offset = round_down(offset)
        half_scale = torch.where(scale > 0, round_up((high - half_offset) / levels), zeros)
        fits = (half_scale <= scale * WIDEST_STEP) & (half_scale <= 65504)
        fits &= (half_offset.abs() <= 65504) & ((scale > 0) | (half_offset == offset))
        scale, offset = torch.where(fits, half_scale, scale), torch.where(fits, half_offset, offset)
        wide = ~fits
    nonzero = scale > 0
    if method.searches and nonzero.any():
        scale[nonzero], offset[nonzero] = found_parameters(
            rows[nonzero],
            bits,
            method,
            (plain[0][nonzero], plain[1][nonzero]),
            (scale[nonzero], offset[nonzero]),
            half_parameters & ~wide[nonzero],
        )
    return Quantized(_codes(usable, scale, offset, levels), scale, offset, exact, wide)


def _codes(rows: Tensor, scale: Tensor, offset: Tensor, levels: Tensor) -> Tensor:
    inverse = 1.0 / torch.where(scale > 0, scale, torch.ones_like(scale))
    steps = (rows - offset[:, None]) * inverse[:, None]
    codes = (steps + 0.5).floor().clamp(0.0, float(levels))
    return torch.where((scale > 0)[:, None], codes, torch.zeros_like(codes)).to(torch.uint8)


def round_down(values: Tensor) -> Tensor:
    """The largest values of binary16 that are not above finite f32 `values`, as f32."""
    with np.errstate(over="ignore"):
        halves = values.numpy().astype(np.float16)
        below = np.nextafter(halves, np.float16(-np.inf))
    # Beyond the range, where the steps of binary16 would go on, nothing is next to a value.
    above = (halves.astype(np.float32) > values.numpy()) & (values.numpy() < 65536.0)
    lower = np.where(above, below, halves)
    return torch.from_numpy(lower.astype(np.float32))


def round_up(values: Tensor) -> Tensor:
    """The smallest values of binary16 that are not below finite f32 `values`, as f32."""
    return -round_down(-values)


def dequantize(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """f32 [n, dim]: the product is rounded before the sum, because it is a tensor of its own."""
    require_parameters(codes.shape[0], codes.device, scale, offset)
    product = codes.to(torch.float32) * scale[:, None]
    return product + offset[:, None]


def quantize_packed(
    rows: Tensor, bits: int, method: Method = ASYMMETRIC, *, half_parameters: bool = False
) -> PackedRows:
    """`quantize`, then `pack`."""
    codes, *parameters = quantize(rows, bits, method, half_parameters=half_parameters)
    return PackedRows(packing.pack(codes, bits), *parameters)


def dequantize_packed(
    packed: Tensor, scale: Tensor, offset: Tensor, *, dim: int, bits: int
) -> Tensor:
    """`unpack`, then `dequantize`."""
    return dequantize(packing.unpack(packed, dim=dim, bits=bits), scale, offset)


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
    """`dequantize_packed`, and a copy of the chosen rows to their places."""
    rows = dequantize_packed(packed, scale, offset, dim=table.shape[1], bits=bits)
    rows = rows if positions is None else rows[positions]
    table[torch.arange(len(rows), device="cpu") if ids is None else ids] = rows
