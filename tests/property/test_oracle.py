"""The oracle against a dictionary, and what no sequence of calls may break."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from recpoint.lookahead.oracle import CapacityError, Oracle, Step
from tests.example_counts import examples

_ROWS = st.integers(0, 30)
_BATCH = st.lists(_ROWS, max_size=12)


def _tensor(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _plain(step: Step | None) -> tuple[object, ...] | None:
    if step is None:
        return None
    tensors = (step.evicted_ids, step.evicted_slots, step.fetched_ids, step.fetched_slots)
    return step.batch, *(one.tolist() for one in tensors)


class OracleMachine(RuleBasedStateMachine):
    """Calls an oracle, another that is called alike, and keeps a dictionary of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 0

    @precondition(lambda self: self.capacity == 0)
    @rule(capacity=st.integers(1, 16))
    def begin(self, capacity: int) -> None:
        self.capacity = capacity
        self.oracle, self.again = Oracle(capacity), Oracle(capacity)
        self.slots: dict[int, int] = {}
        self.uses: dict[int, int] = {}  # by plans
        self.expectations: dict[int, int] = {}  # by batches that are expected
        self.expected = self.kept = self.dropped = 0
        self.holds: dict[int, int] = {}  # by calls with `hold`
        self.planned = self.released = 0
        self.bytes = self.oracle.size_bytes

    def last(self, row: int) -> int:
        return max(self.uses[row], self.holds[row], self.expectations.get(row, 0))

    def evictable(self) -> list[int]:
        return [row for row in self.slots if self.last(row) <= self.released]

    def free(self) -> int:
        return self.capacity - len(self.slots) + len(self.evictable())

    def carry_out(self, step: Step, new: set[int], kept: set[int]) -> None:
        """Check a Step, and do what it says to the dictionary."""
        evicted, fetched = step.evicted_ids.tolist(), step.fetched_ids.tolist()
        assert fetched == sorted(new)
        assert evicted == sorted(set(evicted))
        free = sorted(set(range(self.capacity)) - set(self.slots.values()))[: len(new)]
        order = sorted(
            (self.last(row), self.slots[row], row) for row in self.evictable() if row not in kept
        )
        leaving = order[: len(new) - len(free)]
        assert evicted == sorted(row for _, _, row in leaving)
        assert step.fetched_slots.tolist() == free + [slot for _, slot, _ in leaving]
        for row, slot in zip(evicted, step.evicted_slots.tolist(), strict=True):
            assert self.slots.pop(row) == slot
            assert self.uses.pop(row) <= self.released
            assert self.holds.pop(row) <= self.released
            assert self.expectations.pop(row, 0) <= self.released
        for row, slot in zip(fetched, step.fetched_slots.tolist(), strict=True):
            assert slot not in self.slots.values()
            self.slots[row], self.uses[row], self.holds[row] = slot, 0, 0

    @precondition(lambda self: self.capacity)
    @rule(ids=_BATCH, small=st.booleans())
    def plan(self, ids: list[int], small: bool) -> None:
        rows = set(ids)
        given = _tensor(ids).int() if small else _tensor(ids)
        new = rows - self.slots.keys()
        if len(new) > self.free() - len(rows & set(self.evictable())) and self.kept > self.planned:
            self.lower_expectations()
            self.kept, self.dropped = 0, self.expected
        if len(rows) > self.capacity:
            for oracle in self.oracle, self.again:
                with pytest.raises(CapacityError) as caught:
                    oracle.plan(given)
                assert (caught.value.needed, caught.value.capacity) == (len(rows), self.capacity)
            return
        step = self.oracle.plan(given)
        assert _plain(step) == _plain(self.again.plan(given))
        room = self.free() - len(rows & set(self.evictable()))
        assert (step is None) == (len(new) > room)
        if step is not None:
            self.carry_out(step, new, rows)
            self.planned += 1
            self.expected = max(self.expected, self.planned)
            assert step.batch == self.planned
            self.uses.update(dict.fromkeys(rows, self.planned))

    @precondition(lambda self: self.capacity)
    @rule(ids=_BATCH)
    def expect(self, ids: list[int]) -> None:
        self.expected += 1
        if self.planned >= self.dropped:
            self.kept = self.expected
            found = self.slots.keys() & set(ids)
            self.expectations.update(dict.fromkeys(found, self.expected))
        for oracle in self.oracle, self.again:
            oracle.expect(_tensor(ids))

    def lower_expectations(self) -> None:
        """The row is taken for one of the last batch that is planned: it leaves late."""
        self.expectations = {row: min(use, self.planned) for row, use in self.expectations.items()}

    @precondition(lambda self: self.capacity)
    @rule(count=st.integers(0, 4))
    def release(self, count: int) -> None:
        self.released = min(self.planned, self.released + count)
        for oracle in self.oracle, self.again:
            oracle.release(self.released)

    @precondition(lambda self: self.capacity)
    @rule(ids=_BATCH, hold=st.none() | st.integers(-3, 5))
    def look_up(self, ids: list[int], hold: int | None) -> None:
        if hold is not None:
            hold = max(0, self.planned + hold)
            for row in self.slots.keys() & set(ids):
                self.holds[row] = max(self.holds[row], hold)
        for oracle in self.oracle, self.again:
            found = oracle.slots_of(_tensor(ids), hold=hold)
            assert found.tolist() == [self.slots.get(row, -1) for row in ids]

    @precondition(lambda self: self.capacity)
    @rule(ids=_BATCH, hold=st.integers(-3, 5))
    def claim(self, ids: list[int], hold: int) -> None:
        hold = max(0, self.planned + hold)
        new = set(ids) - self.slots.keys()
        step = self.oracle.claim(_tensor(list(new)), hold=hold)
        assert _plain(step) == _plain(self.again.claim(_tensor(list(new)), hold=hold))
        assert (step is None) == (len(new) > self.free())
        if step is not None:
            self.carry_out(step, new, set())
            self.holds.update(dict.fromkeys(new, hold))

    @precondition(lambda self: self.capacity)
    @rule(count=st.integers(0, 6))
    def forget(self, count: int) -> None:
        self.planned = max(self.released, self.planned - count)
        for oracle in self.oracle, self.again:
            oracle.forget(keep=self.planned)
        self.uses = {row: min(use, self.planned) for row, use in self.uses.items()}
        self.lower_expectations()
        self.expected, self.kept, self.dropped = self.planned, 0, 0

    @precondition(lambda self: self.capacity)
    @rule(ids=st.lists(_ROWS, max_size=3))
    def drop(self, ids: list[int]) -> None:
        expected = []
        for row in ids:
            expected.append(self.slots.pop(row, -1))
            self.uses.pop(row, None)
            self.holds.pop(row, None)
            self.expectations.pop(row, None)
        for oracle in self.oracle, self.again:
            assert oracle.drop(_tensor(ids)).tolist() == expected

    @precondition(lambda self: self.capacity)
    @rule()
    def count(self) -> None:
        """Only now and then, because it changes what the next eviction has to look at."""
        assert self.oracle.free == self.free()

    @invariant()
    def holds_together(self) -> None:
        if not self.capacity:
            return
        assert (self.oracle.planned, self.oracle.released) == (self.planned, self.released)
        assert self.oracle.expected == self.expected
        ids, slots = self.oracle.held()
        assert dict(zip(ids.tolist(), slots.tolist(), strict=True)) == self.slots
        assert ids.tolist() == sorted(self.slots)
        assert len(set(slots.tolist())) == len(self.slots) <= self.capacity
        assert self.oracle.size_bytes == self.bytes


