"""Slots of keys: what a map finds, gives and refuses, on each instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.kernels.key_map import MOST_SLOTS, KeyMap, reference
from tests.key_collisions import keys_of_tag

KERNELS = pytest.mark.parametrize("kernel", [KeyMap, reference.KeyMap])
EXTREMES = (-1, 0, -(2**63), 2**63 - 1, 1, 2**31, -(2**31), 2**32)


def _keys(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _room(capacity: int) -> Tensor:
    return torch.zeros(capacity + 1, dtype=torch.int64)


@KERNELS
def test_a_key_is_any_int64(kernel: Any) -> None:
    slot_keys = _room(10)
    slots = kernel(slot_keys)
    asked = _keys(*EXTREMES)
    assert slots.find(asked).tolist() == [0] * 8
    slots.insert(asked, torch.arange(8, 0, -1))
    assert slots.find(asked).tolist() == list(range(8, 0, -1))
    assert slots.find(_keys(5, 0, 0, -2)).tolist() == [0, 7, 7, 0]
    assert slot_keys.tolist() == [0, *EXTREMES[::-1], 0, 0]
    assert (len(slots), slots.capacity) == (8, 10)
    assert slots.free_slots(5).tolist() == [9, 10]


@KERNELS
def test_free_slots_are_the_lowest(kernel: Any) -> None:
    slots = kernel(_room(130))
    assert slots.free_slots(3).tolist() == [1, 2, 3]
    slots.insert(torch.arange(1000, 1130), torch.arange(1, 131))
    assert slots.free_slots(3).tolist() == []
    assert slots.remove(_keys(1128, 5, 1007, 1007, 1064)).tolist() == [129, 0, 8, 0, 65]
    assert slots.slot_keys[[129, 8, 65]].tolist() == [0, 0, 0]
    assert slots.free_slots(2).tolist() == [8, 65]
    assert slots.free_slots(9).tolist() == [8, 65, 129]
    assert slots.free_slots(0).tolist() == slots.free_slots(-1).tolist() == []
    slots.insert(_keys(7), _keys(65))
    assert slots.free_slots(9).tolist() == [8, 129]
    assert slots.taken_slots().tolist() == [k for k in range(1, 131) if k not in (8, 129)]


@KERNELS
def test_what_is_refused_changes_nothing(kernel: Any) -> None:
    slot_keys = _room(4)
    slot_keys[4] = 77  # what a caller left in a free slot
    slots = kernel(slot_keys)
    slots.insert(_keys(10), _keys(2))
    for keys, given, text in (
        ((1, 2), (1, 0), "slots: 0, expected 1 to 4"),
        ((1, 2), (4, 5), "slots: 5, expected 1 to 4"),
        ((1, 2), (4, -(2**63)), "slots: -9223372036854775808, expected 1 to 4"),
        ((1, 2), (4, 2), "slots: 2, which a key has"),
        ((1, 2), (4, 4), "slots: 4, which a key has"),
        ((1, 10), (4, 1), "keys: 10, which has a slot"),
        ((1, 3, 1), (4, 1, 3), "keys: 1, which has a slot"),
    ):
        with pytest.raises(ValueError, match=text):
            slots.insert(_keys(*keys), _keys(*given))
        assert slots.find(_keys(1, 2, 3, 10)).tolist() == [0, 0, 0, 2]
        assert slot_keys.tolist() == [0, 0, 10, 0, 77]
        assert slots.free_slots(9).tolist() == [1, 3, 4]


@KERNELS
def test_other_forms_are_refused(kernel: Any) -> None:
    slots = kernel(_room(4))
    with pytest.raises(ValueError, match=r"slots: 1, expected 2, one for each key"):
        slots.insert(_keys(1, 2), _keys(1))
    for keys, text in (
        (torch.zeros(2), "keys: dtype torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int64), "keys: shape"),
        (torch.arange(8)[::2], "keys: not contiguous"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "keys: device meta, expected cpu"),
    ):
        calls = slots.find, slots.find_or_list, slots.remove
        for call in (*calls, lambda keys: slots.insert(keys, _keys(1, 2))):
            with pytest.raises(ValueError, match=text):
                call(keys)
    for room, text in (
        (_room(0), "slot 0 and 0 others"),
        (torch.zeros(0, dtype=torch.int64), "slot 0 and -1 others"),
        (torch.zeros(3), "slot_keys: dtype"),
    ):
        with pytest.raises(ValueError, match=text):
            kernel(room)
        with pytest.raises(ValueError, match=text):
            slots.grow(room)
    with pytest.raises(ValueError, match="capacity 3, expected the current one, 4, or more"):
        slots.grow(_room(3))
    assert MOST_SLOTS * 25 // 16 + 8 < 2**32  # a tag times the entries fits 64 bits


@KERNELS
def test_keys_without_a_slot_come_once_and_get_theirs(kernel: Any) -> None:
    slots = kernel(_room(100))
    slots.insert(_keys(4, -4), _keys(1, 2))
    keys = _keys(9, 4, -1, 9, 2**63 - 1, -4, -(2**63), -1, 0)
    given, absent = slots.find_or_list(keys)
    assert torch.equal(given, slots.find(keys))
    assert absent.tolist() == [-(2**63), -1, 0, 9, 2**63 - 1]
    slots.insert(absent[1:], _keys(3, 4, 5, 6))
    slots.find_missing(keys, given)
    assert given.tolist() == [5, 1, 3, 5, 6, 2, 0, 3, 4]
    many = torch.arange(-1_500, 1_500)[torch.randperm(3_000)].repeat(2) << 44
    other_keys = torch.arange(-1_500, 1_500) << 44
    assert torch.equal(slots.find_or_list(many)[1], other_keys[other_keys != 0])
    assert slots.find_or_list(_keys(4, 9, 4))[1].tolist() == []
    with pytest.raises(ValueError, match="slots: 1, expected 2"):
        slots.find_missing(_keys(1, 2), _keys(1))


@KERNELS
def test_new_keys_get_slots_that_leave_and_the_lowest_free_ones(kernel: Any) -> None:
    slots = kernel(_room(40))
    slots.insert(torch.arange(38), torch.arange(38) + 2)
    assert slots.choose_slots(2, _keys()).tolist() == [1, 40]
    assert slots.choose_slots(4, _keys(9, 30, 7)).tolist() == [1, 7, 9, 30]
    leaving = torch.arange(39, 1, -1)
    assert slots.choose_slots(40, leaving).tolist() == list(range(1, 41))
    assert slots.choose_slots(0, _keys()).tolist() == []
    for count, leaving in ((3, _keys()), (0, _keys(5))):
        with pytest.raises(ValueError, match="expected 0 to 2"):
            slots.choose_slots(count, leaving)


@KERNELS
def test_no_keys_at_all(kernel: Any) -> None:
    slots = kernel(_room(1))
    slots.insert(_keys(), _keys())
    assert slots.find(_keys()).tolist() == slots.remove(_keys()).tolist() == []
    assert slots.taken_slots().tolist() == []


@pytest.mark.parametrize("tag", [0, 1 << 31, (1 << 32) - 1])
def test_keys_whose_hashes_meet_are_all_found(tag: int) -> None:
    """The last tag's entries go on at the beginning of the index."""
    hostile = torch.tensor(keys_of_tag(tag, range(300)))
    slots = KeyMap(_room(300), seed=0)
    slots.insert(hostile[:200], torch.arange(1, 201))
    assert slots.find(hostile).tolist() == [*range(1, 201), *[0] * 100]
    assert slots.remove(hostile[::2].contiguous()).tolist() == [*range(1, 201, 2), *[0] * 50]
    assert slots.find(hostile).tolist() == [k % 2 * (k + 1) * (k < 200) for k in range(300)]
    assert slots._entries.count_nonzero() == 100
    if tag == 0:
        # No gap is left where a search would end too early, and no other entry is used.
        assert slots._entries[:100].all()


