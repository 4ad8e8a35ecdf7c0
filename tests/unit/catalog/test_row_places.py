"""Where rows are among the chunks of a full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore.row_places import RowPlaces


def expected(chunk: range | Tensor, ids: Tensor, twice: set[int]) -> list[tuple[int, int]]:
    rows = list(chunk) if isinstance(chunk, range) else chunk.tolist()
    place = {row: number for number, row in enumerate(rows) if row not in twice}
    return [(number, place[row]) for number, row in enumerate(ids.tolist()) if row in place]


@pytest.mark.parametrize("wanted", ["all", "half", "few", "one", "none", "beyond", "far"])
@pytest.mark.parametrize("twice", [(), (1, 150, 260, 299)])
def test_the_places_of_ids(wanted: str, twice: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(2)
    chunk_of_row = torch.randint(0, 4, (200,), generator=random)  # rows of chunk 3 are in none
    chunks: list[range | Tensor] = [
        torch.nonzero(chunk_of_row == number).flatten() for number in range(3)
    ]
    chunks += [range(200, 260), range(0), range(260, 261), torch.arange(270, 300, 3)]
    held_rows = [*torch.cat([torch.as_tensor(list(chunk)) for chunk in chunks]).tolist()]
    if twice:
        chunks.append(torch.tensor(twice))
    ids = {
        "all": torch.arange(300),
        "half": torch.arange(1, 300, 2),
        "few": torch.tensor([3, 150, 199, 200, 259, 260, 297]),
        "one": torch.tensor([260]),
        "none": torch.empty(0, dtype=torch.int64),
        "beyond": torch.tensor([298, 299, 1000]),
        "far": torch.tensor([2**40]),
    }[wanted]
    places = RowPlaces(300)
    for chunk in chunks:
        places.add(chunk)
    found = {number: (own, rows) for number, own, rows in places.find(ids)}
    held_twice = {row for row in twice if row in held_rows}
    for number, chunk in enumerate(chunks):
        pairs = expected(chunk, ids, held_twice)
        assert (number in found) == bool(pairs)
        if pairs:
            own, rows = found[number]
            assert list(zip(own.tolist(), rows.tolist(), strict=True)) == pairs


def test_a_row_that_three_chunks_have_is_in_none() -> None:
    places = RowPlaces(5)
    for chunk in (range(5), torch.tensor([1, 3]), torch.tensor([3])):
        places.add(chunk)
    (found,) = places.find(torch.arange(5))
    assert (found.chunk, found.ids.tolist(), found.rows.tolist()) == (0, [0, 2, 4], [0, 2, 4])
    assert places.nbytes == 20
