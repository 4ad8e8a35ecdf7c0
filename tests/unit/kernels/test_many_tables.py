"""Operations on many tables at once give what the same operation on each gives."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from recpoint.kernels import dirty_bitmap, row_gather
from recpoint.kernels.dirty_bitmap import reference
from tests.unit.kernels.every import every

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


#: Features of one lookup (ids, rows of the table), more than one native call takes at a time.
FEATURES = [(0, 5), (3, 33), (900, 700), (0, 1), (64, 64), (450, 40_000), (1, 700), (70, 1)] * 20


def features(ids_dtype: torch.dtype, bags_each: int) -> tuple[Tensor, list[int]]:
    """Return ids of FEATURES, some of them pruned or out of range, and where each bag begins."""
    generator = torch.Generator().manual_seed(3)
    lengths: list[int] = []
    parts = []
    for number, (count, rows) in enumerate(FEATURES):
        ends = torch.randint(0, count + 1, (bags_each - 1,), generator=generator).sort().values
        lengths += [end - first for first, end in pairwise([0, *ends.tolist(), count])]
        parts.append(torch.randint(0, rows, (count,), generator=generator, dtype=ids_dtype))
        if count > 2 and number % 3 == 0:
            parts[-1][::7], parts[-1][1::7], parts[-1][2] = -1, -5, 2**30
    return torch.cat(parts), [0, *accumulate(lengths)]


@every("bags_each", [1, 3])
@every("offsets_dtype", [torch.int32, torch.int64])
@every("ids_dtype", [torch.int32, torch.int64])
def test_features_of_one_lookup_are_marked_in_one_call(
    ids_dtype: torch.dtype, offsets_dtype: torch.dtype, bags_each: int
) -> None:
    ids, starts = features(ids_dtype, bags_each)
    offsets = torch.tensor(starts, dtype=offsets_dtype)
    bags = [(bags_each * f, bags_each * (f + 1)) for f in range(len(FEATURES))]
    rows = [rows for _, rows in FEATURES]
    bitmaps = [dirty_bitmap.new(count) for count in rows]
    expected = [bitmap.clone() for bitmap in bitmaps]
    bitmaps[6], expected[6] = bitmaps[2], expected[2]  # two features look up one table
    mark = dirty_bitmap.feature_marker(bitmaps, rows=rows)
    for lookup_ids in (ids[: ids.numel() // 2], ids):  # offsets past the ids read nothing
        mark(lookup_ids, offsets, bags)
        reference.mark_features(expected, lookup_ids, offsets, bags, rows=rows)
        assert all(map(torch.equal, bitmaps, expected))
    # Strided tensors, and other bags of the same features.
    other_bitmaps = [torch.zeros_like(bitmap) for bitmap in bitmaps]
    other_bitmaps[6] = other_bitmaps[2]
    mark = dirty_bitmap.feature_marker(other_bitmaps, rows=rows)
    mark(ids, offsets, [(0, 0)] * len(bags))
    assert not any(dirty_bitmap.count(bitmap) for bitmap in other_bitmaps)
    mark(ids.repeat_interleave(2)[::2], offsets.repeat_interleave(2)[::2], bags)
    assert all(map(torch.equal, other_bitmaps, expected))


def test_features_that_do_not_fit_are_refused_and_mark_nothing() -> None:
    bitmaps = [dirty_bitmap.new(2), dirty_bitmap.new(2)]
    ids, offsets = torch.tensor([1, 1]), torch.arange(3)
    bags = [(0, 1), (1, 2)]
    mark = dirty_bitmap.feature_marker(bitmaps, rows=[2, 2])
    for wrong_bags in ([(0, 2), (2, 1)], [(0, 1)], [(0, 1), (1, 3)], [(-1, 1), (1, 2)]):
        with pytest.raises(ValueError, match="bags"):
            mark(ids, offsets, wrong_bags)
    for wrong in (ids.float(), ids.view(1, 2)):
        with pytest.raises(ValueError, match="ids"):
            mark(wrong, offsets, bags)
    assert not any(dirty_bitmap.count(bitmap) for bitmap in bitmaps)
    mark(ids, offsets, bags)
    with pytest.raises(ValueError, match="bags"):  # the bags fitted the offsets of the call before
        mark(ids, offsets[:2], bags)
    with pytest.raises(ValueError, match="bitmap"):
        dirty_bitmap.feature_marker(bitmaps, rows=[2, 40])
    with pytest.raises(ValueError, match="1 row or more"):
        dirty_bitmap.feature_marker([dirty_bitmap.new(0)], rows=[0])
    dirty_bitmap.feature_marker([], rows=[])(ids, offsets, [])


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
