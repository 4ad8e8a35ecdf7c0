"""Residuals cost no more than whole rows would at the price that was measured on these."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.catalog.persist.residual_price import residual_price, sampled_spans
from recpoint.kernels.allocation import EXACT, allocate
from recpoint.kernels.quantize import dequantize, quantize
from tests.mixed_table import FITTED, LEVELED

ROWS, DIM = 2_000, 8


def sample(moved: float, *, spread: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, their residuals to rows from which they have moved by a share, and importances."""
    random = torch.Generator().manual_seed(7)
    rows = torch.randn(ROWS, DIM, generator=random)
    residuals = moved * torch.randn(ROWS, DIM, generator=random)
    return rows, residuals, torch.exp(spread * torch.randn(ROWS, generator=random))


def damage(rows: Tensor, importance: Tensor, price: float, *, residual: bool = False) -> float:
    widths = allocate(rows, importance, price)
    decoded = rows.clone()
    method = LEVELED if residual else FITTED
    for width in set(widths.tolist()) - {EXACT}:
        coded = quantize(rows[widths == width], width, method, half_parameters=True)
        decoded[widths == width] = dequantize(coded.codes, coded.scale, coded.offset)
    errors = (rows - decoded).double().square().sum(dim=1)
    return float((importance * errors).sum())


@pytest.mark.parametrize("exponent", [-6, -10, -14])
def test_the_price_stays_where_residuals_cost_less(exponent: int) -> None:
    rows, residuals, importance = sample(0.1)
    price = 2.0**exponent
    of_residuals = damage(residuals, importance, price, residual=True)
    assert of_residuals < damage(rows, importance, price)
    assert residual_price(rows, residuals, importance, price) == price


def test_the_price_is_halved_until_residuals_cost_no_more() -> None:
    """Whole rows are nearly all exact here, and their residuals have 8 bits and err."""
    rows, residuals, importance = sample(0.1, spread=0.3)
    price = 2.0**-24
    most = damage(rows, importance, price)
    assert damage(residuals, importance, price, residual=True) > 3 * most
    lower = residual_price(rows, residuals, importance, price)
    at_lower, at_twice = (
        damage(residuals, importance, own_price, residual=True) for own_price in (lower, 2 * lower)
    )
    assert at_lower <= most < at_twice
    order = torch.randperm(ROWS)
    again = residual_price(
        rows[order].contiguous(), residuals[order].contiguous(), importance[order], price
    )
    assert again == lower


def test_a_price_under_which_whole_rows_are_exact_ends_somewhere() -> None:
    rows, residuals, importance = sample(0.001, spread=0.0)
    price = 2.0**-26
    assert damage(rows, importance, price) == 0
    assert residual_price(rows, residuals, importance, price) == price / 256
    residuals[:] = torch.nan  # all are stored exactly
    assert residual_price(rows, residuals, importance, price) == price


@pytest.mark.parametrize("rows", [0, 1, 4096, 4097, 5000, 1_000_000])
def test_the_sampled_rows(rows: int) -> None:
    spans = sampled_spans(rows)
    positions = [position for span in spans for position in span]
    assert sum(map(len, spans)) == min(rows, 4096)
    assert all(0 <= position < rows for position in positions)
    assert not rows or (positions[0], positions[-1]) == (0, rows - 1)
    assert spans == sorted(spans, key=lambda span: span.start)
