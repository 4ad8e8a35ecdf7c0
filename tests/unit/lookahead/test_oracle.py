"""The oracle of a cache: what it plans, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recpoint.lookahead.oracle import CapacityError, Oracle, Step


def _ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _plan(oracle: Oracle, *values: int) -> Step:
    step = oracle.plan(_ids(*values))
    assert step is not None
    return step


def _lists(step: Step | None) -> tuple[list[int], ...]:
    assert step is not None
    return tuple(
        one.tolist()
        for one in (step.evicted_ids, step.evicted_slots, step.fetched_ids, step.fetched_slots)
    )


def test_a_stream_of_batches() -> None:
    oracle = Oracle(4)
    assert (oracle.planned, oracle.released, oracle.free, oracle.capacity) == (0, 0, 4, 4)
    assert _lists(_plan(oracle, 7, 3, 7)) == ([], [], [3, 7], [0, 1])
    assert _lists(_plan(oracle, 3, 5)) == ([], [], [5], [2])
    assert oracle.free == 1
    assert oracle.plan(_ids(8, 9)) is None  # 3, 7 and 5 are needed
    assert oracle.planned == 2
    oracle.release(1)
    assert oracle.free == 2  # 7 is not needed any more
    step = _plan(oracle, 8, 9)
    assert step.batch == 3
    assert _lists(step) == ([7], [1], [8, 9], [3, 1])
    oracle.release(2)
    assert _lists(_plan(oracle, 5)) == ([], [], [], [])  # it stayed, and is found
    assert _lists(_plan(oracle, 7)) == ([3], [0], [7], [0])
    assert [one.tolist() for one in oracle.held()] == [[5, 7, 8, 9], [2, 0, 3, 1]]


def test_a_batch_with_more_rows_than_slots_is_refused() -> None:
    oracle = Oracle(2)
    _plan(oracle, 1)
    with pytest.raises(CapacityError, match="found 2 slots; expected 3 or more") as caught:
        oracle.plan(_ids(1, 2, 3, 3))
    assert (caught.value.needed, caught.value.capacity) == (3, 2)
    assert (oracle.planned, oracle.free) == (1, 1)
    assert _lists(_plan(oracle, 2, 2, 2)) == ([], [], [2], [1])
    assert oracle.plan(_ids(3, 3, 3)) is None  # it would fit


def test_rows_found_can_be_held() -> None:
    oracle = Oracle(2)
    _plan(oracle, 1, 2)
    assert oracle.slots_of(_ids(2, 9), hold=3).tolist() == [1, -1]
    oracle.release(1)
    assert oracle.free == 1
    assert _lists(_plan(oracle, 3)) == ([1], [0], [3], [0])
    oracle.release(2)
    assert oracle.plan(_ids(4, 5)) is None
    _plan(oracle)  # batch 3 looks up no row of this table
    oracle.release(3)
    assert _lists(_plan(oracle, 4, 5)) == ([2, 3], [1, 0], [4, 5], [0, 1])


def test_rows_outside_any_plan_can_be_claimed() -> None:
    oracle = Oracle(3)
    _plan(oracle, 1)
    step = oracle.claim(_ids(6, 4), hold=2)
    assert _lists(step) == ([], [], [4, 6], [1, 2])
    assert step is not None and step.batch == 2
    assert oracle.claim(_ids(5), hold=2) is None
    with pytest.raises(ValueError, match="expected new rows"):
        oracle.claim(_ids(4), hold=2)
    oracle.release(1)
    assert _lists(oracle.claim(_ids(5), hold=0)) == ([1], [0], [5], [0])
    assert _lists(_plan(oracle, 8)) == ([5], [0], [8], [0])


def test_plans_can_be_forgotten() -> None:
    oracle = Oracle(4)
    for row in (1, 2, 3):
        _plan(oracle, row)
    oracle.slots_of(_ids(3), hold=2)
    oracle.release(1)
    oracle.forget(keep=1)
    assert (oracle.planned, oracle.free) == (1, 3)
    assert oracle.slots_of(_ids(1, 2, 3)).tolist() == [0, 1, 2]  # they were fetched
    step = _plan(oracle, 2, 9, 8)
    assert step.batch == 2
    assert _lists(step) == ([1], [0], [8, 9], [3, 0])
    with pytest.raises(ValueError, match=r"keep: 3, expected 1 \(released\) to 2 \(planned\)"):
        oracle.forget(keep=3)
    with pytest.raises(ValueError, match="keep: 0"):
        oracle.forget(keep=0)


def test_rows_stay_for_expected_batches() -> None:
    oracle = Oracle(3)
    oracle.expect(_ids(1))  # no row has a slot yet
    assert oracle.expected == 1
    _plan(oracle, 1, 2, 3)
    oracle.expect(_ids(9))
    oracle.expect(_ids(1, 2))
    oracle.release(1)
    assert (oracle.planned, oracle.expected, oracle.free) == (1, 3, 1)
    assert _lists(_plan(oracle, 9)) == ([3], [2], [9], [2])  # row 1 would leave otherwise
    assert _lists(_plan(oracle, 1, 2)) == ([], [], [], [])


def test_planned_batches_come_before_expected_ones() -> None:
    oracle = Oracle(2)
    _plan(oracle, 1, 2)
    oracle.release(1)
    oracle.expect(_ids(8, 9))
    oracle.expect(_ids(1, 2))
    assert oracle.free == 0
    assert _lists(_plan(oracle, 8, 9)) == ([1, 2], [0, 1], [8, 9], [0, 1])
    oracle.release(2)
    oracle.expect(_ids(8))  # batch 3 is not planned yet, and its rows had to leave
    assert (oracle.planned, oracle.expected, oracle.free) == (2, 4, 2)
    _plan(oracle, 1)
    oracle.release(3)
    oracle.expect(_ids(1))
    assert oracle.free == 1  # row 1 stays for batch 5


def test_expected_batches_can_be_forgotten() -> None:
    oracle = Oracle(2)
    _plan(oracle, 1)
    oracle.release(1)
    oracle.expect(_ids(1))
    assert (oracle.expected, oracle.free) == (2, 1)
    oracle.forget(keep=1)
    assert (oracle.expected, oracle.free) == (1, 2)


def test_rows_can_be_dropped() -> None:
    oracle = Oracle(3)
    _plan(oracle, 1, 2, 3)
    assert oracle.drop(_ids(2, 5, 2)).tolist() == [1, -1, -1]
    assert oracle.free == 1
    assert _lists(_plan(oracle, 9)) == ([], [], [9], [1])


def test_wrong_calls_change_nothing() -> None:
    oracle = Oracle(3)
    _plan(oracle, 1)
    with pytest.raises(ValueError, match="batch: 2, expected 1 or less"):
        oracle.release(2)
    with pytest.raises(IndexError, match="ids: -1"):
        oracle.plan(_ids(5, -1))
    with pytest.raises(ValueError, match="hold: -1|use: -1"):
        oracle.slots_of(_ids(1), hold=-1)
    oracle.release(1)
    oracle.release(0)
    assert (oracle.planned, oracle.released, oracle.free) == (1, 1, 3)
    with pytest.raises(ValueError, match="capacity: 0"):
        Oracle(0)
