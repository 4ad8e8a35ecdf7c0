"""Codes of second moments: equal to the reference, within their bound, and coded once for ever."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.kernels.moments import decode, decode_rows, encode, reference
from recpoint.kernels.moments.grid import LARGEST, LEAST_SHIFT, MOST_SHIFT

INF, NAN = math.inf, math.nan
SHAPES = [(0, 4), (1, 1), (300, 2), (257, 15), (500, 16), (65, 64), (9, 1000)]


def rows_of(n: int, m: int, octaves: float) -> Tensor:
    """Draw rows of values over so many octaves, at all magnitudes, with zeros among them."""
    middle = torch.rand(n, 1) * 250 - 140
    rows = torch.exp2((middle + (torch.rand(n, m) - 0.5) * octaves).clamp(-160, 127)).float()
    rows[torch.rand(n, m) < 0.2] = 0.0
    return rows


def shifts_of(grids: Tensor) -> Tensor:
    return LEAST_SHIFT + ((grids.long() & 0xFFFF) >> 12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("octaves", [0.01, 3.0, 20.0, 300.0])
def test_it_is_the_reference(shape: tuple[int, int], octaves: float, threads: int) -> None:
    torch.manual_seed(shape[1])
    rows = rows_of(*shape, octaves)
    rows[::7, :1], rows[3::11, -1:], rows[5::13, :1] = NAN, -1e-30, INF
    coded, expected = encode(rows), reference.encode(rows)
    for ours, theirs in zip(coded, expected, strict=True):
        assert torch.equal(ours, theirs)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    grids = torch.randint(-(2**15), 2**15, shape[:1], dtype=torch.int16)
    decoded = decode(codes, grids)
    assert torch.equal(decoded, reference.decode(codes, grids))
    assert bool(((decoded >= 0) & (decoded <= 2.0**127)).all())


@pytest.mark.parametrize("octaves", [0.0, 0.5, 2.0, 7.0, 30.0, 270.0])
def test_an_error_is_within_the_bound(octaves: float) -> None:
    torch.manual_seed(1)
    rows = rows_of(2000, 16, octaves)
    rows[:3] = torch.tensor([[2.0**127], [1e-45], [2.0**-126]])
    rows[3, ::2], rows[4, ::2] = 2.0**127, 1e-45
    coded = encode(rows)
    assert not bool(coded.refused.any())
    shift = shifts_of(coded.grids).double()[:, None]
    exact, decoded = rows.double(), decode(coded.codes, coded.grids).double()
    bound = torch.maximum(torch.exp2(shift - 24) * exact, torch.exp2(shift - 149))
    assert bool(((decoded - exact).abs() <= bound).all())
    assert torch.equal(decoded == 0, exact == 0)
    order = exact.argsort(dim=1)
    ascending = decoded.gather(1, order)
    assert bool((ascending[:, 1:] >= ascending[:, :-1]).all())


@pytest.mark.parametrize(
    ("octaves", "shift"), [(0.0, 8), (0.4, 14), (1.7, 16), (3.6, 17), (7.4, 18), (15.4, 19)]
)
def test_the_step_follows_the_range_of_the_row(octaves: float, shift: int) -> None:
    torch.manual_seed(2)
    rows = torch.exp2(torch.rand(500, 32) * octaves - 20)
    shifts = shifts_of(encode(rows).grids)
    assert int(shifts.max()) == shift and int(shifts.min()) >= LEAST_SHIFT
    assert octaves == 0.0 or int(shifts.median()) == shift


@pytest.mark.parametrize("octaves", [0.0, 3.0, 40.0, 270.0])
def test_rows_that_were_coded_before_have_no_error(octaves: float) -> None:
    torch.manual_seed(3)
    once = encode(rows_of(1000, 16, octaves))
    decoded = decode(once.codes, once.grids)
    again = encode(decoded)
    assert torch.equal(decode(again.codes, again.grids), decoded)
    assert bool((shifts_of(again.grids) <= shifts_of(once.grids)).all())


def test_the_widest_row_and_the_largest_value() -> None:
    rows = torch.tensor([[1e-45, 2.0**127, 0.0, 1.0]])
    coded = encode(rows)
    assert shifts_of(coded.grids).tolist() == [MOST_SHIFT]
    assert decode(coded.codes, coded.grids).tolist() == [[2.0**-126, 2.0**127, 0.0, 1.0]]
    pattern = decode(torch.tensor([[255]], dtype=torch.uint8), torch.tensor([-1]).short())
    assert pattern.view(torch.int32).tolist() == [[LARGEST]]


@pytest.mark.parametrize("value", [NAN, -NAN, INF, -INF, -1.0, -0.0, -1e-45, 1.8e38])
def test_a_row_that_is_no_second_moment_is_refused(value: float) -> None:
    rows = torch.ones(4, 3)
    rows[2, 1] = value
    coded = encode(rows)
    assert coded.refused.tolist() == [False, False, True, False]
    assert coded.codes[2].tolist() == [0, 0, 0] and coded.grids[2] == 0
    assert decode(coded.codes, coded.grids)[:2].tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize("write", [decode_rows, reference.decode_rows])
def test_chosen_rows_go_to_their_places(write: Callable[..., None], threads: int) -> None:
    torch.manual_seed(4)
    coded = encode(torch.rand(90, 5))
    values = decode(coded.codes, coded.grids)
    positions, ids = torch.arange(3, 90, 2), torch.randperm(200)[:44]
    table = torch.full((200, 5), 7.0)
    write(coded.codes, coded.grids, table, ids, positions=positions)
    expected = torch.full((200, 5), 7.0)
    expected[ids] = values[positions]
    assert torch.equal(table, expected)
    write(coded.codes, coded.grids, table, None, positions=None)
    assert torch.equal(table[:90], values)


def test_other_arguments_are_refused() -> None:
    rows = torch.zeros(2, 4)
    for given, what in [
        (rows.double(), "rows: dtype"),
        (rows[0], "rows: shape"),
        (rows.t(), "contiguous"),
        (torch.zeros(2, 4, device="meta"), "rows: device meta, expected cpu"),
    ]:
        with pytest.raises(ValueError, match=what):
            encode(given)
    codes, grids, _ = encode(rows)
    for changes, what in [
        ({"codes": codes.int()}, "codes: dtype"),
        ({"grids": grids[:1]}, "grids: 1, expected one for each of 2 rows"),
        ({"table": torch.zeros(5, 3)}, "table: 3 values a row, expected 4"),
        ({"ids": torch.tensor([0, 5])}, r"ids: outside 0 … 4"),
        ({"positions": torch.tensor([0, 2])}, r"positions: outside 0 … 1"),
        ({"positions": torch.tensor([-1, 1])}, r"positions: outside 0 … 1"),
        ({"ids": torch.tensor([0])}, "places for 1 rows, expected one for each of 2"),
        ({"table": torch.zeros(1, 4)}, "places for 1 rows, expected one for each of 2"),
    ]:
        call: dict[str, Any] = {"codes": codes, "grids": grids, "table": torch.zeros(5, 4)}
        call |= {"ids": None, "positions": None, **changes}
        with pytest.raises(ValueError, match=what):
            decode_rows(**call)
