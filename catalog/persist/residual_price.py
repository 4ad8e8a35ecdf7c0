"""Lowers the price of a bit for residuals that would cost more than whole rows do at that price.

The price was measured on whole rows. Mostly, residuals cost less at the same price. But widths are
steps: whole rows with 8 bits, or exact ones, may err less than the price asks for, while their
residuals take fewer bits that err as much as it allows. So an agent compares both on a sample of
the rows. What it returns follows from job and full alone, whatever machine computes it.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.persist.priced_codes import priced_method
from recpoint.format.job import QuantizerName
from recpoint.kernels.allocation import WIDTHS, allocate
from recpoint.kernels.allocation.sums import row_sums
from recpoint.kernels.quantize import ASYMMETRIC, Method, dequantize, quantize

__all__ = ["residual_price", "sampled_spans"]

_SAMPLE_ROWS: Final = 4096
_SPAN_ROWS: Final = 512
#: Then residuals have more bits than they need, in a block where whole rows have no errors.
_MOST_HALVINGS: Final = 8


def sampled_spans(rows: int) -> list[range]:
    """Return the positions of the sampled rows among so many: spans, ascending."""
    if rows <= _SAMPLE_ROWS:
        return [range(rows)]
    spans = _SAMPLE_ROWS // _SPAN_ROWS
    starts = [number * (rows - _SPAN_ROWS) // (spans - 1) for number in range(spans)]
    return [range(start, start + _SPAN_ROWS) for start in starts]


def residual_price(
    whole: Tensor,
    residuals: Tensor,
    importance: Tensor,
    price: float,
    *,
    quantizer: QuantizerName = "auto",
    exact_bits: int = 32,
) -> float:
    """Return the price for residuals: at most `price`, from which it differs by a power of two.

    Args:
        whole: f32 [n, dim], contiguous: sampled rows.
        residuals: f32 [n, dim], contiguous: their residuals; NaN in rows that are stored exactly.
        importance: f32 [n].
        price: what a bit of whole rows may cost, above 0.
        quantizer: the setting of the table; one that chooses on a sample is taken for plain codes.
        exact_bits: bits of an exact value.
    """
    of_rows = priced_method(quantizer) or ASYMMETRIC
    of_residuals = priced_method(quantizer, residual=True) or ASYMMETRIC
    most = _damage(whole, importance, price, of_rows, exact_bits)
    for _ in range(_MOST_HALVINGS):
        if _damage(residuals, importance, price, of_residuals, exact_bits) <= most:
            break
        price /= 2
    return price


def _damage(
    rows: Tensor, importance: Tensor, price: float, method: Method, exact_bits: int
) -> float:
    """Return the sum of importance times squared error, at the widths of a price."""
    widths = allocate(rows, importance, price, exact_bits=exact_bits)
    damages: list[float] = []
    for width in WIDTHS:
        chosen = torch.nonzero(widths == width).flatten()
        if len(chosen):
            coded = quantize(rows[chosen], width, method, half_parameters=True)
            decoded = dequantize(coded.codes, coded.scale, coded.offset)
            errors = rows[chosen].to(torch.float64) - decoded.to(torch.float64)
            damages += (row_sums(errors * errors) * importance[chosen].to(torch.float64)).tolist()
    return math.fsum(damages)  # in whichever order
