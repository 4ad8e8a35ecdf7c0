"""The choice of widths, with whole-matrix operations in the order that the README gives."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.allocation.costs import (
    BIAS,
    EXACT,
    SMALLEST_SPAN,
    WIDTHS,
    require_allocatable,
    row_bits,
)
from recpoint.kernels.allocation.sums import weighed
from recpoint.kernels.quantize import reference as quantization

__all__ = ["allocate", "squared_errors", "weigh"]

_SMALLEST_NORMAL = 2.0**-126


def allocate(rows: Tensor, importance: Tensor, price: float, *, exact_bits: int = 32) -> Tensor:
    """Choose the width of least cost for each row: u8 [n]."""
    require_allocatable(rows, importance, price, exact_bits)
    n, dim = rows.shape
    is_finite = (importance >= 0.0) & importance.isfinite()
    weight = torch.where(importance >= _SMALLEST_NORMAL, importance, 0.0).double()
    widths = torch.full((n,), EXACT, dtype=torch.uint8, device="cpu")
    exact_cost = price * float(row_bits(dim, EXACT, wide=False, exact_bits=exact_bits))
    best = torch.full((n,), exact_cost, dtype=torch.float64, device="cpu")
    # From the widest to the narrowest, so that the narrower of two equal costs is taken.
    for width in reversed(WIDTHS):
        error, can_store, is_wide = squared_errors(rows, width)
        bits = torch.full((n,), row_bits(dim, width, wide=False), dtype=torch.float64, device="cpu")
        bits[is_wide] = row_bits(dim, width, wide=True)
        cost = torch.where(can_store, weight * error + price * bits, torch.inf)
        is_least = is_finite & (cost <= best)
        best = torch.where(is_least, cost, best)
        widths[is_least] = width
    return widths


def weigh(states: Tensor, scale: float, *, initial: float = 0.0) -> Tensor:
    """Return the importance of each row by its row state: f32 [n]."""
    return weighed(states.to(torch.float64), scale, initial)


def squared_errors(rows: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's squared error f64 [n], whether the width can store it, whether it is wide.

    Args:
        rows: f32 [n, dim].
        width: one of `WIDTHS`.
    """
    quantized = quantization.quantize(rows, width, half_parameters=True)
    decoded = quantization.dequantize(quantized.codes, quantized.scale, quantized.offset)
    can_store = ~quantized.exact
    usable = torch.where(can_store[:, None], rows, 0.0)
    span = usable.amax(dim=1) - usable.amin(dim=1)
    has_error = can_store & (span >= SMALLEST_SPAN)
    per_span = 1.0 / torch.where(has_error, span, torch.ones_like(span))
    shares = torch.where(has_error[:, None], rows - decoded, 0.0) * per_span[:, None]
    squares = shares * shares
    total = torch.full_like(span, BIAS)
    for column in squares.unbind(dim=1):
        total = total + column
    error = (total.double() - BIAS) * span.double() * span.double()
    return torch.where(has_error, error, 0.0), can_store, quantized.wide & can_store
