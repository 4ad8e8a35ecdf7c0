"""A map from rows to places: the fast version equals the reference, on each instruction set."""

from __future__ import annotations

import random

import pytest
import torch

from recpoint.kernels.row_map import RowMap, reference


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    ours, theirs = RowMap(), reference.RowMap()
    rows = draw.choice([10, 3_000, 2**40, 2**62])
    step = draw.choice([1, 1, 8, 4_096])
    place = 0
    for _ in range(draw.randint(0, 12)):
        drawn = {draw.randrange(rows) // step * step for _ in range(draw.choice([0, 3, 900]))}
        ids = torch.tensor(list(drawn), dtype=torch.int64)
        ours.put(ids, place)
        theirs.put(ids, place)
        place += len(ids) + draw.randrange(3)
        wanted = [draw.randrange(rows) for _ in range(50)] + list(drawn)[:50]
        asked = torch.tensor(wanted, dtype=torch.int64)
        assert torch.equal(ours.find(asked), theirs.find(asked))
        assert len(ours) == len(theirs)
    for found, expected in zip(ours.items(), theirs.items(), strict=True):
        assert torch.equal(found, expected)


def test_memory_follows_the_rows() -> None:
    rows = RowMap()
    empty = rows.nbytes
    for part in range(10):
        rows.put(torch.arange(0, 10**9, 10**5) + part, 10_000 * part)
    assert len(rows) == 100_000
    assert empty < 20_000 and 16 * 100_000 < rows.nbytes <= 16 * 100_000 * 8 // 3
    assert rows.find(torch.tensor([0, 5, 10**5 + 3, 11])).tolist() == [0, 50_000, 30_001, -1]


def test_other_ids_are_refused() -> None:
    rows = RowMap()
    with pytest.raises(ValueError, match="int32"):
        rows.find(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="device meta"):
        rows.find(torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="contiguous"):
        rows.put(torch.arange(8)[::2], 0)
    with pytest.raises(ValueError, match="negative"):
        rows.put(torch.tensor([3, -1]), 0)
    assert len(rows) == 0
