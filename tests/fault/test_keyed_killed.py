"""SIGKILL in a training with keyed tables: keys, rows, states and evictions go on, bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from recpoint.format import state_tree
from tests.fault.keyed_lives import LAST_BATCH, Moment, keyed_life
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS


def live(
    place: Path,
    kill_in: int | None = None,
    moment: Moment = "lookup",
    *,
    is_cached: bool = False,
) -> list[object]:
    """Run one life; return the bits of the state at the end of a whole one, else nothing."""
    place.mkdir(exist_ok=True)
    process = ForkedProcess(
        target=keyed_life,
        kwargs={
            "place": str(place),
            "kill_in": kill_in,
            "moment": moment,
            "is_cached": is_cached,
        },
        daemon=True,
    )
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == (0 if kill_in is None else -signal.SIGKILL)
    if kill_in is not None:
        return []
    tree, tensors = state_tree.flatten(torch.load(place / "state.pt", weights_only=True))
    return [tree, *[tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]]


def test_a_killed_training_evicts_the_same_rows_afterwards(tmp_path: Path) -> None:
    whole = live(tmp_path / "whole")
    live(tmp_path / "killed", 8, "backward")
    assert live(tmp_path / "killed") == whole


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("moment", ["lookup", "backward", "step"])
@pytest.mark.parametrize("is_cached", [False, True])
def test_wherever_a_batch_is_killed_training_goes_on(
    tmp_path: Path, moment: Moment, is_cached: bool
) -> None:
    whole = live(tmp_path / "whole")
    place = tmp_path / "killed"
    for kill_in in range(1, LAST_BATCH + 1):
        place = tmp_path / f"killed-{kill_in}"
        live(place, kill_in, moment, is_cached=is_cached)
        assert live(place, is_cached=is_cached) == whole


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("is_cached", [False, True])
def test_lives_that_are_killed_at_any_moment_end_as_one_that_is_not(
    tmp_path: Path, is_cached: bool
) -> None:
    whole = live(tmp_path / "whole")
    for seed in range(15):
        place = tmp_path / f"killed-{seed}"
        for again in range(3):
            # Also a life in memory goes on where one with a cache was killed.
            live(place, 3 * seed + again, "any", is_cached=is_cached and again != 1)
        assert live(place, is_cached=is_cached) == whole
