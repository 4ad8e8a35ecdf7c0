"""Runs lives of a training with keyed tables in processes, and returns the bits of its end."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import torch

from recpoint.format import state_tree
from tests.fault.keyed_lives import Moment, keyed_life
from tests.forked import ForkedProcess
from tests.polling import PATIENCE_SECONDS

__all__ = ["LONG", "killed_at_random", "live"]

#: The last batch of a training that is killed ten times before it comes to its end.
LONG = 60


def live(
    place: Path, kill_in: int | None = None, moment: Moment = "lookup", **settings: Any
) -> list[object]:
    """Run one life; return the bits of the state at the end of a whole one, else nothing.

    Args:
        place: directory of the run.
        kill_in, moment: see `keyed_life`.
        settings: others of `keyed_life`.
    """
    place.mkdir(exist_ok=True)
    process = ForkedProcess(
        target=keyed_life,
        kwargs={"place": str(place), "kill_in": kill_in, "moment": moment, **settings},
        daemon=True,
    )
    process.start()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == (0 if kill_in is None else -signal.SIGKILL)
    if kill_in is not None:
        return []
    tree, tensors = state_tree.flatten(torch.load(place / "state.pt", weights_only=True))
    return [tree, *[tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]]


def killed_at_random(place: Path, *, seed: int, kills: int, **settings: Any) -> list[object]:
    """Run lives that are killed at random moments, and then a whole one; return its bits.

    Args:
        place: directory of the run.
        seed: of the moments.
        kills: how many.
        settings: others of `keyed_life`.
    """
    draw = random.Random(seed)
    for _ in range(kills):
        live(place, draw.randrange(1 << 30), "any", **settings)
    return live(place, **settings)
