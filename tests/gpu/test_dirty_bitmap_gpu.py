from __future__ import annotations

import pytest
import torch

from recpoint.kernels.dirty_bitmap import reference, triton

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 2049, 5000, 70_000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_marking_and_collecting_equal_the_reference(
    device: torch.device, rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    expected = torch.zeros((rows + 31) // 32, dtype=torch.int32)
    bitmap = expected.to(device, copy=True)
    for n in (0, 1, 7, 1500):
        ids = torch.randint(0, rows, (n,), dtype=dtype)
        triton.mark(bitmap, ids.to(device), rows=rows)
        reference.mark(expected, ids, rows=rows)
    assert torch.equal(bitmap.cpu(), expected)
    assert triton.count(bitmap) == reference.count(expected)
    collected = triton.collect(bitmap, rows=rows)
    assert collected.dtype == torch.int64
    assert torch.equal(collected.cpu(), reference.collect(expected, rows=rows))
    out = torch.full_like(collected, -7)
    assert torch.equal(triton.collect(bitmap, rows=rows, out=out), collected)


def test_ids_outside_the_table_mark_nothing(device: torch.device) -> None:
    bitmap = torch.zeros(2, dtype=torch.int32, device=device)
    ids = torch.tensor([-1, -(2**62), 40, 63, 64, 2**40, 39], device=device)
    triton.mark(bitmap, ids, rows=40)
    assert triton.collect(bitmap, rows=40).tolist() == [39]


@pytest.mark.parametrize("rows", [1, 32, 40, 3000])
def test_whole_bitmap_operations_equal_the_reference(device: torch.device, rows: int) -> None:
    torch.manual_seed(rows)
    a, b = (torch.zeros((rows + 31) // 32, dtype=torch.int32) for _ in range(2))
    reference.mark(a, torch.randint(0, rows, (rows,)), rows=rows)
    reference.mark(b, torch.randint(0, rows, (rows // 3,)), rows=rows)
    first, second = a.to(device, copy=True), b.to(device, copy=True)
    triton.swap(first, second)
    assert torch.equal(first.cpu(), b) and torch.equal(second.cpu(), a)
    triton.merge(first, second)
    reference.merge(b, a)
    assert torch.equal(first.cpu(), b)
    triton.mark_all(first, rows=rows)
    reference.mark_all(b, rows=rows)
    assert torch.equal(first.cpu(), b)
    triton.clear(first)
    assert triton.count(first) == 0 and triton.collect(first, rows=rows).numel() == 0


def test_an_empty_table_has_an_empty_bitmap(device: torch.device) -> None:
    bitmap = torch.zeros(0, dtype=torch.int32, device=device)
    triton.mark(bitmap, torch.zeros(0, dtype=torch.int64, device=device), rows=0)
    triton.mark_all(bitmap, rows=0)
    triton.swap(bitmap, bitmap.clone())
    assert triton.count(bitmap) == 0
    assert triton.collect(bitmap, rows=0).tolist() == []
