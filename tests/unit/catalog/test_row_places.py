"""Where rows are among the chunks of a full: a map of all rows and a search say the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore import row_places as module
from recpoint.catalog.restore.row_places import row_places


def expected(chunk: range | Tensor, ids: Tensor) -> list[tuple[int, int]]:
    rows = list(chunk) if isinstance(chunk, range) else chunk.tolist()
    place = {row: number for number, row in enumerate(rows)}
    return [(number, place[row]) for number, row in enumerate(ids.tolist()) if row in place]


@pytest.mark.parametrize("dense", [0, 16, 10**9], ids=("search", "either", "map"))
@pytest.mark.parametrize("wanted", ["all", "half", "few", "one", "none", "beyond"])
@pytest.mark.parametrize("twice", [False, True])
def test_the_places_of_ids(
    monkeypatch: pytest.MonkeyPatch, dense: int, wanted: str, twice: bool
) -> None:
    monkeypatch.setattr(module, "_DENSE", dense)
    random = torch.Generator().manual_seed(2)
    chunk_of_row = torch.randint(0, 4, (200,), generator=random)  # rows of chunk 3 are in none
    chunks: list[range | Tensor] = [
        torch.nonzero(chunk_of_row == number).flatten() for number in range(3)
    ]
    chunks += [range(200, 260), range(260, 261), torch.arange(270, 300, 3)]
    if twice:
        chunks.append(torch.tensor([1, 150, 260, 299]))
    ids = {
        "all": torch.arange(300),
        "half": torch.arange(1, 300, 2),
        "few": torch.tensor([3, 150, 199, 200, 259, 260, 297]),
        "one": torch.tensor([260]),
        "none": torch.empty(0, dtype=torch.int64),
        "beyond": torch.tensor([298, 299, 1000]),
    }[wanted]
    found = row_places(chunks, ids)
    assert len(found) == len(chunks)
    for chunk, places in zip(chunks, found, strict=True):
        pairs = list(zip(places.ids.tolist(), places.rows.tolist(), strict=True))
        assert pairs == expected(chunk, ids)
