"""Trains a model with two tables, in a cache or plain, on batches that name their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from recpoint import Lookahead
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.install import cached
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.homes import local
from recpoint.embeddings.home.initial import Initial, Uniform, fill
from recpoint.embeddings.tables.optimizers import row_states

USERS, ITEMS, DIM, BATCH = 203, 101, 6, 8
INITIAL = Uniform(seed=7, low=-0.1, high=0.1)

Mode = Literal["sum", "mean", "max"]
Batch = dict[str, Tensor]
MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


class Model(nn.Module):
    """Users by `nn.Embedding`, items by `nn.EmbeddingBag`, one dense layer."""

    def __init__(
        self,
        *,
        sparse: bool = False,
        mode: Mode = "sum",
        device: str = "cpu",
        padding: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.users = nn.Embedding(
            USERS, DIM, sparse=sparse, device=device, padding_idx=padding, dtype=dtype
        )
        self.items = nn.EmbeddingBag(
            ITEMS, DIM, mode=mode, sparse=sparse, device=device, padding_idx=padding, dtype=dtype
        )
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, batch: Batch) -> Tensor:
        items = self.items(batch["items"], per_sample_weights=batch.get("weights"))
        features = torch.cat([self.users(batch["users"]), items], dim=1).float()
        scores: Tensor = self.top(features)
        return scores.squeeze(1)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum for each row, for sparse gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns no loss
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "sum" not in state:
                    state["sum"] = torch.zeros(parameter.shape[0])
                gradient = parameter.grad.coalesce()
                rows, values = gradient._indices()[0], gradient._values()
                state["sum"].index_add_(0, rows, values.pow(2).mean(1))
                scale = state["sum"][rows].sqrt().add_(1e-8)
                parameter.index_add_(0, rows, values / scale[:, None], alpha=-group["lr"])


class Batches:
    """A reader of `length` batches an epoch, skewed, each from its position alone."""

    def __init__(self, length: int = 40, *, weighted: bool = False, seed: int = 0) -> None:
        self.length = length
        self.weighted = weighted
        self.seed = seed
        self.position = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.position += 1
            yield self.batch(self.position - 1)
            if self.position % self.length == 0:
                return

    def batch(self, position: int) -> Batch:
        drawn = np.random.default_rng([self.seed, position])
        users = (USERS * drawn.random(BATCH) ** 3).astype(np.int64)
        items = (ITEMS * drawn.random((BATCH, 3)) ** 2).astype(np.int64)
        batch = {
            "users": torch.from_numpy(users),
            "items": torch.from_numpy(items),
            "target": torch.from_numpy(drawn.random(BATCH).astype(np.float32)),
        }
        if self.weighted:
            batch["weights"] = torch.from_numpy(drawn.random((BATCH, 3)).astype(np.float32))
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def plain_model(*, initial: Initial = INITIAL, **form: Any) -> Model:
    torch.manual_seed(5)
    model = Model(**form)
    fill(model, initial)
    return model


def uncached_model(*, is_meta: bool = True, initial: Initial = INITIAL, **form: Any) -> Model:
    """Return a plain model; with `is_meta`, its tables are on the meta device."""
    if not is_meta:
        return plain_model(initial=initial, **form)
    torch.manual_seed(5)
    dense = Model(**form).top  # draws what the plain model draws
    model = Model(**form, device="meta")
    model.top = dense
    return model


def cached_model(
    capacity: int | dict[str, int],
    home: Home | None = None,
    *,
    is_meta: bool = True,
    row_local: tuple[type, ...] = (),
    initial: Initial = INITIAL,
    **form: Any,
) -> tuple[Model, Cache]:
    model = uncached_model(is_meta=is_meta, initial=initial, **form)
    row_home = local() if home is None else home
    cached(model, row_home, capacity, initial=initial, row_local_optimizers=row_local)
    cache = cache_of(model)
    assert cache is not None
    return model, cache


@dataclass
class Rows:
    """All rows and row states of a model's tables."""

    arrays: dict[str, tuple[Tensor, ...]]

    def differences(self, expected: Rows) -> list[str]:
        return [
            f"{name}: array {number}"
            for name, arrays in self.arrays.items()
            for number, (array, two) in enumerate(zip(arrays, expected.arrays[name], strict=True))
            if not torch.equal(as_bits(array), as_bits(two))
        ]


def as_bits(array: Tensor) -> Tensor:
    return array.detach().contiguous().view(torch.uint8)


def rows_of_plain(model: Model, optimizer: torch.optim.Optimizer) -> Rows:
    arrays = {}
    for name, weight in (("users", model.users.weight), ("items", model.items.weight)):
        state = optimizer.state.get(weight, {})
        arrays[name] = (weight.detach(), *row_states(state, weight.shape[0]).values())
    return Rows(arrays)


def rows_of_cache(cache: Cache) -> Rows:
    return Rows(
        {
            name: cache.rows_of(name, torch.arange(rows.slots.rows))
            for name, rows in cache.tables.items()
        }
    )


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    reader: Any,
    *,
    batches: int,
    after: Callable[[int], None] = lambda _: None,
) -> list[float]:
    losses = []
    batches_done = 0
    while batches_done < batches:
        for batch in reader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(batch), batch["target"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            batches_done += 1
            after(batches_done)
            if batches_done == batches:
                break
    return losses


def lookahead(reader: Any, model: nn.Module, window: int) -> Lookahead:
    return Lookahead(reader, model, window=window)
