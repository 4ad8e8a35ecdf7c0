"""Residuals of rows, and the rows that have none: those that MUST be stored exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.kernels.residuals import reference, subtract
from tests.unit.kernels.every import every

NAN, INF = float("nan"), float("inf")
MOST = torch.finfo(torch.float32).max


def _same(residuals: Tensor, expected: Tensor) -> bool:
    """NaN of any pattern in the same places, and all else bit for bit."""
    patterns = [torch.where(t.isnan(), 0.0, t).view(torch.int32) for t in (residuals, expected)]
    return torch.equal(*patterns) and torch.equal(residuals.isnan(), expected.isnan())


@every("dim", [1, 2, 7, 16, 17, 64, 100])
@every("most", [MOST, 65504.0, 1.0])
def test_residuals_are_those_of_the_reference(dim: int, most: float, threads: int) -> None:
    torch.manual_seed(dim)
    rows = torch.randn(61, dim) * torch.logspace(-44, 38, 61)[:, None]
    base = rows + torch.randn(61, dim) * torch.logspace(-38, 30, 61)[torch.randperm(61)][:, None]
    rows[3], rows[4], rows[5, -1], rows[6, 0] = 0.25, 0.0, NAN, -INF
    rows[4, 0] = -0.0
    base[7, 0], base[8, -1] = NAN, INF
    rows[9] = base[9]
    assert _same(subtract(rows, base, most), reference.subtract(rows, base, most))


def test_a_row_of_equal_values_has_no_residual() -> None:
    rows = torch.tensor([[1.0, 1.0, 1.0], [0.0, -0.0, 0.0], [1.0, 1.0, 2.0], [2.0, 1.0, 1.0]])
    residuals = subtract(rows, torch.zeros(4, 3), MOST)
    assert residuals[:2].isnan().all() and torch.equal(residuals[2:], rows[2:])


def test_a_row_that_may_leave_its_dtype_has_no_residual() -> None:
    base = torch.tensor([[-64480.0, 0.0], [64480.0, 0.0], [64481.0, 0.0], [1.0, 0.0]])
    rows = base + torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, 1.0], [0.0, INF]])
    residuals = subtract(rows, base, 65504.0)
    assert residuals.isnan().all(dim=1).tolist() == [False, False, True, True]
    assert torch.equal(residuals[:2], rows[:2] - base[:2])


def test_no_rows_have_no_residuals() -> None:
    assert subtract(torch.zeros(0, 3), torch.zeros(0, 3), MOST).shape == (0, 3)


def test_rows_that_do_not_fit_are_refused() -> None:
    rows = torch.zeros(2, 3)
    for of_job, of_full, what in [
        (rows.half(), rows, "rows: dtype"),
        (rows, rows.double(), "base: dtype"),
        (rows, rows[:1], r"base: \(1, 3\), expected \(2, 3\)"),
        (rows, torch.zeros(3, 2).t(), "contiguous"),
        (rows[0], rows[0], "rows: shape"),
    ]:
        with pytest.raises(ValueError, match=what):
            subtract(of_job, of_full, MOST)
