"""Nobody reads memory of a table that torch has moved to where other processes see it."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import Tensor, nn

from recpoint import Checkpointer
from recpoint.trainer_plugin.snapshot.moved_memory import MovedMemory
from recpoint.trainer_plugin.snapshot.window import Window
from tests.keyed_training import KeyedTraining, keyed_checkpointer
from tests.running_parts import pipeline_of
from tests.training_builder import Place, until


@pytest.mark.parametrize(
    "move", [torch.Tensor.share_memory_, ForkingPickler.dumps], ids=["share", "queue"]
)
def test_moves_are_told_of_before_they_begin(move: Callable[[Tensor], object]) -> None:
    table, other_table = torch.ones(9), torch.ones(9)
    places: list[int] = []

    def note() -> None:
        places.append(table.data_ptr())
        second.close()

    before = table.data_ptr()
    first = MovedMemory([table, table.view(3, 3)], lambda: places.append(-1))
    second = MovedMemory([table], note)
    move(other_table)
    assert not places
    move(table)
    assert places.count(before) == 1 and -1 in places
    assert table.data_ptr() != before and table.tolist() == [1.0] * 9
    first.close()
    places.clear()
    move(table)
    assert not places and not torch.storage._share_memory_map


def test_a_fork_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.ones(9)
    calls: list[int] = []
    watched = MovedMemory([table], lambda: calls.append(1))
    own_process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own_process + 1)
    table.share_memory_()
    watched.close()
    assert not calls


def test_a_window_ends_when_a_table_moves(place: Place) -> None:
    training = KeyedTraining(12, window=6)
    settings = {"interval_batches": 5, "when_busy": "wait"}
    window: Window | None = None
    with place.agent(), keyed_checkpointer(training, place, **settings) as ckpt:
        ckpt.restore()
        for keys, target in ckpt.batches(total=17):
            nn.functional.mse_loss(training.model(keys), target).backward()
            training.step()
            if window is None:
                window = _moved_in_window(ckpt, training)
    assert window is not None and window.reason == "table 'items' lies in other memory"
    assert not torch.storage._share_memory_map


def _moved_in_window(ckpt: Checkpointer, training: KeyedTraining) -> Window | None:
    """Move a table and return the window; None: none is open."""
    ahead = pipeline_of(ckpt).ahead
    window = None if ahead is None else ahead.window
    if not isinstance(window, Window):
        return None
    until(lambda: window._copier is not None or window.reason is not None)
    if window.reason is not None:
        return None
    assert not window._is_over
    training.model.items.weight.share_memory_()
    assert window._is_over and window.reason is None
    return window
