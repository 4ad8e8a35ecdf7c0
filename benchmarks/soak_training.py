"""Trains the small model of the soak, whose state after a batch is the same after any restarts."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["INTERVAL_BATCHES", "Training"]

#: Batches from one checkpoint to the next.
INTERVAL_BATCHES = 20

_ROWS = {"users": 20_000, "goods": 5_000}
_DIM = 8
_BATCH = 64
_SEED = 20


class _Reader:
    """Draws batches, popular ids more often, from a generator whose state is the position."""

    def __init__(self) -> None:
        self._generator = np.random.default_rng(_SEED)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            users = self._generator.zipf(1.2, _BATCH) % _ROWS["users"]
            goods = self._generator.zipf(1.2, (_BATCH, 3)) % _ROWS["goods"]
            clicks = self._generator.random(_BATCH, dtype=np.float32)
            yield torch.from_numpy(users), torch.from_numpy(goods), torch.from_numpy(clicks)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state["generator"]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(_ROWS["users"], _DIM, sparse=True)
        self.goods = nn.EmbeddingBag(_ROWS["goods"], _DIM, mode="sum", sparse=True)
        self.norm = nn.BatchNorm1d(2 * _DIM)
        self.drop = nn.Dropout(0.2)  # so that torch's generator matters
        self.top = nn.Linear(2 * _DIM, 1)

    def forward(self, users: Tensor, goods: Tensor) -> Tensor:
        features = torch.cat([self.users(users), self.goods(goods)], dim=1)
        scores: Tensor = self.top(self.drop(self.norm(features)))
        return scores.squeeze(1)


class Training:
    """Model, optimizers and reader, from the same seed in every process; one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.sparse.check_sparse_tensor_invariants.disable()
        random.seed(_SEED)
        np.random.seed(_SEED)
        torch.manual_seed(_SEED)
        self.model = _Model()
        tables = [*self.model.users.parameters(), *self.model.goods.parameters()]
        dense = [*self.model.norm.parameters(), *self.model.top.parameters()]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adagrad(tables, lr=0.1),
            torch.optim.Adam(dense, lr=0.01),
        ]
        self.reader = _Reader()
        self._batches = iter(self.reader)

    def batch(self) -> None:
        """Train one batch."""
        users, goods, clicks = next(self._batches)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        # Python's and numpy's generators are used, so that a wrongly restored one is noticed.
        noise = random.random() + float(np.random.random())
        nn.functional.mse_loss(self.model(users, goods), clicks + noise).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def digest(self) -> str:
        """Return a digest of the exact bytes of everything that a checkpoint holds."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    for name in sorted(state):
                        value = torch.as_tensor(state[name]).contiguous()
                        digest.update(name.encode() + value.numpy().tobytes())
        generators = (random.getstate(), np.random.get_state(), self.reader.state_dict())
        digest.update(torch.get_rng_state().numpy().tobytes() + repr(generators).encode())
        return digest.hexdigest()
