"""Builds small trainings with keyed tables, and compares them by their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recpoint import Checkpointer, KeyedEmbedding, Lookahead
from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from recpoint.embeddings import Uniform, cached
from recpoint.embeddings.cache.install import read_rows
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.tables.optimizers import row_states
from recpoint.format import state_tree
from tests.flat_settings import arguments
from tests.training_builder import Place, seed_everything

__all__ = ["DIM", "OPTIMIZERS", "KeyedReader", "KeyedTraining", "keyed_checkpointer", "rows_by_key"]

DIM, BATCH = 4, 6

OPTIMIZERS: dict[str, Callable[[list[Tensor], bool], Optimizer]] = {
    "adagrad": lambda parameters, sparse: torch.optim.Adagrad(
        parameters, lr=0.1, initial_accumulator_value=0.25
    ),
    "adam": lambda parameters, sparse: (
        torch.optim.SparseAdam(parameters, lr=0.01)
        if sparse
        else torch.optim.Adam(parameters, lr=0.01)
    ),
    "sgd": lambda parameters, sparse: torch.optim.SGD(parameters, lr=0.1),
}


class KeyedReader:
    """An endless reader of keys that come and go; its position is its state."""

    def __init__(self, *, seed: int = 1, spread: int = 12) -> None:
        self.seed, self.spread, self.position = seed, spread, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = np.random.default_rng([self.seed, self.position])
        # Keys drift, so old ones are not looked up again; some are at the ends of int64.
        keys = generator.integers(0, self.spread, BATCH) + self.position // 2
        keys = np.where(keys % 5 == 0, -(2**63) + keys, keys)
        self.position += 1
        return torch.from_numpy(keys), torch.from_numpy(generator.random(BATCH)).float()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class KeyedModel(nn.Module):
    """A keyed table and a plain one under a dense layer."""

    def __init__(self, capacity_rows: int, *, sparse: bool, **rules: Any) -> None:
        super().__init__()
        self.users = KeyedEmbedding(
            DIM, capacity_rows, sparse=sparse, initial=Uniform(seed=3), name="users", **rules
        )
        self.items = nn.Embedding(9, DIM, sparse=sparse)
        self.top = nn.Linear(DIM, 1)

    def forward(self, keys: Tensor) -> Tensor:
        scores: Tensor = self.top(self.users(keys) + self.items(keys % 9))
        return scores.squeeze(1)


class KeyedTraining:
    """A training of a keyed table.

    Args:
        capacity_rows: slots of the table.
        optimizer: key of `OPTIMIZERS`.
        sparse: whether gradients of tables are sparse.
        home: where rows are that are not in use; None: there is no cache.
        cached_rows: slots of the caches, name of the table -> number; the others are not cached.
        window: batches that a `Lookahead` reads ahead; None: there is none.
        rules: rules of admission and eviction.
    """

    def __init__(
        self,
        capacity_rows: int = 20,
        *,
        optimizer: str = "adagrad",
        sparse: bool = False,
        home: Home | None = None,
        cached_rows: Mapping[str, int] = {"users": 8},
        window: int | None = None,
        **rules: Any,
    ) -> None:
        seed_everything(1)
        self.model = KeyedModel(capacity_rows, sparse=sparse, **rules)
        if home is not None:
            cached(self.model, home, cached_rows)
        tables = [self.model.users.weight, self.model.items.weight]
        self.optimizers = [
            OPTIMIZERS[optimizer](tables, sparse),
            torch.optim.SGD(self.model.top.parameters(), lr=0.1),
        ]
        self.reader: Any = KeyedReader()
        if window is not None:
            self.reader = Lookahead(self.reader, self.model, ids=ids_of, window=window)
        self._read_by: Any = None

    def forward(self) -> None:
        """Look up a batch and compute its gradients."""
        if self._read_by is not self.reader:  # a test may have given it another one
            self._read_by, self._batches = self.reader, iter(self.reader)
        keys, target = next(self._batches)
        nn.functional.mse_loss(self.model(keys), target).backward()

    def step(self) -> None:
        """Apply the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def batch(self) -> None:
        """Train a batch."""
        self.forward()
        self.step()


def keyed_checkpointer(training: KeyedTraining, place: Place, **settings: Any) -> Checkpointer:
    """Return a checkpointer of the training; `settings` as `arguments`."""
    defaults = {
        "run": place.run,
        "directory": place.staging,
        "reader": training.reader,
        "interval_batches": 1000,
        "small_table_values": 0,
        "close_seconds": 120.0,
        "drain_seconds": 120.0,
        "handle_sigterm": False,
        "announce": False,
    }
    return Checkpointer(training.model, training.optimizers, **arguments({**defaults, **settings}))


def everything(training: KeyedTraining) -> list[object]:
    """Return all state of a training, by slot, so that a comparison compares every bit."""
    slots = training.model.users.slots
    state = {
        "model": dict(training.model.state_dict()),
        "slots": dict(slots.row_states),
        "state": slots.state_dict(),
        "optimizers": [
            {
                "groups": optimizer.state_dict()["param_groups"],
                "state": optimizer.state_dict()["state"],
            }
            for optimizer in training.optimizers
        ],
        "reader": training.reader.state_dict(),
    }
    tree, tensors = state_tree.flatten(state)
    return [tree, *[tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]]


def ids_of(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return what a batch of `KeyedReader` looks up in the tables of `KeyedModel`."""
    return {"users": batch[0], "items": batch[0] % 9}


def arrays_of(training: KeyedTraining) -> tuple[Tensor, ...]:
    """Return values and the optimizer's row states of all slots, in a cache or not."""
    table, optimizer = training.model.users, training.optimizers[0]
    cache = cache_of(training.model)
    if cache is not None and "users" in cache.tables:
        return cache.rows_of("users", torch.arange(table.capacity_rows + 1, dtype=torch.int64))
    states = row_states(optimizer.state.get(table.weight, {}), len(table.weight))
    return table.weight.detach(), *states.values()


def all_rows(training: KeyedTraining) -> list[list[object]]:
    """Return the bits of all rows and row states of both tables."""
    arrays = [
        *training.model.users.slots.row_states.values(),
        *arrays_of(training),
        *read_rows(training.model, "items", training.optimizers[0]).values(),
    ]
    return [array.contiguous().view(-1).view(torch.uint8).tolist() for array in arrays]


def state_of(training: KeyedTraining) -> list[object]:
    """Return all that decides how a training goes on, but its reader, in a cache or not."""
    state = training.model.users.slots.state_dict()
    admission = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in state["admission"].items()
    }
    top = [parameter.tolist() for parameter in training.model.top.parameters()]
    return [all_rows(training), {**state, "admission": admission}, top]


def rows_by_key(training: KeyedTraining) -> dict[int, list[object]]:
    """Return key -> last use, row and entries of row states, whatever slot it has."""
    table = training.model.users
    states = table.slots.row_states
    entries = row_states(training.optimizers[0].state.get(table.weight, {}), len(table.weight))
    return {
        int(states[KEY][slot]): [
            int(states[LAST_USE][slot]),
            table.weight.detach()[slot].tolist(),
            *[entry[slot].tolist() for entry in entries.values()],
        ]
        for slot in (states[LAST_USE] >= 0).nonzero().flatten().tolist()
    }
