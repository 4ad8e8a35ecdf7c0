"""Gather and scatter against torch's own indexing, bytes compared."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recpoint.kernels import row_gather


@settings(deadline=None)
@given(
    rows=st.integers(1, 50),
    shape=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    data=st.data(),
)
def test_rows_travel_unchanged(
    rows: int, shape: list[int], dtype: torch.dtype, data: st.DataObject
) -> None:
    table = torch.randint(0, 256, (rows, *shape, dtype.itemsize), dtype=torch.uint8)
    table = table.view(dtype).reshape(rows, *shape)
    ids = torch.tensor(
        data.draw(st.lists(st.integers(0, rows - 1), max_size=60)), dtype=torch.int64
    )
    out = torch.full((ids.numel(), *shape), 1, dtype=dtype)
    row_gather.gather(table, ids, out)
    assert torch.equal(out, table[ids])

    unique, first = ids.unique(), torch.full_like(table, 3)
    expected = first.clone()
    expected[unique] = table[unique]
    part = table[unique].contiguous()
    row_gather.scatter(part, unique, first)
    assert torch.equal(first, expected)
