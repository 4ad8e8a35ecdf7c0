"""Builds a model of one table whose rows are tracked."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from recpoint.embeddings.tables.marks import Tracker
from recpoint.embeddings.tables.optimizers import OptimizerWatch
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.tables import find_tables

__all__ = ["KNOWN", "ROWS", "Tracked", "sparse_table"]

ROWS = 70


class Tracked:
    """A model of one table, tracked."""

    def __init__(
        self, module: nn.Embedding | nn.EmbeddingBag, make: Any = None, **options: Any
    ) -> None:
        self.model = nn.ModuleDict({"table": module})
        self.module = module
        make = make or (lambda parameters: SGD(parameters, lr=0.1))
        self.optimizers: list[Optimizer] = []
        if module.weight.requires_grad:
            self.optimizers.append(make([module.weight]))
        (table,) = find_tables(self.model, self.optimizers).tables
        self.tracker = Tracker(table)
        self.watch = OptimizerWatch(self.optimizers, {"table": self.tracker}, **options)
        self.tracker.install()
        self.watch.install()

    def train(self, *args: Any, **kwargs: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.module(*args, **kwargs).pow(2).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def dirty(self) -> list[int] | None:
        dirty = self.tracker.take()
        rows = None
        if not dirty.all_rows and dirty_bitmap.count(dirty.bitmap) < ROWS:
            rows = dirty_bitmap.collect(dirty.bitmap, rows=ROWS).tolist()
        self.tracker.release(dirty)
        return rows


def sparse_table(make: Any = None) -> Tracked:
    return Tracked(nn.Embedding(ROWS, 4, sparse=True), make)


KNOWN = [
    pytest.param(lambda p: SGD(p, lr=0.1), id="SGD"),
    pytest.param(lambda p: Adagrad(p, lr=0.1), id="Adagrad"),
    pytest.param(lambda p: SparseAdam(p, lr=0.1), id="SparseAdam"),
]
