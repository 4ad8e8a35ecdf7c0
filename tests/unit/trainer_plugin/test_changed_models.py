"""A model that comes to other tables or weights during training: named, counted, never stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from recpoint import Checkpointer
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.training_builder import (
    DIM,
    ROWS,
    Place,
    Training,
    checkpointer,
    simple_training,
    train,
    until,
)


@contextmanager
def after_a_commit(training: Training, place: Place) -> Iterator[Checkpointer]:
    """Training with an agent, of which one batch is trained and committed."""
    with place.agent(), checkpointer(training, place, interval_batches=1) as ckpt:
        ckpt.restore()
        train(training, ckpt, 1)
        until(lambda: ckpt.stats.committed == 1)
        yield ckpt


def add_a_table(training: Training) -> None:
    training.model.extra = nn.Embedding(9, 4)
    training.optimizers[0].add_param_group({"params": training.model.extra.parameters()})


def add_a_frozen_table(training: Training) -> None:
    training.model.extra = nn.Embedding(9, 4).requires_grad_(False)


def replace_a_module(training: Training) -> None:
    training.model.users = nn.Embedding(ROWS, DIM)
    training.optimizers[0].add_param_group({"params": training.model.users.parameters()})


def replace_a_weight(training: Training) -> None:
    training.model.users.weight = nn.Parameter(torch.zeros(ROWS, DIM))


def replace_a_dense_weight(training: Training) -> None:
    training.model.top.bias = nn.Parameter(torch.zeros(1))


def remove_a_table(training: Training) -> None:
    (users,) = (p for p in training.model.users.parameters())
    group = training.optimizers[0].param_groups[0]
    group["params"] = [p for p in group["params"] if p is not users]
    del training.model.users


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.parametrizations.weight_norm,
        nn.utils.weight_norm,
        lambda module: prune.random_unstructured(module, "weight", 0.5),
    ],
)
def test_an_embedding_whose_weight_is_computed_is_a_dense_layer(
    place: Place, change: Callable[[nn.Module], nn.Module]
) -> None:
    def training() -> Training:
        made = simple_training(3)
        computed = made.model.computed = change(nn.Embedding(9, 4))
        made.optimizers[0].add_param_group({"params": computed.parameters()})
        return made

    first, second = training(), training()
    with place.agent(), checkpointer(first, place) as ckpt:
        ckpt.restore()
        with torch.no_grad():
            for parameter in first.model.parameters():
                parameter.add_(1)
        train(first, ckpt, 2)
    with checkpointer(second, place) as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 2
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add_a_table, "table 'extra': found an embedding that was added"),
        (add_a_frozen_table, "table 'extra': found an embedding that was added"),
        (replace_a_module, "table 'users': found an embedding that was added, or that replaced"),
        (replace_a_weight, "optimizers[0], group 0, parameter 0: found a parameter of shape"),
        (replace_a_dense_weight, "optimizers[0], group 0, parameter 5: found a parameter of shape"),
        (remove_a_table, "table 'users': found its module is no longer"),
    ],
)
def test_a_model_that_has_changed_is_refused_by_name_and_training_goes_on(
    change: Callable[[Training], None], said: str, place: Place
) -> None:
    training = simple_training()
    with after_a_commit(training, place) as ckpt:
        change(training)
        ckpt.step()
        ckpt.step()
        assert ckpt.stats.failed == 2
        assert (ckpt.stats.last_error or "").startswith(f"SettingsError: {said}")
        ckpt.close(final=False)
    # What counts is what can be loaded.
    again = simple_training(9)
    with checkpointer(again, place) as loaded:
        report = loaded.restore()
        assert report is not None and report.restored.step == 1


def test_a_weight_that_is_replaced_for_its_optimizer_too_is_stored(place: Place) -> None:
    training = simple_training()
    with after_a_commit(training, place) as ckpt:
        (optimizer,) = training.optimizers
        replace_a_weight(training)
        optimizer.param_groups[0]["params"][0] = training.model.users.weight
        train(training, ckpt, 2)
        assert ckpt.stats.failed == 0
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    assert torch.equal(target.tables["users"].values, training.model.users.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_table_that_comes_to_another_dtype_is_stored_in_it(
    place: Place, dtype: torch.dtype
) -> None:
    training = simple_training()
    with after_a_commit(training, place) as ckpt:
        training.model.users.to(dtype)
        train(training, ckpt, 2)
        ckpt.close()
        assert (ckpt.stats.failed, ckpt.stats.last_error) == (0, None)
    target = MemoryTarget()
    restore(Run.open(open_store(place.run)), target)
    stored = target.tables["users"].values
    assert stored.dtype == dtype
    assert torch.equal(stored, training.model.users.weight.detach())
