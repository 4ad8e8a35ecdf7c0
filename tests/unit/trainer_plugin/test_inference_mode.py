"""What was made under `torch.inference_mode()` is refused by name: nothing could restore it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, SparseAdam

from recpoint import Follower
from recpoint.errors import SettingsError
from tests.tracked import ROWS, Tracked
from tests.training_builder import (
    Place,
    Recommender,
    Training,
    checkpointer,
    everything,
    simple_training,
    train,
)


def _frozen_table(training: Training) -> None:
    frozen = nn.Embedding(5, 3).requires_grad_(False)
    training.model.add_module("frozen", frozen)


def _dense_parameter(training: Training) -> None:
    training.model.register_parameter("scale", nn.Parameter(torch.ones(2), requires_grad=False))


def _buffer(training: Training) -> None:
    training.model.register_buffer("seen", torch.zeros(2))


def _row_states(training: Training) -> None:
    training.optimizers = [Adagrad(training.model.parameters(), lr=0.1)]


def _learning_rate(training: Training) -> None:
    training.optimizers = [SGD(training.model.parameters(), lr=torch.tensor(0.1))]


@pytest.mark.parametrize(
    ("make", "subject"),
    [
        (_frozen_table, "table 'frozen'"),
        (_dense_parameter, "parameter 'scale'"),
        (_buffer, "buffer 'seen'"),
        (_row_states, "the row state 'sum' of table 'users'"),
        (_learning_rate, r"optimizers\[0\], group 0, 'lr'"),
    ],
)
def test_what_was_made_there_is_refused_by_name(
    make: Callable[[Training], None], subject: str, place: Place
) -> None:
    training = simple_training()
    with torch.inference_mode():
        make(training)
    with pytest.raises(SettingsError, match=rf"^{subject}: found a tensor made under") as refused:
        checkpointer(training, place)
    assert "outside torch.inference_mode()" in refused.value.next_step
    again = simple_training()
    make(again)
    with checkpointer(again, place, close_seconds=0.0) as ckpt:
        ckpt.restore()


def test_a_table_that_is_trained(place: Place) -> None:
    with torch.inference_mode():
        model = Recommender()
    training = Training(model, [SGD(model.parameters(), lr=0.1)], simple_training().reader)
    with pytest.raises(SettingsError, match="made under torch.inference_mode"):
        checkpointer(training, place)


def test_calls_under_inference_mode(place: Place) -> None:
    training = simple_training()
    with torch.inference_mode(), pytest.raises(SettingsError, match=r"^Checkpointer\(\)"):
        checkpointer(training, place)
    ckpt = checkpointer(training, place)
    with torch.inference_mode(), pytest.raises(SettingsError, match=r"^restore\(\)"):
        ckpt.restore()
    assert ckpt.restore() is None, "it was not called yet"
    ckpt.close(final=False)


def test_row_states_that_came_to_be_between_building_and_restoring(place: Place) -> None:
    training = simple_training()
    model = training.model
    for table in (model.users, model.items):
        table.sparse = True
    dense = [*model.norm.parameters(), *model.top.parameters()]
    tables = SparseAdam([model.users.weight, model.items.weight], lr=0.1)
    training.optimizers = [tables, SGD(dense, lr=0.1)]
    ckpt = checkpointer(training, place)
    users, items, _ = next(training.reader)
    model(users, items).sum().backward()
    with torch.inference_mode():
        tables.step()
    with pytest.raises(SettingsError, match="the row state 'exp_avg' of table 'users'"):
        ckpt.restore()
    ckpt.close(final=False)


def test_a_checkpoint_may_be_cut_under_inference_mode(place: Place) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place, when_busy="wait") as ckpt:
        ckpt.restore()
        for batch in range(8):
            training.batch()
            with torch.inference_mode(batch % 2 == 0):
                ckpt.step()
        expected = everything(training)
    again = simple_training(2)
    with place.agent(), checkpointer(again, place) as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 8 and everything(again) == expected
        train(again, ckpt, 1)


def test_a_weight_that_comes_to_be_made_there_is_stored_as_a_whole_each_time() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4).requires_grad_(False))
    with torch.inference_mode():
        tracked.module.weight = nn.Parameter(torch.zeros(ROWS, 4), requires_grad=False)
    for value in (1, 2):
        with torch.inference_mode():
            tracked.module.weight[3] = value
        tracked.tracker.follow_weight()
        assert tracked.dirty() is None


def test_row_states_that_come_to_be_made_there_make_the_table_dirty_as_a_whole() -> None:
    tracked = Tracked(nn.Embedding(ROWS, 4, sparse=True), lambda p: SparseAdam(p, lr=0.1))
    with torch.inference_mode():
        gradient = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 4), (ROWS, 4))
    tracked.module.weight.grad = gradient
    with torch.inference_mode():
        tracked.optimizers[0].step()
    states = [tracked.optimizers[0].state[tracked.module.weight]["exp_avg"]]
    tracked.tracker.follow_row_states(states)
    tracked.dirty()
    with torch.inference_mode():
        states[0][3] = 1
    tracked.tracker.follow_row_states(states)
    assert tracked.dirty() is None


def test_a_model_that_a_follower_could_not_update(tmp_path: object) -> None:
    with torch.inference_mode():
        model = Recommender()
    with pytest.raises(SettingsError, match=r"^'users.weight' of the model: found a tensor made"):
        Follower(f"{tmp_path}/run", model=model)
