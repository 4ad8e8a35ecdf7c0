"""Which rank stores which rows."""

from __future__ import annotations

import pytest

from recpoint.errors import SettingsError
from recpoint.trainer_plugin.ranks.sharding import _HeldTable, _owners


def held(first_row: int, rows: int) -> _HeldTable:
    return _HeldTable("t", "t", 10, 4, "F32", None, first_row, rows)


def test_the_lowest_of_those_that_hold_the_same_rows_stores_them() -> None:
    assert _owners("t", {0: held(0, 6), 1: held(6, 4), 2: held(0, 6)}) == {0, 1}
    assert _owners("t", {1: held(0, 10), 2: held(0, 10)}) == {1}


def test_a_rank_without_rows_stores_nothing_wherever_its_shard_would_begin() -> None:
    # As of a table of 10 rows cut into shards of 5 rows for 3 ranks.
    assert _owners("t", {0: held(0, 5), 1: held(5, 5), 2: held(10, 0)}) == {0, 1}
    assert _owners("t", {0: held(0, 0), 1: held(0, 10)}) == {1}


@pytest.mark.parametrize(
    ("by_rank", "found"),
    [
        ({0: held(0, 5), 1: held(4, 6)}, "rows from 4 on rank 1, after rows up to 5"),
        ({0: held(0, 5), 1: held(6, 4)}, "rows from 6 on rank 1, after rows up to 5"),
        ({0: held(0, 9), 1: held(10, 0)}, "the first 9 rows of 10"),
        ({0: held(0, 0)}, "the first 0 rows of 10"),
    ],
)
def test_each_row_has_to_be_stored_once(by_rank: dict[int, _HeldTable], found: str) -> None:
    with pytest.raises(SettingsError, match=found):
        _owners("t", by_rank)
