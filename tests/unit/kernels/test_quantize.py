from __future__ import annotations

import pytest
import torch

from recpoint.kernels import bit_packing, quantize
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import reference
from tests.unit.kernels.every import every

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("bits", BITS)
@every(
    "row",
    [
        [NAN, 1.0],
        [1.0, -NAN],
        [INF, 1.0],
        [1.0, -INF],
        [NAN, NAN],
        [INF, INF],
        [0.0, -0.0],
        [-0.0, -0.0],
        [-1e38, 1e38],
        [3.4e38, -3.4e38],
        [0.0, 1e-45],
        [1e-40, 2e-40],
        [1.0, 2.0, NAN] * 20,
    ],
)
def test_rows_that_cannot_be_quantized_are_left_to_be_stored_exactly(
    row: list[float], bits: int
) -> None:
    codes, scale, offset, exact, _ = quantize.quantize(torch.tensor([row]), bits)
    assert exact.tolist() == [True]
    assert codes.sum() == 0 and scale.tolist() == [0.0] and offset.tolist() == [0.0]


@pytest.mark.parametrize("bits", BITS)
@every("value", [0.0, 1.0, -1.5, 1e-45, -1e-40, 3.4e38, -3.4e38, 1e30])
@every("dim", [1, 2, 17])
def test_constant_rows_come_back_bit_for_bit(value: float, dim: int, bits: int) -> None:
    rows = torch.full((3, dim), value)
    packed, scale, offset, exact, _ = quantize.quantize_packed(rows, bits)
    assert not exact.any() and packed.sum() == 0 and not scale.any()
    decoded = quantize.dequantize_packed(packed, scale, offset, dim=dim, bits=bits)
    assert torch.equal(decoded.view(torch.int32), rows.view(torch.int32))


@pytest.mark.parametrize("bits", BITS)
def test_the_ends_of_the_quantizable_ranges(bits: int) -> None:
    levels = 2**bits - 1
    smallest, largest = 2.0**-126 * levels, 2.0**126
    just_below = torch.tensor(smallest).nextafter(torch.tensor(0.0)).item()
    just_above = torch.tensor(largest).nextafter(torch.tensor(INF)).item()
    rows = torch.tensor([[0.0, smallest], [0.0, just_below], [0.0, largest], [0.0, just_above]])
    codes, scale, offset, exact, _ = quantize.quantize(rows, bits)
    assert exact.tolist() == [False, True, False, True]
    assert codes.tolist() == [[0, levels], [0, 0], [0, levels], [0, 0]]
    assert scale[0].item() == 2.0**-126
    assert quantize.dequantize(codes, scale, offset)[~exact].isfinite().all()


def test_rounding_is_half_up_and_the_row_spans_all_codes() -> None:
    rows = torch.tensor([[0.0, 0.5, 1.0, 1.49, 1.5, 2.5, 3.0]])
    codes, scale, offset, _, _ = quantize.quantize(rows, 2)
    assert codes.tolist() == [[0, 1, 1, 1, 2, 3, 3]]
    assert scale.tolist() == [1.0] and offset.tolist() == [0.0]


def test_a_negative_zero_minimum_is_kept_as_offset() -> None:
    rows = torch.tensor([[0.0, -0.0, 3.0], [0.0, 0.0, 3.0]])
    assert quantize.quantize(rows, 2).offset.signbit().tolist() == [True, False]


