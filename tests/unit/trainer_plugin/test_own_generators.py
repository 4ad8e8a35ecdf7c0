"""A call that draws from generators of its own leaves the global ones as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from recpoint.format import state_tree
from recpoint.trainer_plugin.state import rng
from tests.training_builder import seed_everything


def _draw() -> list[float]:
    """Draw an odd number of normal numbers: Python and numpy draw two, and keep one of them."""
    normals = [random.gauss(0, 1), float(np.random.standard_normal()), float(torch.randn(()))]
    return [random.random(), float(np.random.random()), float(torch.rand(())), *normals]


def _nothing() -> None:
    pass


@pytest.mark.parametrize("first", [_nothing, _draw], ids=["keeps nothing", "keeps a normal"])
def test_neither_side_draws_from_the_other(first: Callable[[], object]) -> None:
    seed_everything(1)
    first()
    alone = [_draw() for _ in range(5)]
    seed_everything(1)
    own = rng.OwnGenerators()
    inside_alone = [own.run(_draw) for _ in range(5)]
    seed_everything(1)
    own = rng.OwnGenerators()
    first()
    inside, outside = [], []
    for number in range(5):
        inside.append(own.run(_draw))
        own.run(_nothing)
        outside.append(_draw())
        own.run(random.random if number == 7 else _nothing)
    assert outside == alone
    assert inside == inside_alone
    assert not set(sum(inside, [])) & set(sum(outside, []))


def test_equal_seeds_give_equal_generators_and_draw_nothing() -> None:
    seed_everything(1)
    expected = _draw()
    drawn = []
    for seed in (1, 1, 2):
        seed_everything(seed)
        own = rng.OwnGenerators()
        drawn.append(own.run(_draw))
        if seed == 1:
            assert _draw() == expected
    assert drawn[0] == drawn[1] != drawn[2]


def test_their_states_are_stored_and_restored() -> None:
    own = rng.OwnGenerators()
    own.run(_draw)
    tree, tensors = state_tree.flatten(own.run(rng.capture_cpu))
    expected = [own.run(_draw) for _ in range(3)]
    other = rng.OwnGenerators()
    before = state_tree.flatten(rng.capture())[0]
    other.restore(state_tree.unflatten(tree, tensors))
    assert state_tree.flatten(rng.capture())[0] == before
    assert [other.run(_draw) for _ in range(3)] == expected


def test_a_bit_generator_that_the_program_exchanges_is_left_in_place() -> None:
    ours = np.random.get_bit_generator()  # type: ignore[attr-defined]
    own = rng.OwnGenerators()
    own.run(_draw)
    try:
        theirs = np.random.MT19937(5)
        np.random.set_bit_generator(theirs)  # type: ignore[attr-defined]
        np.random.standard_normal()
        state = np.random.get_state(legacy=False)
        own.run(_draw)
        assert np.random.get_bit_generator() is theirs  # type: ignore[attr-defined]
        after = np.random.get_state(legacy=False)
        assert (after["gauss"], after["has_gauss"]) == (state["gauss"], 1)
    finally:
        np.random.set_bit_generator(ours)  # type: ignore[attr-defined]


def test_an_error_of_the_call_leaves_the_global_generators_as_they_were() -> None:
    def fails() -> None:
        _draw()
        raise OSError("no batch")

    seed_everything(1)
    expected = _draw()
    seed_everything(1)
    own = rng.OwnGenerators()
    with pytest.raises(OSError, match="no batch"):
        own.run(fails)
    assert _draw() == expected


class _Interrupts:
    """Raises at one line or call of `rng`, as the handler of a signal may."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.passed = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != rng.__file__ or frame.f_code.co_name == "run":
            # `run` itself is entered before anything has changed.
            return self if frame.f_code.co_name == "run" else None
        self.passed += 1
        if self.passed == self.at:
            raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_leaves_the_global_generators_as_they_were() -> None:
    seed_everything(1)
    np.random.standard_normal()
    expected = _draw()
    at = interrupted = 0
    while True:
        at += 1
        seed_everything(1)
        own = rng.OwnGenerators()
        np.random.standard_normal()
        interrupts = _Interrupts(at)
        earlier = sys.gettrace()
        try:
            sys.settrace(interrupts)
            own.run(_draw)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(earlier)
        if interrupts.passed < at:
            break
        assert _draw() == expected, at
    assert interrupted > 30
