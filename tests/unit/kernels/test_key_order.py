"""Which rows leave next: the fast order is that of a sort, on each instruction set."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from recpoint.kernels.key_order import KeyOrder, cpu, reference

KERNELS = pytest.mark.parametrize("kernel", [KeyOrder, reference.KeyOrder])


def _vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@KERNELS
def test_last_use_is_compared_first_and_then_the_key(kernel: Any) -> None:
    keys = _vector(0, 7, -(2**63), 2**63 - 1, -1, 5)
    last_use = _vector(-1, 2, 3, 2, 2, -1)
    order = kernel(keys, last_use)
    assert order.least(9, 4).tolist() == [4, 1, 3, 2]
    assert order.least(2, 4).tolist() == [4, 1]
    assert order.least(9, 3).tolist() == [4, 1, 3]
    assert order.least(0, 4).tolist() == order.least(-1, 4).tolist() == []
    last_use[4] = 4
    assert order.least(9, 5).tolist() == [1, 3, 2, 4]
    last_use[1] = -1
    keys[5], last_use[5] = 9, 3
    order.join(_vector(5))
    assert order.least(9, 5).tolist() == [3, 2, 5, 4]


@KERNELS
def test_uses_are_compared_before_last_uses(kernel: Any) -> None:
    keys, last_use, uses = _vector(0, 1, 2, 3), _vector(-1, 5, 4, 9), _vector(0, 2, 2, 1)
    order = kernel(keys, last_use, uses)
    assert order.least(3, 10).tolist() == [3, 2, 1]
    assert order.least(3, 9).tolist() == [2, 1]  # row 3 is looked up right now
    uses[2], last_use[2] = 3, 9
    assert order.least(3, 10).tolist() == [3, 1, 2]


@KERNELS
def test_a_key_that_comes_back_into_its_slot_begins_anew(kernel: Any) -> None:
    keys, last_use, uses = _vector(0, 1, 2), _vector(-1, 3, 4), _vector(0, 5, 4)
    order = kernel(keys, last_use, uses)
    assert order.least(2, 9).tolist() == [2, 1]
    uses[1], last_use[1] = 1, 8
    order.join(_vector(1))
    assert order.least(2, 9).tolist() == [1, 2]
    assert order.least(2, 8).tolist() == [2]


@KERNELS
def test_a_lookup_is_one_use_of_each_slot(kernel: Any) -> None:
    keys, last_use, uses = _vector(0, 1, 2, 3), _vector(-1, 3, 4, 5), _vector(0, 5, 4, 3)
    order = kernel(keys, last_use, uses)
    order.use(_vector(2, 0, 3, 2, 0), 7)
    assert last_use.tolist() == [-1, 3, 7, 7] and uses.tolist() == [0, 5, 5, 4]
    kernel(keys, last_use).use(_vector(1, 1), 8)
    assert last_use.tolist() == [-1, 8, 7, 7] and uses.tolist() == [0, 5, 5, 4]
    for slot in (4, -1):
        with pytest.raises(ValueError, match=f"slots: .*{slot}.*expected 0 to 3"):
            order.use(_vector(1, slot), 9)
    assert last_use.tolist() == [-1, 8, 7, 7] and uses.tolist() == [0, 5, 5, 4]
    assert order.least(3, 9).tolist() == [3, 2, 1]


@KERNELS
def test_a_table_without_keys_has_no_order(kernel: Any) -> None:
    keys, last_use = torch.zeros(4, dtype=torch.int64), torch.full((4,), -1)
    order = kernel(keys, last_use)
    assert order.least(3, 9).tolist() == []
    last_use[2] = 1
    order.join(_vector(2, 2))
    assert order.least(3, 9).tolist() == order.least(3, 9).tolist() == [2]


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_order_of_a_sort(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are used, leave and come, and few candidates make scans and joins frequent."""
    monkeypatch.setattr(cpu, "_FEWEST", 1 << seed % 7)
    draw = random.Random(seed)
    rows = draw.choice([5, 60, 400])
    keys = torch.zeros(rows, dtype=torch.int64)
    last_use, uses = torch.full((rows,), -1), torch.zeros(rows, dtype=torch.int64)
    columns = (keys, last_use, uses)[: 2 + seed % 2]
    is_counted = len(columns) == 3
    fast, plain = KeyOrder(*columns), reference.KeyOrder(*columns)
    new_keys = iter(torch.randperm(1 << 17, generator=torch.Generator().manual_seed(seed)) - 9)
    for step in range(60):
        used = draw.sample(range(1, rows), draw.randrange(rows) // 4)
        hits = [slot for slot in used if last_use[slot] >= 0]
        earlier = last_use.clone(), uses.clone()
        fast.use(torch.tensor(hits * 2, dtype=torch.int64), step)
        expected_uses = earlier[1].clone()
        expected_uses[hits] += is_counted
        assert uses.equal(expected_uses) and bool((last_use[hits] == step).all())
        count = draw.randrange(rows // 2)
        leaving = fast.least(count, step)
        assert leaving.tolist() == plain.least(count, step).tolist()
        if draw.random() < 0.2:  # the lookup is refused
            fast.undo_use()
            assert last_use.equal(earlier[0]) and uses.equal(earlier[1])
            continue
        if draw.random() < 0.7:
            last_use[leaving], keys[leaving], uses[leaving] = -1, 0, 0
        if draw.random() < 0.2:  # they expire, or are deleted
            gone = draw.sample(range(1, rows), rows // 5)
            last_use[gone], keys[gone], uses[gone] = -1, 0, 0
        free = (last_use[1:] < 0).nonzero()[:, 0] + 1
        slots = free[: draw.randrange(rows)]
        keys[slots] = torch.tensor([int(next(new_keys)) for _ in slots], dtype=torch.int64)
        last_use[slots], uses[slots] = step, 1
        fast.join(slots)
        if step % 9 == 8:
            assert fast.least(rows, step + 1).tolist() == plain.least(rows, step + 1).tolist()


def test_candidates_are_few() -> None:
    rows = 200_000
    generator = torch.Generator().manual_seed(0)
    keys = torch.randperm(rows, generator=generator)
    last_use = torch.randint(0, 50, (rows,), generator=generator)
    last_use[0] = -1
    order = KeyOrder(keys, last_use)
    assert torch.equal(order.least(900, 60), reference.KeyOrder(keys, last_use).least(900, 60))
    assert order._heap.nbytes <= 2 * rows


@KERNELS
def test_other_forms_are_refused(kernel: Any) -> None:
    keys = torch.zeros(4, dtype=torch.int64)
    for columns, text in (
        ((keys, keys[:3]), "last_use: 3 rows, expected 4"),
        ((keys, keys, keys[:3]), "uses: 3 rows, expected 4"),
        ((keys.int(), keys), "slot_keys: dtype torch.int32"),
        ((keys, keys.to("meta")), "last_use: device meta"),
    ):
        with pytest.raises(ValueError, match=text):
            kernel(*columns)
    order = kernel(keys, keys)
    for slots, text in (
        (_vector(1, 4), "slots: 4, expected 0 to 3"),
        (_vector(-1), "slots: -1, expected 0 to 3"),
        (torch.zeros(1), "slots: dtype torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            order.join(slots)
