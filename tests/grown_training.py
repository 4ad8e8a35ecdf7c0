"""Builds a training whose table `users` gets more rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform
from tests.cached_training import as_bits
from tests.training_builder import (
    DIM,
    ROWS,
    Batches,
    Place,
    Training,
    checkpointer,
    seed_everything,
    train,
)

MORE_ROWS = ROWS + 61
RULE = Uniform(seed=3, low=-0.2, high=0.2)
GROW = {"users": RULE}


class Model(nn.Module):
    """Two tables and a dense layer; the first table has any number of rows."""

    def __init__(self, rows: int, *, sparse: bool, padding: int | None = None) -> None:
        super().__init__()
        self.users = nn.Embedding(rows, DIM, sparse=sparse, padding_idx=padding)
        self.items = nn.EmbeddingBag(ROWS // 2, DIM, mode="sum", sparse=sparse)
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.users(users), self.items(items)], dim=1))
        return scores.squeeze(1)


class AllUsers(Batches):
    """Batches that also look up users of a larger table, once it is there."""

    rows = ROWS

    def __next__(self) -> tuple[Tensor, Tensor, Tensor]:
        users, items, target = super().__next__()
        return users * 7919 % self.rows, items, target


def look_up_users(training: Training, rows: int) -> None:
    """Have batches look up this many users from now on."""
    assert isinstance(training.reader, AllUsers)
    training.reader.rows = rows


MakeOptimizers = Callable[[Model], list[Optimizer]]
OPTIMIZERS: dict[str, MakeOptimizers] = {
    "momentum": lambda m: [SGD(m.parameters(), lr=0.1, momentum=0.9)],
    "adagrad": lambda m: [Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.3)],
    "adam": lambda m: [Adam(m.parameters(), lr=0.01, amsgrad=True)],
    "sparse adam": lambda m: [
        SparseAdam([m.users.weight, m.items.weight], lr=0.01),
        SGD(m.top.parameters(), lr=0.1),
    ],
}


def training(
    rows: int, optimizers: MakeOptimizers | str = "adagrad", *, seed: int = 1, **form: Any
) -> Training:
    seed_everything(seed)
    make = OPTIMIZERS[optimizers] if isinstance(optimizers, str) else optimizers
    model = Model(rows, sparse=optimizers == "sparse adam", **form)
    reader = AllUsers(seed)
    reader.rows = rows
    return Training(model, make(model), reader)  # type: ignore[arg-type]


def first_run(place: Place, name: MakeOptimizers | str = "adagrad", **settings: Any) -> Training:
    """Train the smaller model for five batches, with a checkpoint at the end."""
    first = training(ROWS, name)
    with place.agent(), checkpointer(first, place, **settings) as ckpt:
        ckpt.restore()
        train(first, ckpt, 5)
    return first


def enlarged(first: Training, name: MakeOptimizers | str) -> Training:
    """Return what a training goes on from after `first`, with rows added by hand."""
    grown = training(MORE_ROWS, name, seed=7)
    new_ids = torch.arange(ROWS, MORE_ROWS)
    with torch.no_grad():
        for parameter, old in zip(grown.model.parameters(), first.model.parameters(), strict=True):
            is_grown = parameter is grown.model.users.weight
            new = RULE("users", new_ids, DIM, torch.float32)
            parameter.copy_(torch.cat([old, new]) if is_grown else old)
            for optimizer, old_optimizer in zip(grown.optimizers, first.optimizers, strict=True):
                for key, state in old_optimizer.state.get(old, {}).items():
                    entry: Any = state
                    if is_grown and isinstance(state, Tensor) and state.dim() == 2:
                        begin = 0.3 if name == "adagrad" else 0.0
                        entry = torch.cat([state, torch.full_like(new, begin)])
                    elif isinstance(state, Tensor):
                        entry = state.clone()
                    optimizer.state[parameter][key] = entry
    grown.reader.load_state_dict(first.reader.state_dict())
    return grown


def kinds(place: Place) -> list[tuple[int, str]]:
    """Return step and kind of the checkpoints on the live line, oldest first."""
    run = Run.open(open_store(place.run))
    return [(name.step, run.manifest(*name).kind) for name in reversed(run.live_line())]


def tensors(training: Training) -> dict[str, Tensor]:
    """Return copies of all parameters and of their optimizers' states, by name."""
    copies: dict[str, Tensor] = {}
    for name, parameter in training.model.named_parameters():
        copies[name] = parameter.detach().clone()
        for optimizer in training.optimizers:
            for key, state in optimizer.state.get(parameter, {}).items():
                copies[f"{name}: {key}"] = torch.as_tensor(state).clone().view(-1)
    return copies


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(as_bits(tensor), as_bits(second[name])) for name, tensor in first.items()
    )
