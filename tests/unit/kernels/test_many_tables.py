"""Operations on many tables at once give what the same operation on each gives."""

from __future__ import annotations

import pytest
import torch

from recpoint.kernels import dirty_bitmap, row_gather

ROWS = [0, 1, 33, 700, 64]


def test_bitmaps_are_counted_and_collected() -> None:
    torch.manual_seed(0)
    bitmaps = [dirty_bitmap.new(rows) for rows in ROWS]
    ids = [torch.randint(0, max(rows, 1), (rows,)) for rows in ROWS]
    dirty_bitmap.mark_many(bitmaps, ids, rows=ROWS)
    expected = [sorted(set(some.tolist())) for some in ids]
    assert [dirty_bitmap.count(bitmap) for bitmap in bitmaps] == [len(some) for some in expected]
    found = dirty_bitmap.collect_many(bitmaps, rows=ROWS)
    assert [some.tolist() for some in found] == expected
    assert dirty_bitmap.collect_many([], rows=[]) == []
    with pytest.raises(ValueError, match="bitmap"):
        dirty_bitmap.collect_many(bitmaps, rows=[*ROWS[:-1], 65])


def test_rows_of_many_sources_are_gathered() -> None:
    weight, state = torch.rand(9, 4), torch.rand(9)
    other = torch.arange(12, dtype=torch.int16).view(3, 4)
    ids, few = torch.tensor([8, 0, 8]), torch.tensor([2])
    outs = [torch.zeros(3, 4), torch.zeros(3), torch.zeros(1, 4, dtype=torch.int16)]
    row_gather.gather_many([weight, state, other], [ids, ids, few], outs)
    assert torch.equal(outs[0], weight[ids]) and torch.equal(outs[1], state[ids])
    assert outs[2].tolist() == [[8, 9, 10, 11]]
    with pytest.raises(IndexError, match="expected 0 <= id < 3"):
        row_gather.gather_many([weight, other], [ids, ids], [outs[0], outs[2].repeat(3, 1)])
    with pytest.raises(ValueError, match="shorter|longer"):
        row_gather.gather_many([weight, state], [ids], outs[:2])
