"""What a `state_dict` may count on that is asked while other threads copy rows."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from tests.training_builder import (
    Place,
    checkpointer,
    everything,
    simple_training,
    train,
    until,
)


class Buffer:
    """An extra that clones its state, and notes whether rows are copied at the time."""

    def __init__(self, values: int) -> None:
        self.state = torch.rand(values)
        self.beside_rows: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        self.beside_rows.append(
            any("dirty_rows" in frame.filename for frame in traceback.extract_stack())
        )
        return {"state": self.state.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


@pytest.mark.parametrize(("values", "beside"), [(100, True), (2_000_000, False)])
def test_large_state_is_cloned_by_all_threads(values: int, beside: bool, place: Place) -> None:
    """Where little is to be gained by looking at it while tables are copied, and much to lose."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        training, buffer = simple_training(), Buffer(values)
        ckpt = checkpointer(training, place, interval_batches=1, extras={"buffer": buffer})
        ckpt.restore()
        with place.agent():
            for stored in range(1, 4):
                buffer.beside_rows.clear()
                train(training, ckpt, 1)
                until(lambda: ckpt.stats.committed == ckpt.batches_done)
                if stored > 1:  # the first is a full, of which no rows are copied by threads
                    assert buffer.beside_rows == [beside]
            ckpt.close(final=False)
    finally:
        torch.set_num_threads(before)


class Drawing:
    """An extra whose `state_dict` draws, as a `StatefulDataLoader` does that begins an epoch."""

    def state_dict(self) -> dict[str, Any]:
        torch.rand(1)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_weighing_the_state_draws_nothing(place: Place) -> None:
    """A start asks what fits into memory: it went on with other random numbers after that."""
    with place.agent():
        training = simple_training(1)
        ckpt = checkpointer(training, place, extras={"drawing": Drawing()})
        ckpt.restore()
        train(training, ckpt, 2)
        until(lambda: ckpt.stats.committed == 1)
        ckpt.close(final=False)
        done = everything(training)
        again = simple_training(2)
        ckpt = checkpointer(again, place, extras={"drawing": Drawing()})
        ckpt.restore()
        ckpt.close(final=False)
    assert everything(again) == done