def test_a_drawn_seed_parts_keys_whose_hashes_meet() -> None:
    hostile = torch.tensor(keys_of_tag(0, range(300)))
    slots = KeyMap(_room(300))
    slots.insert(hostile, torch.arange(1, 301))
    assert not slots._entries[:300].all()
    assert slots.find(hostile).tolist() == list(range(1, 301))


@pytest.mark.parametrize("seed", [0, None])
def test_a_map_grows_in_small_steps(seed: int | None) -> None:
    capacity = 2_000
    keys = torch.randperm(4 * capacity, generator=torch.Generator().manual_seed(0)) << 40
    slots = KeyMap(_room(capacity), seed=seed, growth_step=25)
    slots.insert(keys[:capacity], torch.arange(1, capacity + 1))
    larger = torch.full((3 * capacity + 1,), 9)
    larger[: capacity + 1] = slots.slot_keys
    slots.grow(larger)
    calls, used = 0, capacity
    while slots.is_growing:
        assert slots.nbytes > 4 * 8 * 25 * capacity // 16
        expected = torch.arange(1, len(keys) + 1) * (torch.arange(len(keys)) < used)
        assert torch.equal(slots.find(keys), expected)
        slots.insert(keys[used : used + 3], torch.arange(used + 1, used + 4))
        used += 3
        assert slots.remove(keys[used - 1 : used]).tolist() == [used]
        used -= 1
        calls += 1
    # A step ends behind an empty entry, so it is somewhat longer than 25 entries.
    assert 15 < calls <= 25 * capacity / 16 / 50
    assert slots.slot_keys is larger
    assert slots.nbytes < 3 * capacity * 20.8
    assert torch.equal(slots.taken_slots(), torch.arange(1, used + 1))
    assert slots.free_slots(2).tolist() == [used + 1, used + 2]
    assert slots.remove(keys).count_nonzero() == used
    assert slots._entries.count_nonzero() == 0


def test_memory_is_a_bound_for_each_slot() -> None:
    capacity = 100_000
    slots = KeyMap(_room(capacity))
    assert slots.nbytes <= 1.3 * 16 * capacity
    slots.insert(torch.arange(capacity), torch.arange(1, capacity + 1))
    assert slots.nbytes <= 1.3 * 16 * capacity
    assert slots.find(torch.arange(-5, capacity + 5)).count_nonzero() == capacity
