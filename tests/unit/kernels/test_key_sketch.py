"""Counts of keys in a sketch: the fast version equals the reference, on each instruction set."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from recpoint.kernels.key_sketch import DEPTH, MOST_COUNT, KeySketch, reference
from tests.key_collisions import keys_of_tag

KERNELS = pytest.mark.parametrize("kernel", [KeySketch, reference.KeySketch])


def _empty(width: int) -> torch.Tensor:
    return torch.zeros(DEPTH, width, dtype=torch.uint8)


@pytest.mark.parametrize("width", [1, 2, 7, 64, 1_000])
def test_it_is_the_reference_and_never_counts_too_few(width: int) -> None:
    draw = random.Random(width)
    fast, plain = KeySketch(_empty(width)), reference.KeySketch(_empty(width))
    counts: Counter[int] = Counter()
    universe = [-1, 0, -(2**63), 2**63 - 1, *(draw.randrange(-(2**63), 2**63) for _ in range(60))]
    for turn in range(40):
        keys = draw.choices(universe, k=draw.choice([0, 1, 40]))
        counts.update(set(keys))
        for sketch in (fast, plain):
            sketch.add(torch.tensor(keys, dtype=torch.int64))
        if turn == 20:
            fast.halve()
            plain.halve()
            counts = Counter({key: count // 2 for key, count in counts.items()})
        assert torch.equal(fast.counts, plain.counts)
    asked = torch.tensor(universe)
    assert torch.equal(fast.estimate(asked), plain.estimate(asked))
    assert all(e >= counts[key] for key, e in zip(universe, fast.estimate(asked), strict=True))
    if width == 1_000:
        assert fast.estimate(asked).tolist() == [counts[key] for key in universe]


@KERNELS
def test_keys_that_share_all_cells_are_counted_together(kernel: Any) -> None:
    """Whoever knows the hash, which stored sketches fix, can make such keys: none gets too few."""
    first, second = keys_of_tag(1 << 31, (6, 7))  # the step between cells leaves out the last bit
    sketch = kernel(_empty(1_000))
    sketch.add(torch.tensor([first, second]))
    sketch.add(torch.tensor([first]))
    assert sketch.estimate(torch.tensor([first, second])).tolist() == [2, 2]
    sketch.add(torch.tensor([second]))
    assert sketch.estimate(torch.tensor([second, first])).tolist() == [3, 3]
    assert reference.places_of(first, 1_000) == reference.places_of(second, 1_000)


@KERNELS
def test_a_call_is_one_event_in_any_order(kernel: Any) -> None:
    forward, backward = kernel(_empty(8)), kernel(_empty(8))
    keys = torch.arange(30) << 50
    for _ in range(3):
        forward.add(torch.cat([keys, keys]))
        backward.add(keys.flip(0))
    assert torch.equal(forward.counts, backward.counts)
    assert forward.estimate(keys).tolist() == [3] * 30


@KERNELS
def test_counts_end_at_the_most(kernel: Any) -> None:
    sketch = kernel(_empty(5))
    sketch.counts.fill_(MOST_COUNT - 1)
    for _ in range(3):
        sketch.add(torch.tensor([7]))
        assert sketch.estimate(torch.tensor([7])).tolist() == [MOST_COUNT]
    sketch.halve()
    assert sorted(set(sketch.counts.flatten().tolist())) == [127]


def test_places_stay_what_stored_sketches_have() -> None:
    """A checkpoint's counts lie there; another hash would read those of other keys."""
    keys = (0, 1, -1, 2**63 - 1, -(2**63), 123_456_789)
    assert [reference.places_of(key, 1_000_003) for key in keys] == [
        [0, 0, 0, 0],
        [397874, 311131, 224388, 137645],
        [379386, 875742, 372096, 868453],
        [819212, 344041, 868873, 393702],
        [519946, 785983, 52017, 318054],
        [17398, 962161, 906921, 851681],
    ]


@KERNELS
def test_other_forms_are_refused(kernel: Any) -> None:
    for counts, text in (
        (torch.zeros(DEPTH, 3), "counts: dtype torch.float32"),
        (torch.zeros(3, 3, dtype=torch.uint8), r"counts: shape \(3, 3\)"),
        (torch.zeros(DEPTH, 0, dtype=torch.uint8), r"counts: shape \(4, 0\)"),
        (torch.zeros(DEPTH, 6, dtype=torch.uint8)[:, ::2], "counts: not contiguous"),
        (torch.zeros(DEPTH, 3, dtype=torch.uint8, device="meta"), "counts: device meta"),
    ):
        with pytest.raises(ValueError, match=text):
            kernel(counts)
    sketch = kernel(_empty(3))
    for call in (sketch.estimate, sketch.add):
        with pytest.raises(ValueError, match="keys: dtype torch.int32"):
            call(torch.zeros(2, dtype=torch.int32))
        with pytest.raises(ValueError, match="keys: device meta"):
            call(torch.zeros(2, dtype=torch.int64, device="meta"))
    assert not sketch.counts.any()
