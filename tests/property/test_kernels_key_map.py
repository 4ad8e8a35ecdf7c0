"""Slots of keys: after any calls the fast map says what the reference says."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.kernels.key_map import KeyMap, reference
from tests.example_counts import examples
from tests.key_collisions import keys_of_tag

#: Hashes of most of them meet, at the ends of the index and in its middle.
_MEETING = [
    key for tag in (0, 1, 1 << 31, 2**32 - 2, 2**32 - 1) for key in keys_of_tag(tag, range(5))
]
_KEY = (
    st.integers(-20, 20)
    | st.sampled_from(_MEETING)
    | st.sampled_from([-(2**63), 2**63 - 1])
    | st.integers(-(2**63), 2**63 - 1)
)
_KEYS = st.lists(_KEY, max_size=12)
_CALLS = (
    st.tuples(st.just("insert"), _KEYS, st.booleans())
    | st.tuples(st.just("insert"), _KEYS, st.booleans())
    | st.tuples(st.just("remove"), _KEYS)
    | st.tuples(st.just("misuse"), _KEYS, st.lists(st.integers(-1, 30), max_size=12))
    | st.tuples(st.just("grow"), st.integers(0, 60))
)


def _listed(result: Any) -> Any:
    if isinstance(result, tuple):
        return [_listed(part) for part in result]
    return result.tolist() if isinstance(result, Tensor) else result


class _BothMaps:
    """A map and its reference, called alike."""

    def __init__(self, capacity: int, growth_step: int) -> None:
        room = torch.zeros(capacity + 1, dtype=torch.int64)
        self.fast = KeyMap(room.clone(), seed=0, growth_step=growth_step)
        self.plain = reference.KeyMap(room)
        self.seen_keys: set[int] = set()

    def call(self, name: str, *arguments: Any) -> Any:
        results: list[Any] = []
        for slots in (self.fast, self.plain):
            try:
                result = getattr(slots, name)(*arguments)
            except ValueError as error:
                result = str(error)
            results.append(_listed(result))
        assert results[0] == results[1]
        return results[0]

    def play(self, what: str, *arguments: Any) -> None:
        if what == "grow":
            for slots in (self.fast, self.plain):
                room = torch.zeros(slots.capacity + arguments[0] + 1, dtype=torch.int64)
                room[: slots.capacity + 1] = slots.slot_keys
                slots.grow(room)
            return
        keys = torch.tensor(arguments[0], dtype=torch.int64)
        self.seen_keys.update(arguments[0])
        if what == "remove":
            self.call("remove", keys)
        elif what == "misuse":
            self.call("insert", keys, torch.tensor(arguments[1], dtype=torch.int64))
        else:
            keys = keys.unique()
            keys = keys[self.plain.find(keys) == 0]
            free = self.plain.free_slots(self.plain.capacity)
            free = free.flip(0) if arguments[1] else free
            count = min(len(keys), len(free))
            assert self.call("insert", keys[:count], free[:count]) is None

    def compare(self) -> None:
        assert torch.equal(self.fast.slot_keys, self.plain.slot_keys)
        assert len(self.fast) == len(self.plain)
        asked = torch.tensor([*sorted(self.seen_keys), *self.seen_keys], dtype=torch.int64)
        self.call("find", asked)
        self.call("find_or_list", asked)
        self.call("free_slots", 7)
        taken = torch.tensor(self.call("taken_slots"), dtype=torch.int64)
        leaving = taken[::2].contiguous()
        self.call("choose_slots", len(leaving) + len(taken) % 4, leaving)


@settings(max_examples=examples(400), deadline=None)
@given(
    capacity=st.integers(1, 90),
    growth_step=st.sampled_from([1, 20, 8192]),
    calls=st.lists(_CALLS, max_size=40),
)
def test_it_is_the_reference(capacity: int, growth_step: int, calls: list[Any]) -> None:
    both = _BothMaps(capacity, growth_step)
    for call in calls:
        both.play(*call)
        both.compare()


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stride=st.sampled_from([1, 2**20 + 1, 2**32, 2**58, -1]),
    growth_step=st.sampled_from([1, 300]),
)
def test_long_streams_are_those_of_the_reference(seed: int, stride: int, growth_step: int) -> None:
    """Batches of hundreds of keys at large distances, while the map grows several times."""
    generator = torch.Generator().manual_seed(seed)
    both = _BothMaps(300, growth_step)
    for batch in range(60):
        keys = stride * torch.randint(0, 3_000, (150,), generator=generator)
        both.play("insert", keys.tolist(), batch % 2 == 0)
        both.call("find", keys)
        if batch % 3:
            both.play("remove", keys[::2].tolist())
        if batch % 13 == 5:
            both.play("grow", 250)
    both.compare()
