"""Slots of rows: after any calls the fast map has given what the reference gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.kernels.slot_map import SlotMap, reference
from tests.example_counts import examples

_IDS = st.lists(st.integers(0, 60) | st.sampled_from([2**40, 2**63 - 1]), max_size=14)
_USES = st.integers(0, 9)
_CALLS = (
    st.tuples(st.just("take"), _IDS)
    | st.tuples(st.just("release"), _USES)
    | st.tuples(st.sampled_from(["hold", "expect", "add"]), _IDS, st.integers(0, 400))
    | st.tuples(st.just("lower"), _USES)
    | st.tuples(st.just("drop"), _IDS)
    | st.tuples(st.just("evictable"))
)


class _Both:
    """A map and its reference, called alike."""

    def __init__(self, capacity: int) -> None:
        self.maps: tuple[Any, Any] = SlotMap(capacity), reference.SlotMap(capacity)
        self.planned = self.released = 0

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        found, expected = (getattr(one, name)(*given, **named) for one in self.maps)
        assert _plain(found) == _plain(expected)
        return found

    def new(self, ids: Sequence[int]) -> Tensor:
        rows = torch.tensor(sorted(set(ids)), dtype=torch.int64)
        return rows[self.maps[1].find(rows) < 0]

    def play(self, what: str, *given: Any) -> None:
        if what == "release":
            self.released = min(self.planned, self.released + given[0])
        elif what == "take":
            use = self.planned + 1
            ids = torch.tensor(given[0], dtype=torch.int64)
            if self.call("take", ids, use=use, released=self.released) is not None:
                self.planned = use
        elif what in ("hold", "expect"):
            self.call(what, torch.tensor(given[0], dtype=torch.int64), given[1])
        elif what == "add":
            self.call("add", self.new(given[0]), use=given[1], released=self.released)
        elif what == "lower":
            self.planned = max(self.released, self.planned - given[0])
            self.call("lower", self.planned)
        elif what == "drop":
            self.call("drop", torch.tensor(given[0], dtype=torch.int64))
        else:
            self.call("evictable", self.released)
        assert self.maps[0].size == self.maps[1].size


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        assert value.dtype == torch.int64
        return value.tolist()
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


@settings(max_examples=examples(400), deadline=None)
@given(capacity=st.integers(1, 20), calls=st.lists(_CALLS, max_size=40))
def test_it_is_the_reference(capacity: int, calls: list[Any]) -> None:
    both = _Both(capacity)
    for call in calls:
        both.play(*call)
        both.call("rows")
    both.call("find", torch.arange(-2, 61))
    both.call("evictable", both.released)


@settings(max_examples=examples(30), deadline=None)
@given(
    capacity=st.sampled_from([64, 100, 1_000]),
    seed=st.integers(0, 2**32),
    window=st.integers(1, 300),
    stride=st.sampled_from([1, 2**20 + 1, 2**32]),
)
def test_long_streams_are_those_of_the_reference(
    capacity: int, seed: int, window: int, stride: int
) -> None:
    """Batches of hundreds of rows, windows of up to 300 batches, and rows at large distances."""
    generator = torch.Generator().manual_seed(seed)
    both = _Both(capacity)
    for batch in range(400):
        size = int(torch.randint(0, capacity // 3, (1,), generator=generator))
        ids = stride * (4 * capacity * torch.rand(size, generator=generator) ** 4).long()
        ids = ids.int() if stride == 1 and batch % 2 else ids
        taken = both.call("take", ids, use=both.planned + 1, released=both.released)
        if taken is None:
            both.released = min(both.planned, both.released + 1 + batch % 3)
        else:
            both.planned += 1
            both.released = max(both.released, both.planned - window)
        both.call("expect", ids[::3], both.planned + window)
        if batch % 97 == 96:
            both.call("lower", both.planned)
    both.call("rows")


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=200))
def test_rows_come_and_go_in_any_order(ids: list[int]) -> None:
    """Removals leave a table in which each row is found, and only the rows that are there."""
    found = SlotMap(max(1, len(ids)))
    rows = torch.tensor(ids, dtype=torch.int64)
    found.take(rows, use=1, released=0)
    half = rows[::2]
    slots = found.find(rows)
    assert sorted(slots.tolist()) == list(range(len(ids)))
    assert found.drop(half).tolist() == slots[::2].tolist()
    assert (found.find(half) == -1).all()
    assert torch.equal(found.find(rows[1::2]), slots[1::2])
