"""Rows of subnormal values in a thread that takes those for zeros."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from recpoint.kernels import quantize
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, default_method, reference
from tests.unit.kernels.every import every

ROWS = 40  # blocks of 16, and some behind them
SUBNORMAL = 1e-40


def _rows(dim: int) -> Tensor:
    """Every kind of row whose ends a flushing thread finds equal, in each place of a block."""
    kinds = torch.zeros(9, dim)
    kinds[1, -1] = SUBNORMAL
    kinds[2, 0] = -SUBNORMAL
    kinds[3] = SUBNORMAL
    kinds[4] = -SUBNORMAL
    kinds[5, 0] = -0.0
    kinds[6], kinds[6, 0] = SUBNORMAL, 2 * SUBNORMAL
    kinds[7] = 1.5
    kinds[8] = -(2.0**-126)
    return kinds[torch.arange(ROWS) % 9].contiguous()


def _bits(rows: quantize.PackedRows) -> list[Tensor]:
    return [part.view(torch.uint8) for part in rows]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("method", [ASYMMETRIC, SYMMETRIC, default_method(4)])
@every("dim", [2, 8, 16, 17, 48])
def test_what_a_row_is_stored_as_does_not_hang_on_the_thread(
    method: Method, dim: int, half: bool
) -> None:
    rows = _rows(dim)
    expected = reference.quantize_packed(rows, 4, method, half_parameters=half)
    assert expected.exact[[1, 2, 5, 6]].all() and not expected.exact[[0, 3, 4, 7, 8]].any()

    def flushing() -> quantize.PackedRows | None:
        if not torch.set_flush_denormal(True):
            return None
        assert torch.full((1,), SUBNORMAL).add(0.0).item() == 0.0
        return quantize.quantize_packed(rows, 4, method, half_parameters=half)

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # all in the thread that flushes, which ends with the pool
    try:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(flushing).result()
    finally:
        torch.set_num_threads(before)
    if found is None:
        pytest.skip("this processor cannot take subnormals for zeros")
    for name, left, right in zip(expected._fields, _bits(found), _bits(expected), strict=True):
        assert torch.equal(left, right), name