@pytest.mark.parametrize("bits", BITS)
@every("dim", [1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 64, 100, 112, 128])
def test_any_number_of_threads_gives_the_bytes_of_the_reference(
    dim: int, bits: int, threads: int
) -> None:
    torch.manual_seed(dim)
    rows = torch.randn(60, dim) * torch.logspace(-44, 38, 60)[:, None]
    rows[7, 0], rows[8, -1] = NAN, INF
    expected = reference.quantize_packed(rows, bits)
    found = quantize.quantize_packed(rows, bits)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    codes = quantize.quantize(rows, bits).codes
    assert torch.equal(bit_packing.pack(codes, bits), found.packed)
    halves = rows.clone()
    halves[20], halves[21], halves[22], halves[23] = 0.1, 0.25, 1e30, -0.0
    halves[30:50] = 0.05 * halves[30:50] / halves[30:50].abs().amax(dim=1, keepdim=True) + 1.0
    for left, right in zip(
        reference.quantize_packed(halves, bits, half_parameters=True),
        quantize.quantize_packed(halves, bits, half_parameters=True),
        strict=True,
    ):
        assert torch.equal(left, right)
    decoded = quantize.dequantize_packed(*found[:3], dim=dim, bits=bits)
    again = reference.dequantize_packed(*found[:3], dim=dim, bits=bits)
    assert torch.equal(decoded, again)
    assert torch.equal(quantize.dequantize(codes, *found[1:3]), decoded)


def test_empty_input_gives_empty_output() -> None:
    found = quantize.quantize_packed(torch.zeros(0, 5), 3)
    assert [tuple(part.shape) for part in found] == [(0, 2), (0,), (0,), (0,), (0,)]
    decoded = quantize.dequantize_packed(*found[:3], dim=5, bits=3)
    assert tuple(decoded.shape) == (0, 5)


def test_arguments_that_do_not_fit_are_refused() -> None:
    rows = torch.zeros(2, 4)
    for given, bits, what in [
        (rows, 7, "bits: 7"),
        (rows.double(), 4, "rows: dtype"),
        (rows[0], 4, "rows: shape"),
        (rows.t(), 4, "contiguous"),
        (rows[:, :0].contiguous(), 4, "dim 0"),
    ]:
        with pytest.raises(ValueError, match=what):
            quantize.quantize_packed(given, bits)
    packed, scale, offset, _, _ = quantize.quantize_packed(rows, 4)
    with pytest.raises(ValueError, match="packed"):
        quantize.dequantize_packed(packed, scale, offset, dim=5, bits=4)
    with pytest.raises(ValueError, match="scale"):
        quantize.dequantize_packed(packed, scale[:1], offset, dim=4, bits=4)
    with pytest.raises(ValueError, match="offset"):
        quantize.dequantize_packed(packed, scale, offset.double(), dim=4, bits=4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [1, 5, 16, 100])
def test_chosen_rows_are_decoded_to_their_places(dim: int, bits: int, threads: int) -> None:
    packed, scale, offset, _, _ = quantize.quantize_packed(torch.randn(60, dim), bits)
    some, places = torch.randperm(60)[:40].sort().values, torch.randperm(90)
    for positions, ids in [(None, None), (None, places[:60]), (some, None), (some, places[:40])]:
        found, expected = torch.full((90, dim), torch.nan), torch.full((90, dim), torch.nan)
        given = packed, scale, offset
        quantize.dequantize_rows(*given, found, ids, bits=bits, positions=positions)
        reference.dequantize_rows(*given, expected, ids, bits=bits, positions=positions)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_places_that_do_not_fit_are_refused() -> None:
    packed, scale, offset, _, _ = quantize.quantize_packed(torch.randn(3, 4), 4)
    table, ids = torch.zeros(5, 4), torch.tensor([4, 0, 2])
    for to, places, positions, kind, what in [
        (table, ids + 1, None, IndexError, "ids: 1 … 5, below 5"),
        (table, ids - 1, None, IndexError, "ids: -1"),
        (table, ids[:1], torch.tensor([3]), IndexError, "positions: 3"),
        (table, ids[:2], None, ValueError, "ids: 2, expected one for each of 3"),
        (table, ids.int(), None, ValueError, "ids: dtype"),
        (table[:2], None, None, ValueError, "table: 2 rows"),
        (table.double(), ids, None, ValueError, "table: dtype"),
        (torch.zeros(5, 5), ids, None, ValueError, "packed"),
    ]:
        with pytest.raises(kind, match=what):
            quantize.dequantize_rows(packed, scale, offset, to, places, bits=4, positions=positions)
    assert table.sum() == 0
