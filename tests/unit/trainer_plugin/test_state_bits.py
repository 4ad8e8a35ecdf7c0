"""`Precision(state=8)`: second moments come back from their codes, whatever optimizer has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, SparseAdam

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import RowStateSpec, TableSpec
from recpoint.format.row_state import to_bfloat16
from recpoint.format.squared_states import squared_states
from recpoint.kernels import moments
from tests.training_builder import (
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    seed_everything,
    train,
)

MAKERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "Adagrad": lambda tables: Adagrad(tables, lr=0.1),
    "SparseAdam": lambda tables: SparseAdam(tables, lr=0.1),
}


def training_of(name: str) -> Training:
    seed_everything(7)
    model = Recommender(sparse=True)
    tables = [model.users.weight, model.items.weight]
    dense = [*model.norm.parameters(), *model.top.parameters()]
    optimizers = [MAKERS[name](tables), SGD(dense, lr=0.1)]
    return Training(model, optimizers, Batches(7))


def coded(state: Tensor) -> Tensor:
    codes, grids, _ = moments.encode(state)
    return moments.decode(codes, grids)


def states_of(training: Training) -> list[dict[str, Tensor]]:
    model, (tables, _) = training.model, training.optimizers
    of_tables = [dict(tables.state[table.weight]) for table in (model.users, model.items)]
    return [
        {
            name: state.clone()
            for name, state in of_table.items()
            if isinstance(state, Tensor) and state.dim() == 2
        }
        for of_table in of_tables
    ]


@pytest.mark.parametrize("bits", ["lossless", 4])
@pytest.mark.parametrize("name", MAKERS)
def test_states_come_back_from_their_codes(place: Place, name: str, bits: Any) -> None:
    settings = {"bits": bits, "state": 8}
    first = training_of(name)
    with place.agent(), checkpointer(first, place, **settings) as ckpt:
        ckpt.restore()
        train(first, ckpt, 7)
    trained = states_of(first)
    second = training_of(name)
    with place.agent(), checkpointer(second, place, **settings) as ckpt:
        ckpt.restore()
        restored = states_of(second)
        train(second, ckpt, 2)
    for found, exact in zip(restored, trained, strict=True):
        assert found.keys() == exact.keys() and found
        for state, values in exact.items():
            narrow = to_bfloat16(values).float() if state == "exp_avg" else coded(values)
            assert torch.equal(found[state], narrow), state
            assert state == "exp_avg" or not torch.equal(narrow, values)
    run = Run.open(open_store(place.run))
    assert {run.manifest(*stored).state_bits for stored in run.manifest_names()} == {8}


def test_which_states_are_second_moments() -> None:
    names = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
    states = tuple(RowStateSpec(name=n, dtype="F32", shape=(2,), optimizer=0) for n in names)
    table = TableSpec(name="t", rows=3, dim=2, dtype="F32", row_states=states)
    assert squared_states(table) == (2, 4)
    assert squared_states(table.model_copy(update={"row_states": states[:2]})) is None
