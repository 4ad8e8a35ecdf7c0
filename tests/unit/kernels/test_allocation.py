"""Widths of rows: the least cost by a search over all widths, and the rules at the ends."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from recpoint.kernels.allocation import EXACT, WIDTHS, allocate, reference, row_bits, weigh
from recpoint.kernels.quantize import dequantize, quantize
from tests.unit.kernels.every import every

NAN, INF = float("nan"), float("inf")


def _model(dim: int, n: int = 200) -> tuple[Tensor, Tensor]:
    """Rows of many sizes, and importances so far apart that all widths are worth their price."""
    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(n, dim, generator=generator)
    importance = torch.logspace(-6, 6, n)[torch.randperm(n, generator=generator)]
    return rows, importance


def _costs(rows: Tensor, importance: Tensor, price: float, width: int) -> Tensor:
    """The cost of a width for each row, in binary64 throughout; infinite where it cannot be."""
    dim = rows.shape[1]
    if width == EXACT:
        return torch.full((len(rows),), price * row_bits(dim, EXACT, wide=False)).double()
    codes, scale, offset, exact, wide = quantize(rows, width, half_parameters=True)
    decoded = dequantize(codes, scale, offset)
    error = (rows.double() - decoded.double()).square().sum(dim=1)
    bits = [float(row_bits(dim, width, wide=is_wide)) for is_wide in wide.tolist()]
    cost = importance.double() * error + price * torch.tensor(bits).double()
    return torch.where(exact, INF, cost)


@every("dim", [1, 2, 7, 8, 12, 16, 17, 64, 100])
@every("price", [0.0, 0.1])
def test_no_other_width_costs_less(dim: int, price: float) -> None:
    rows, importance = _model(dim)
    widths = allocate(rows, importance, price)
    choices = (*WIDTHS, EXACT)
    costs = torch.stack([_costs(rows, importance, price, width) for width in choices])
    chosen = torch.tensor([choices.index(width) for width in widths.tolist()])
    cost_of_choice = costs.gather(0, chosen[None])[0]
    # The kernel adds up in binary32: dim + 4 roundings of 2^-24 each, twice that for their squares.
    slack = (dim + 8) * 2.0**-22
    assert bool((cost_of_choice <= costs.min(dim=0).values * (1.0 + slack)).all())
    if price and dim >= 16:
        assert set(widths.tolist()) == {*WIDTHS, EXACT}


@every("dim", [1, 5, 8, 12, 17, 64])
@every("price", [0.0, 1e-3, 1e20])
def test_any_number_of_threads_gives_the_widths_of_the_reference(
    dim: int, price: float, threads: int
) -> None:
    torch.manual_seed(dim)
    rows = torch.randn(61, dim) * torch.logspace(-44, 38, 61)[:, None]
    rows[7, 0], rows[8, -1] = NAN, INF
    rows[9], rows[10], rows[11, 0] = 0.25, 0.1, 1000.0
    importance = torch.logspace(-44, 38, 61).flip(0)[torch.randperm(61)]
    importance[3], importance[4], importance[5], importance[6] = NAN, INF, -1.0, 0.0
    for exact_bits in (16, 32):
        expected = reference.allocate(rows, importance, price, exact_bits=exact_bits)
        widths = allocate(rows, importance, price, exact_bits=exact_bits)
        assert torch.equal(widths, expected)


def test_a_row_without_importance_takes_the_fewest_bits() -> None:
    rows = torch.randn(5, 16)
    rows[1] = 3.0
    importance = torch.tensor([0.0, 0.0, -0.0, 1e-45, 2.0**-127])
    assert allocate(rows, importance, 1e-3).tolist() == [2, 2, 2, 2, 2]
    # One value takes 8 bits and 32 of parameters as a code, and 32 bits as it is.
    assert allocate(rows[:, :1].contiguous(), importance, 1e-3).tolist() == [EXACT] * 5


def test_a_constant_row_takes_two_bits_at_any_importance() -> None:
    rows = torch.tensor([[0.5], [0.0], [0.1]]).expand(3, 8).contiguous()
    importance = torch.full((3,), 1e38)
    assert allocate(rows, importance, 0.0).tolist() == [2, 2, 2]
    assert allocate(rows, importance, 1.0).tolist() == [2, 2, 2]


def test_without_a_price_a_row_has_no_error() -> None:
    ramp = torch.arange(16.0)[None]  # four bits have a code for each value
    noise = torch.randn(1, 16)
    rows = torch.cat((ramp, noise))
    assert allocate(rows, torch.ones(2), 0.0).tolist() == [4, EXACT]


@every("importance", [NAN, -NAN, INF, -INF, -1.0, -1e-45])
def test_an_importance_that_is_none_keeps_the_row_exact(importance: float) -> None:
    rows = torch.randn(3, 16)
    importances = torch.tensor([1e-9, importance, 1e-9])
    assert allocate(rows, importances, 1e-3).tolist() == [2, EXACT, 2]


@every("row", [[NAN, 1.0], [INF, 1.0], [0.0, -0.0], [3.4e38, -3.4e38], [0.0, 1e-40]])
def test_a_row_that_no_width_can_store_is_kept_exact(row: list[float]) -> None:
    rows = torch.tensor([row]).repeat(3, 8)
    assert allocate(rows, torch.zeros(3), 1.0).tolist() == [EXACT] * 3


def test_a_row_of_nan_of_any_payload_is_kept_exact() -> None:
    patterns = torch.tensor([[0x7FFFFFFF], [-1], [0x7F800001]], dtype=torch.int32).repeat(1, 16)
    rows = torch.cat((patterns.view(torch.float32), torch.ones(20, 16)))
    assert allocate(rows, torch.zeros(23), 1.0).tolist() == [EXACT] * 3 + [2] * 20


def test_a_row_that_narrow_widths_alone_can_store_has_one_of_these() -> None:
    rows = torch.zeros(2, 16)
    rows[:, 0] = torch.tensor([2.0**-126 * 3, 2.0**-126 * 255])
    assert allocate(rows, torch.full((2,), 1e38), 0.0).tolist() == [2, 2]


def test_wide_rows_count_their_parameters_as_32_bits() -> None:
    # 1000 + noise: parameters of binary16 would cost accuracy, so 64 bits of parameters are stored.
    torch.manual_seed(0)
    rows = 1000.0 + 0.1 * torch.rand(1, 2)
    assert bool(quantize(rows, 2, half_parameters=True).wide)
    assert row_bits(2, 2, wide=True) == 72 and row_bits(2, EXACT, wide=False) == 64
    assert allocate(rows, torch.zeros(1), 1.0).tolist() == [EXACT]
    assert allocate(rows - 1000.0, torch.zeros(1), 1.0).tolist() == [2]


def test_values_of_half_the_bytes_are_kept_exact_sooner() -> None:
    rows, importance = _model(16)
    of_single = allocate(rows, importance, 1e-3)
    of_half = allocate(rows, importance, 1e-3, exact_bits=16)
    more_exact = (of_half == EXACT) & (of_single != EXACT)
    assert bool(more_exact.any()) and bool(((of_half == of_single) | (of_half == EXACT)).all())


def test_a_higher_price_never_asks_for_more_bits() -> None:
    rows, importance = _model(16)
    bits = []
    for price in torch.logspace(-8, 2, 20).tolist():
        widths = allocate(rows, importance, price)
        bits.append(torch.where(widths == EXACT, 32, widths).to(torch.int64))
    assert all(bool((fewer <= more).all()) for more, fewer in zip(bits, bits[1:], strict=False))
    assert bits[0].sum() > 4 * bits[-1].sum()


def test_the_choice_does_not_hang_on_a_thread_that_takes_subnormals_for_zeros() -> None:
    torch.manual_seed(0)
    # Spans from 2^-60 to 2^-50, with subnormal values among them, and importances that bring each
    # error near the price of a bit.
    rows = torch.randn(440, 17) * torch.logspace(-60, -50, 440, base=2)[:, None]
    rows[:, 3:9] *= 1e-24
    rows[::3, 5] = 1e-40
    rows[::5, 7] = -1e-40
    rows[::7] -= rows[::7].amin(dim=1, keepdim=True)
    importance = 1e-3 * torch.logspace(110, 120, 440, base=2)
    importance[::40] = 1e-40
    expected = reference.allocate(rows, importance, 1e-3)
    assert len(expected.unique()) > 4

    def flushing() -> Tensor | None:
        return allocate(rows, importance, 1e-3) if torch.set_flush_denormal(True) else None

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # all in the thread that flushes, which ends with the pool
    try:
        with ThreadPoolExecutor(1) as pool:
            widths = pool.submit(flushing).result()
    finally:
        torch.set_num_threads(before)
    if widths is None:
        pytest.skip("this processor cannot take subnormals for zeros")
    assert torch.equal(widths, expected)


@every("m", [1, 2, 3, 7, 12, 16, 37, 64])
@every("dtype", [torch.float32, torch.float16, torch.float64])
def test_importances_are_those_of_the_reference(m: int, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(m)
    states = torch.exp(12.0 * torch.randn(61, m, dtype=torch.float64)).to(dtype)
    states[3, 0], states[4, -1], states[5, 0] = NAN, INF, -INF
    states[6], states[7, -1] = -1.0, 0.125
    for scale, initial in ((0.5, 0.0), (1e-3, 0.125), (1e30, -2.0)):
        expected = reference.weigh(states, scale, initial=initial)
        importance = weigh(states, scale, initial=initial)
        assert torch.equal(importance.nan_to_num(-1.0), expected.nan_to_num(-1.0))
        assert torch.equal(importance.isnan(), expected.isnan())


def test_values_of_a_row_state_are_added_up_in_binary64() -> None:
    states = torch.tensor([[2.0**24, 1.0, 1.0, 1.0], [3e38, 3e38, 3e38, 3e38]])
    assert weigh(states, 4.0).tolist() == [2.0**24 + 4.0, INF]  # 2^24 + 3, ties to even
    assert weigh(states, 1.0).tolist() == [2.0**22 + 1.0, states[1, 0].item()]


@every("states", [torch.zeros(2), torch.zeros(2, 0), torch.zeros(4, 3).t(), torch.ones(2, 2).int()])
def test_row_states_that_do_not_fit_are_refused(states: Tensor) -> None:
    with pytest.raises(ValueError, match="states: |contiguous"):
        weigh(states, 1.0)


def test_empty_input_gives_empty_output() -> None:
    assert tuple(weigh(torch.zeros(0, 3), 1.0).shape) == (0,)
    assert tuple(allocate(torch.zeros(0, 5), torch.zeros(0), 1.0).shape) == (0,)


def test_the_bits_of_rows() -> None:
    assert [row_bits(16, width, wide=False) for width in WIDTHS] == [64, 80, 96, 112, 128, 160]
    assert row_bits(5, 3, wide=True) == 16 + 64
    assert row_bits(5, EXACT, wide=False, exact_bits=16) == 80
    with pytest.raises(ValueError, match="bits: 7"):
        row_bits(5, 7, wide=False)


def test_arguments_that_do_not_fit_are_refused() -> None:
    rows, importance = torch.zeros(2, 4), torch.zeros(2)
    for matrix, weights, price, what in [
        (rows.double(), importance, 1.0, "rows: dtype"),
        (rows[0], importance, 1.0, "rows: shape"),
        (rows.t(), importance, 1.0, "contiguous"),
        (rows[:, :0].contiguous(), importance, 1.0, "dim 0"),
        (rows, importance[:1], 1.0, "importance: 1, expected one for each of 2"),
        (rows, importance.double(), 1.0, "importance: dtype"),
        (rows, importance, -1.0, "price: -1.0"),
        (rows, importance, math.nan, "price: nan"),
        (rows, importance, math.inf, "price: inf"),
        (torch.zeros(2, 4, device="meta"), importance, 1.0, "rows: device meta, expected cpu"),
    ]:
        with pytest.raises(ValueError, match=what):
            allocate(matrix, weights, price)
    with pytest.raises(ValueError, match="exact_bits: 0"):
        allocate(rows, importance, 1.0, exact_bits=0)
