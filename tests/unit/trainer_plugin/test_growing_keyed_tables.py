"""`recpoint.grow` of keyed tables: room for more keys between two batches, and training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad

import recpoint
from recpoint import Checkpointer, KeyedEmbedding, LeastUsed
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform
from recpoint.errors import SettingsError
from tests.keyed_training import (
    DIM,
    OPTIMIZERS,
    KeyedReader,
    KeyedTraining,
    keyed_checkpointer,
    rows_by_key,
)
from tests.training_builder import Place, until

pytestmark = pytest.mark.filterwarnings(
    "ignore::recpoint.embeddings.tables.optimizers.FullyDirtyTables"
)


def training_of(capacity_rows: int, optimizer: str = "adagrad", *, sparse: bool) -> Any:
    trained: Any = KeyedTraining(capacity_rows, optimizer=optimizer, sparse=sparse)
    trained.model.users = KeyedEmbedding(DIM, capacity_rows, evict=LeastUsed(), sparse=sparse)
    tables = [trained.model.users.weight, trained.model.items.weight]
    trained.optimizers[0] = OPTIMIZERS[optimizer](tables, sparse)
    return trained


def train(trained: Any, batches: int) -> None:
    for _ in range(batches):
        trained.batch()


def commit(checkpoints: Checkpointer, place: Place) -> None:
    """Take a checkpoint, and wait until it is committed."""
    count = checkpoints.stats.committed
    assert checkpoints.checkpoint()
    until(lambda: place.persist_all() > 0)
    until(lambda: checkpoints.stats.committed > count)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_table_that_grows_is_one_that_had_the_room_before(
    optimizer: str, sparse: bool, has_gradient: bool
) -> None:
    grown, large = (training_of(rows, optimizer, sparse=sparse) for rows in (16, 25))
    for trained in (grown, large):
        train(trained, 3)
        if has_gradient:
            trained.forward()
        if trained is grown:
            recpoint.grow(grown.model, grown.optimizers, "users", 25)
            recpoint.grow(grown.model, grown.optimizers, "users", 25)
            assert grown.model.users.capacity_rows == 25
        if has_gradient:
            trained.step()
        train(trained, 40)
    users, expected = grown.model.users, large.model.users
    assert users.counts == expected.counts
    assert users.counts.rows_used > 16 and users.counts.evicted > 5
    assert torch.equal(users.weight, expected.weight)
    for name, state in users.slots.row_states.items():
        assert torch.equal(state, expected.slots.row_states[name])
    assert rows_by_key(grown) == rows_by_key(large)
    assert torch.equal(grown.model.top.weight, large.model.top.weight)


def test_a_checkpointer_follows_and_a_restart_restores_all_keys(place: Place) -> None:
    grown, uninterrupted, resumed = (training_of(rows, sparse=True) for rows in (14, 14, 25))
    for trained in (grown, uninterrupted):
        train(trained, 3)
        recpoint.grow(trained.model, trained.optimizers, "users", 16)
        trained.reader = KeyedReader()
    with keyed_checkpointer(grown, place) as checkpoints:
        checkpoints.restore()
        for batches, capacity_rows in ((4, 16), (7, 25)):
            recpoint.grow(grown.model, grown.optimizers, "users", capacity_rows)
            while checkpoints.batches_done < batches:
                grown.batch()
                checkpoints.step()
            commit(checkpoints, place)
    train(uninterrupted, 4)
    recpoint.grow(uninterrupted.model, uninterrupted.optimizers, "users", 25)
    train(uninterrupted, 28)
    assert Run.open(open_store(place.run)).manifest(7, 1).kind == "full"
    with keyed_checkpointer(resumed, place) as checkpoints:
        checkpoints.restore()
        assert checkpoints.batches_done == 7
        while checkpoints.batches_done < 32:
            resumed.batch()
            checkpoints.step()
    assert rows_by_key(resumed) == rows_by_key(uninterrupted)
    assert resumed.model.users.counts == uninterrupted.model.users.counts
    assert resumed.model.users.counts.evicted > 0


@pytest.mark.parametrize(
    ("rows", "options", "text"),
    [
        (4, {}, "tables do not shrink"),
        (9, {"initial": Uniform(seed=1)}, "a keyed table, which has a rule of its own"),
    ],
)
def test_calls_that_cannot_work(rows: int, options: dict[str, Any], text: str) -> None:
    model = nn.Sequential(KeyedEmbedding(2, 5))
    with pytest.raises(SettingsError, match=text):
        recpoint.grow(model, Adagrad(model.parameters()), "0", rows, **options)


def test_an_optimizer_that_was_not_given() -> None:
    model = nn.Sequential(KeyedEmbedding(2, 5))
    optimizers: Sequence[Any] = []
    with pytest.raises(SettingsError, match="no optimizer that trains it"):
        recpoint.grow(model, optimizers, "0", 9)
    recpoint.grow(model, SGD(model.parameters(), lr=0.1), "0", 9)
    assert model[0].weight.shape == (10, 2)
