"""Slots of rows: what a map gives, refuses and needs, on each instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recpoint.kernels.slot_map import MOST_USE, SlotMap, Taken, reference

KERNELS = pytest.mark.parametrize("kernel", [SlotMap, reference.SlotMap])


def _ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _lists(taken: Taken | None) -> list[list[int]] | None:
    return None if taken is None else [one.tolist() for one in taken]


@KERNELS
def test_free_slots_are_used_first_and_lowest_first(kernel: Any) -> None:
    slots = kernel(4)
    assert _lists(slots.take(_ids(9, 5, 9), use=1, released=0)) == [[5, 9], [0, 1], [], []]
    assert slots.drop(_ids(5, 7, 5)).tolist() == [0, -1, -1]
    assert _lists(slots.take(_ids(3, 2), use=2, released=1)) == [[2, 3], [0, 2], [], []]
    assert slots.find(_ids(2, 3, 5, 9, -1)).tolist() == [0, 2, -1, 1, -1]


@KERNELS
def test_the_earliest_last_use_leaves_first_and_then_the_lowest_slot(kernel: Any) -> None:
    slots = kernel(4)
    slots.take(_ids(40, 30), use=1, released=0)  # 30 in slot 0, 40 in slot 1
    slots.take(_ids(20, 10), use=2, released=0)
    slots.take(_ids(30), use=3, released=0)
    assert slots.evictable(2) == 3
    assert _lists(slots.take(_ids(1, 2), use=4, released=2)) == [[1, 2], [1, 2], [10, 40], [2, 1]]
    assert slots.evictable(2) == 1


@KERNELS
def test_rows_of_the_call_do_not_leave_for_it(kernel: Any) -> None:
    slots = kernel(2)
    slots.take(_ids(1, 2), use=1, released=0)
    assert slots.take(_ids(1, 2, 3), use=2, released=1) is None
    assert slots.evictable(1) == 2
    assert _lists(slots.take(_ids(2, 3), use=2, released=1)) == [[3], [0], [1], [0]]


@KERNELS
def test_rows_that_are_held_stay_when_uses_are_lowered(kernel: Any) -> None:
    slots = kernel(3)
    slots.take(_ids(1, 2), use=1, released=0)
    slots.take(_ids(1, 2), use=9, released=0)
    slots.hold(_ids(2, 77), 5)
    slots.add(_ids(3), use=7, released=0)
    slots.lower(1)
    expected = {0: 0, 1: 1, 4: 1, 5: 2, 6: 2, 7: 3}
    for order in (list(expected), list(expected)[::-1]):
        assert {released: slots.evictable(released) for released in order} == expected


@KERNELS
def test_what_does_not_fit_is_refused_and_changes_nothing(kernel: Any) -> None:
    with pytest.raises(ValueError, match="capacity: 0"):
        kernel(0)
    slots = kernel(4)
    slots.take(_ids(1), use=1, released=0)
    with pytest.raises(ValueError, match="ids: torch.float32"):
        slots.take(torch.rand(3), use=2, released=0)
    with pytest.raises(ValueError, match="expected a vector"):
        slots.find(torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="on meta"):
        slots.find(torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(IndexError, match="ids: -7"):
        slots.take(_ids(3, 1, -7, -8), use=2, released=0)
    with pytest.raises(IndexError, match="ids: -7"):
        slots.add(_ids(3, -7), use=2, released=0)
    for rows in (_ids(2, 1), _ids(2, 2)):
        with pytest.raises(ValueError, match="expected new rows"):
            slots.add(rows, use=2, released=0)
    with pytest.raises(ValueError, match="use: 1, expected more than released, 1"):
        slots.take(_ids(1), use=1, released=1)
    for use in (-1, MOST_USE + 1):
        with pytest.raises(ValueError, match=f"use: {use}"):
            slots.hold(_ids(1), use)
    assert [one.tolist() for one in slots.rows()] == [[1], [0]]
    assert slots.evictable(1) == 1


@KERNELS
def test_the_latest_use_can_be_held_and_ordered(kernel: Any) -> None:
    slots = kernel(3)
    slots.take(_ids(1, 2, 3), use=1, released=0)
    slots.hold(_ids(1), MOST_USE)
    slots.hold(_ids(2), 1 << 40)
    slots.take(_ids(2, 3), use=2, released=0)
    assert slots.evictable(2) == 1
    assert slots.evictable(1 << 40) == 2
    taken = slots.take(_ids(7, 8), use=(1 << 40) + 1, released=1 << 40)
    assert _lists(taken) == [[7, 8], [2, 1], [2, 3], [1, 2]]


@KERNELS
def test_ids_of_any_layout(kernel: Any) -> None:
    slots = kernel(8)
    columns = torch.tensor([[4, 5], [6, 7]], dtype=torch.int32)
    assert _lists(slots.take(columns[:, 1], use=1, released=0)) == [[5, 7], [0, 1], [], []]
    assert _lists(slots.take(_ids(), use=2, released=0)) == [[], [], [], []]
    assert slots.find(columns[:, 1]).tolist() == [0, 1]
    assert slots.find(columns[1]).tolist() == [-1, 1]


def test_memory_follows_the_capacity() -> None:
    small, large = SlotMap(1_000), SlotMap(8_000)
    before = small.size_bytes
    for use in range(1, 200):
        ids = torch.randint(0, 2**60, (900,), generator=torch.Generator().manual_seed(use))
        assert small.take(ids, use=use, released=use - 1) is not None
    assert small.size == 1_000
    assert small.size_bytes == before
    assert large.size_bytes == pytest.approx(8 * before, rel=0.01)
    assert before <= 1_000 * 112


def test_what_is_returned_holds_no_more_memory_than_it_shows() -> None:
    slots = SlotMap(100)
    taken = slots.take(torch.zeros(10_000, dtype=torch.int64), use=1, released=0)
    assert taken is not None
    assert taken.fetched_ids.untyped_storage().nbytes() == 16
