"""Rows quantized straight from their table."""

from __future__ import annotations

import pytest
import torch

from recpoint.kernels.quantize import (
    SYMMETRIC,
    exact_rows,
    exact_rows_many,
    quantize_rows,
    reference,
)


def table_of(dtype: torch.dtype, dim: int) -> torch.Tensor:
    torch.manual_seed(dim)
    table = torch.randn(500, dim).to(dtype)
    table[7, 0] = float("nan")
    table[11] = 3e38 if dtype == torch.float32 else 0.25
    table[13, -1] = float("-inf")
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_they_are_what_quantizing_a_copy_of_the_rows_gives(dtype: torch.dtype, dim: int) -> None:
    table = table_of(dtype, dim)
    for ids in (torch.randint(0, 500, (1033,)), torch.tensor([13]), torch.tensor([]).long()):
        expected = reference.quantize_packed(table[ids].float(), 4, SYMMETRIC, half_parameters=True)
        found = quantize_rows(table, ids, 4, SYMMETRIC, half_parameters=True)
        for name, left, right in zip(expected._fields, expected, found, strict=True):
            assert torch.equal(left, right), name
    for left, right in zip(
        quantize_rows(table, None, 3), reference.quantize_packed(table.float(), 3), strict=True
    ):
        assert torch.equal(left, right)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_row_has_codes_from_the_smallest_normal_step_on(bits: int) -> None:
    least = 2.0**-126 * (2**bits - 1)
    rows = torch.tensor([[0.0, least], [0.0, least * (1 - 2.0**-23)]])
    for quantized in (quantize_rows(rows, None, bits), reference.quantize_packed(rows, bits)):
        assert quantized.exact.tolist() == [False, True]


def test_more_rows_than_one_pass_are_quantized() -> None:
    table = torch.randn(1100, 600)
    ids = torch.randperm(1100)
    expected = reference.quantize_packed(table[ids], 8)
    for left, right in zip(quantize_rows(table, ids, 8), expected, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_codes_are_fetched_as_they_are(dtype: torch.dtype) -> None:
    table = table_of(dtype, 5)
    ids = torch.tensor([3, 13, 7, 499, 7])
    exact = quantize_rows(table, ids, 2).exact
    positions, values = exact_rows(table, ids, exact)
    assert positions.tolist() == [1, 2, 4]
    assert values.dtype == dtype
    assert torch.equal(values.view(torch.uint8), table[[13, 7, 7]].view(torch.uint8))
    every = exact_rows(table, None, quantize_rows(table, None, 2).exact)
    assert every.positions.tolist() == [7, 13]
    assert exact_rows(table, ids[:1], exact[:1]).values.shape == (0, 5)


def test_rows_without_codes_of_many_tables_are_those_of_each() -> None:
    broken, sound = table_of(torch.float32, 5), torch.randn(30, 4)
    ids = torch.tensor([3, 13, 7, 499, 7])
    tables, chosen = [broken, sound, broken], [ids, None, None]
    flags = [
        quantize_rows(table, some, 2).exact for table, some in zip(tables, chosen, strict=True)
    ]
    found = exact_rows_many(tables, chosen, flags)
    for table, some, own, (positions, values) in zip(tables, chosen, flags, found, strict=True):
        expected = exact_rows(table, some, own)
        assert torch.equal(positions, expected.positions)
        assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8))
    (none,) = exact_rows_many([sound], [None], flags[1:2])
    assert (none.positions.shape, none.values.shape) == ((0,), (0, 4))
    assert (none.positions.dtype, none.values.dtype) == (torch.int64, torch.float32)
    assert exact_rows_many([], [], []) == []


def test_what_does_not_fit_is_refused() -> None:
    table, ids = torch.zeros(4, 3), torch.tensor([0])
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        quantize_rows(table.double(), ids, 4)
    with pytest.raises(ValueError, match="contiguous"):
        quantize_rows(table.t(), ids, 4)
    with pytest.raises(ValueError, match="dim 0"):
        quantize_rows(torch.zeros(4, 0), ids, 4)
    with pytest.raises(ValueError, match="ids"):
        quantize_rows(table, ids.int(), 4)
    with pytest.raises(ValueError, match="bits"):
        quantize_rows(table, ids, 7)
    with pytest.raises(IndexError, match="expected 0 <= id < 4"):
        quantize_rows(table, torch.tensor([4]), 4)
