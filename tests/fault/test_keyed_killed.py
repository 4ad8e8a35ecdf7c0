"""SIGKILL in a training with keyed tables: keys, rows, states and evictions go on, bit for bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.fault.keyed_kills import LONG, killed_at_random, live
from tests.fault.keyed_lives import LAST_BATCH, Moment

_MOMENTS: tuple[Moment, ...] = ("lookup", "backward", "step")


def test_a_killed_training_evicts_the_same_rows_afterwards(tmp_path: Path) -> None:
    whole = live(tmp_path / "whole")
    live(tmp_path / "killed", 8, "backward")
    assert live(tmp_path / "killed") == whole


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("moment", _MOMENTS)
@pytest.mark.parametrize("is_cached", [False, True])
def test_wherever_a_batch_is_killed_training_goes_on(
    tmp_path: Path, moment: Moment, is_cached: bool
) -> None:
    whole = live(tmp_path / "whole")
    for kill_in in range(1, LAST_BATCH + 1):
        place = tmp_path / f"killed-{kill_in}"
        live(place, kill_in, moment, is_cached=is_cached)
        assert live(place, is_cached=is_cached) == whole


@pytest.mark.nightly("loops")
def test_trainings_that_are_killed_at_any_moment_end_as_one_that_is_not(tmp_path: Path) -> None:
    """200 kills of tables of all rules."""
    whole = live(tmp_path / "whole", last_batch=LONG)
    for seed in range(20):
        place = tmp_path / f"killed-{seed}"
        assert killed_at_random(place, seed=seed, kills=10, last_batch=LONG) == whole
        shutil.rmtree(place)


@pytest.mark.nightly("loops")
def test_killed_trainings_go_on_in_memory_or_with_a_cache(tmp_path: Path) -> None:
    whole = live(tmp_path / "whole")
    for seed in range(15):
        place = tmp_path / f"killed-{seed}"
        for again in range(3):
            live(place, 3 * seed + again, "any", is_cached=again != 1)
        assert live(place, is_cached=True) == whole


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("capacity_factors", [(2, 1), (1, 2)], ids=["half", "double"])
def test_kills_change_nothing_of_a_training_in_another_capacity(
    tmp_path: Path, capacity_factors: tuple[int, int]
) -> None:
    """A killed training goes on with half or twice the rows; more kills then change no bit."""
    first, second = capacity_factors
    place, earlier = tmp_path / "run", tmp_path / "earlier"
    for seed in range(8):
        draw = random.Random(seed)
        # At these moments each checkpoint that is due is committed, so both go on from the same.
        live(place, draw.randrange(4, LAST_BATCH), draw.choice(_MOMENTS), capacity_factor=first)
        shutil.copytree(place, earlier)
        whole = live(place, capacity_factor=second)
        shutil.rmtree(place)
        earlier.rename(place)
        again = killed_at_random(place, seed=seed, kills=3, capacity_factor=second)
        assert again == whole
        shutil.rmtree(place)