TestOracle = OracleMachine.TestCase
TestOracle.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)


@settings(max_examples=examples(50), deadline=None)
@given(
    batches=st.lists(_BATCH, max_size=30),
    window=st.integers(1, 8),
    further=st.integers(0, 8),
    extra=st.integers(0, 6),
)
def test_a_cached_run_sees_the_rows_of_an_uncached_one(
    batches: list[list[int]], window: int, further: int, extra: int
) -> None:
    """Rows are numbers that training counts up, in a store and in slots."""
    capacity = max([len(set(ids)) for ids in batches] + [1]) + extra
    oracle = Oracle(capacity)
    store, cache = dict.fromkeys(range(31), 0), [0] * capacity
    expected = dict.fromkeys(range(31), 0)
    steps: list[Step] = []
    for trained, ids in enumerate(batches):
        for coming in batches[oracle.expected : trained + window + further]:
            oracle.expect(_tensor(coming))
        for coming in batches[len(steps) : trained + window]:
            step = oracle.plan(_tensor(coming))
            if step is None:
                break
            steps.append(step)
            for row, slot in zip(
                step.evicted_ids.tolist(), step.evicted_slots.tolist(), strict=True
            ):
                store[row] = cache[slot]
            for row, slot in zip(
                step.fetched_ids.tolist(), step.fetched_slots.tolist(), strict=True
            ):
                cache[slot] = store[row]
        assert len(steps) > trained  # the batch alone fits
        for row, slot in zip(ids, oracle.slots_of(_tensor(ids)).tolist(), strict=True):
            assert slot >= 0 and cache[slot] == expected[row]
            cache[slot] += 1 + trained
            expected[row] += 1 + trained
        oracle.release(trained + 1)
    kept, slots = oracle.held()
    for row, slot in zip(kept.tolist(), slots.tolist(), strict=True):
        store[row] = cache[slot]
    assert store == expected


@settings(max_examples=examples(50), deadline=None)
@given(batches=st.lists(_BATCH, max_size=20))
def test_with_room_for_all_rows_each_is_fetched_once(batches: list[list[int]]) -> None:
    oracle = Oracle(31)
    fetched: list[int] = []
    for number, ids in enumerate(batches):
        step = oracle.plan(_tensor(ids))
        assert step is not None and step.evicted_ids.numel() == 0
        fetched += step.fetched_ids.tolist()
        oracle.release(number + 1)
    assert sorted(fetched) == sorted({row for ids in batches for row in ids})
