"""Digests of rows: the compiled pass gives the reference's, and notices what it is there for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.kernels import row_digest
from recpoint.kernels.row_digest import cpu, reference
from tests.example_counts import examples

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)


@settings(max_examples=examples(60), deadline=None)
@given(
    n=st.integers(0, 40),
    dim=st.integers(0, 19),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
    first=st.integers(0, 2**48) | st.none(),
    shift=st.integers(0, 3),
)
def test_it_is_the_reference(
    n: int, dim: int, dtype: torch.dtype, seed: int, first: int | None, shift: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = (n + shift) * dim * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    rows = data.view(dtype).reshape(n + shift, dim)[shift:]  # addresses of every alignment
    ids = torch.randint(0, 2**62, (n,), generator=generator) if first is None else first
    assert cpu.digest(rows, ids) == reference.digest(rows, ids)
    each = torch.arange(n) + ids if isinstance(ids, int) else ids
    found = cpu.digest_each(rows, each)
    assert torch.equal(found, reference.digest_each(rows, each))
    assert sum(found.tolist()) % 2**64 == cpu.digest(rows, ids)


def test_the_digests_of_the_format() -> None:
    assert row_digest.digest(torch.zeros(0, 4), 0) == 0
    assert row_digest.digest(torch.empty(1, 0), 0) == 0x64AA0AAD47C99B7D
    assert row_digest.digest(torch.tensor([[1.0, 2.0, 3.0]]), 5) == 0x9F6D17D7BC9578B3


def test_order_does_not_matter_and_sets_add_up() -> None:
    rows, ids = torch.rand(9, 5), torch.arange(9) * 3
    order = torch.randperm(9)
    whole = row_digest.digest(rows, ids)
    assert row_digest.digest(rows[order], ids[order]) == whole
    parts = row_digest.digest(rows[:4], ids[:4]) + row_digest.digest(rows[4:], ids[4:])
    assert parts % 2**64 == whole


@given(row=st.integers(0, 7), bit=st.integers(0, 8 * 20 - 1))
def test_one_bit_one_exchange_one_row_too_many_are_noticed(row: int, bit: int) -> None:
    rows = torch.arange(40, dtype=torch.float32).reshape(8, 5)
    whole = row_digest.digest(rows, 0)
    data = rows.clone()
    data[row].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert row_digest.digest(data, 0) != whole
    swapped = torch.arange(8)
    swapped[[row, (row + 1) % 8]] = swapped[[(row + 1) % 8, row]]
    assert row_digest.digest(rows, swapped) != whole
    again = torch.cat([rows, rows[row : row + 1]])
    assert row_digest.digest(again, torch.tensor([*range(8), row])) != whole


def test_what_cannot_be_digested_is_refused() -> None:
    with pytest.raises(ValueError, match="ids: 2 on cpu for 3 rows"):
        row_digest.digest(torch.zeros(3, 2), torch.arange(2))
    with pytest.raises(ValueError, match="ids: 2 on cpu for 3 rows"):
        row_digest.digest_each(torch.zeros(3, 2), torch.arange(2))
    with pytest.raises(ValueError, match="contiguous"):
        row_digest.digest(torch.zeros(3, 2).T, 0)
    with pytest.raises(ValueError, match="meta"):
        row_digest.digest(torch.zeros(3, 2, device="meta"), 0)
