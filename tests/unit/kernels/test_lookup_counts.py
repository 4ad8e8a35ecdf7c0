"""Counts of lookups in a byte: equal to the reference, exact while small, right on average."""

from __future__ import annotations

import pytest
import torch

from recpoint.kernels.lookup_counts import MOST, count, reference, values


def test_a_code_stands_for_a_count() -> None:
    counts = values(torch.arange(256, dtype=torch.uint8)).tolist()
    assert counts[:17] == list(range(17))
    assert counts[16:26] == [16, 18, 20, 22, 24, 26, 28, 30, 32, 36]
    assert counts[255] == MOST == 15 * 2**30
    steps = [after - before for before, after in zip(counts, counts[1:], strict=False)]
    assert all(step <= max(1, before / 8) for step, before in zip(steps, counts, strict=False))
    assert values(torch.tensor([[3], [200]], dtype=torch.uint8)).shape == (2, 1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(0,), (1,), (300,), (40, 7)])
def test_it_is_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(len(shape))
    codes = torch.randint(0, 256, (50,), dtype=torch.uint8)
    expected = codes.clone()
    ids = (50 * torch.rand(shape) ** 3).to(dtype)
    for start in (0, 2**40):
        count(codes, ids, start=start)
        reference.count(expected, ids, start=start)
        assert torch.equal(codes, expected)


def test_ids_of_a_column_are_counted() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    count(codes, torch.tensor([[0, 3], [0, 2]])[:, 0], start=0)
    assert codes.tolist() == [2, 0, 0, 0]


def test_small_counts_are_exact_and_large_ones_are_right_on_average() -> None:
    rows, times = 400, 1_000
    codes, counted = torch.zeros(rows, dtype=torch.uint8), 0
    for time in range(times):
        count(codes, torch.arange(rows), start=counted)
        counted += rows
        if time < 16:
            assert values(codes).eq(time + 1).all()
    counts = values(codes).double() / times
    # A count spreads by a quarter of itself, so the mean of 400 by an eightieth.
    assert 0.1 < float(counts.std()) < 0.25
    assert abs(float(counts.mean()) - 1) < 4 * 0.25 / 20


def test_the_largest_code_stays() -> None:
    codes = torch.full((1,), 255, dtype=torch.uint8)
    count(codes, torch.zeros(1_000, dtype=torch.int64), start=0)
    assert codes.tolist() == [255]


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1])
def test_an_id_out_of_range_counts_nothing(wrong: int) -> None:
    codes = torch.zeros(3, dtype=torch.uint8)
    for counting in (count, reference.count):
        for dtype in (torch.int32, torch.int64):
            with pytest.raises(IndexError, match=f"ids: {wrong}, expected 0 <= id < 3"):
                counting(codes, torch.tensor([0, 1, wrong], dtype=dtype), start=0)
    assert codes.tolist() == [0, 0, 0]


def test_other_forms_are_refused() -> None:
    codes, ids = torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="codes"):
        count(codes.float(), ids, start=0)
    with pytest.raises(ValueError, match="codes"):
        count(torch.zeros(6, dtype=torch.uint8)[::2], ids, start=0)
    with pytest.raises(ValueError, match="ids"):
        count(codes, ids.float(), start=0)
    with pytest.raises(ValueError, match="start"):
        count(codes, ids, start=-1)
    with pytest.raises(ValueError, match="expected both on cpu"):
        count(codes, ids.to("meta"), start=0)
    with pytest.raises(ValueError, match="codes"):
        values(codes.float())
