"""Rows that two chunks bring: found in whatever form they come, in memory for what is stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.catalog.restore.rows import RowCoverage
from recpoint.errors import MalformedObject
from recpoint.format.manifest import MAX_TABLE_ROWS


def ids(*rows: int) -> Tensor:
    return torch.tensor(rows)


DISJOINT: list[list[range | Tensor]] = [
    [range(0, 3), range(3, 6)],
    [ids(1, 5), ids(0, 4, 9)],
    [ids(0, 9), range(1, 9)],
    [range(5, 8), ids(4, 8), range(2, 4)],
]
OVERLAPPING: list[list[range | Tensor]] = [
    [range(0, 4), range(3, 6)],
    [ids(1, 5), ids(0, 5, 9)],
    [ids(0, 8), range(1, 9)],
    [range(5, 8), ids(2, 9), range(2, 4)],
]


def covered(chunks: list[range | Tensor], rows: int) -> None:
    coverage = RowCoverage(rows=rows, row_counts=[len(chunk) for chunk in chunks])
    for chunk in chunks:
        coverage.add(chunk)
    coverage.finish(key="manifests/x", table="t")


# The largest table that a manifest may claim: a bitmap of it would take 32 TiB.
@pytest.mark.parametrize("rows", [10, MAX_TABLE_ROWS])
@pytest.mark.parametrize("chunks", DISJOINT)
def test_disjoint_chunks_are_fine(chunks: list[range | Tensor], rows: int) -> None:
    covered(chunks, rows)


@pytest.mark.parametrize("rows", [10, MAX_TABLE_ROWS])
@pytest.mark.parametrize("chunks", OVERLAPPING)
def test_a_row_in_two_chunks_is_found(chunks: list[range | Tensor], rows: int) -> None:
    with pytest.raises(MalformedObject, match="a row of table 't' in two chunks"):
        covered(chunks, rows)
