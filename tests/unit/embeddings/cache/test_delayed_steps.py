"""Rows whose gradients come late get the step of their own batch, whatever the step depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import SGD, Adagrad, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from recpoint.embeddings.cache.cached_table import CachedTable, CachedTracker
from recpoint.embeddings.cache.later_step import LaterStep
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.tables.optimizers import OptimizerWatch
from recpoint.embeddings.tables.tables import plain_tables
from tests.cached_training import (
    Batches,
    Model,
    Rows,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
)
from tests.several_trainers import added, loss_of, present
from tests.simulated_trainers import Trainer, on_threads

BATCHES = 6


class Script:
    """How a script trains tables: it builds an optimizer and makes steps with it.

    Attributes:
        sparse: the tables have sparse gradients.
        is_delayed: steps of some rows can be made later.
    """

    sparse = True
    is_delayed = True
    scale = 1.0

    def optimizer(self, tables: Sequence[Tensor]) -> Optimizer:
        return SGD(tables, lr=0.5)

    def begin(self, optimizer: Optimizer) -> None:
        """Prepare for the training."""

    def step(self, optimizer: Optimizer) -> None:
        optimizer.step()

    def after(self, optimizer: Optimizer) -> None:
        """Change the optimizer after a step."""


class RateInTensor(Script):
    """A rate in a tensor, which is changed in place."""

    def __init__(self, kind: type[Optimizer], sparse: bool) -> None:
        self.kind, self.sparse = kind, sparse

    def optimizer(self, tables: Sequence[Tensor]) -> Optimizer:
        kind: Any = self.kind
        made: Optimizer = kind(tables, lr=torch.tensor(0.5))
        return made

    def after(self, optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)


class Scheduled(Script):
    """A scheduler, which also wraps the optimizer's `step`."""

    def begin(self, optimizer: Optimizer) -> None:
        self.scheduler = ExponentialLR(optimizer, 0.5)

    def after(self, optimizer: Optimizer) -> None:
        self.scheduler.step()


class Scaled(Script):
    """A GradScaler; a fused optimizer divides the gradients by its scale."""

    scale = 1024.0

    def __init__(self, *, fused: bool) -> None:
        self.fused = fused
        self.sparse = not fused
        self.is_delayed = not fused

    def optimizer(self, tables: Sequence[Tensor]) -> Optimizer:
        return SGD(tables, lr=0.5, fused=self.fused)

    def begin(self, optimizer: Optimizer) -> None:
        self.scaler = GradScaler("cpu", init_scale=self.scale, growth_interval=1000)
        self.scaler.scale(torch.zeros(()))  # makes the scale

    def step(self, optimizer: Optimizer) -> None:
        self.scaler.step(optimizer)
        self.scaler.update()


class Fused(Script):
    """A fused optimizer without a GradScaler."""

    sparse = False

    def optimizer(self, tables: Sequence[Tensor]) -> Optimizer:
        return SGD(tables, lr=0.3, fused=True)


class HookBefore(Script):
    """A hook before the step that changes the rate, and one of the gradients."""

    is_delayed = False

    def begin(self, optimizer: Optimizer) -> None:
        self.number = 0
        optimizer.register_step_pre_hook(self.change)

    def change(self, optimizer: Optimizer, *_: Any) -> None:
        self.number += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.5 / self.number
            for parameter in group["params"]:
                parameter.grad._values().clamp_(-0.01, 0.01)


class HookAfter(Script):
    """A hook after the step that sets small values to zero."""

    sparse = False
    is_delayed = False

    def begin(self, optimizer: Optimizer) -> None:
        def prune(optimizer: Optimizer, *_: Any) -> None:
            for parameter in optimizer.param_groups[0]["params"]:
                changed = parameter.grad.abs().sum(1) > 0
                small = changed[:, None] & (parameter.detach().abs() < 0.02)
                parameter.data[small] = 0

        optimizer.register_step_post_hook(prune)


class Closure(Script):
    """A step that is given a closure, which changes the rate."""

    def step(self, optimizer: Optimizer) -> None:
        def closure() -> float:
            optimizer.param_groups[0]["lr"] *= 0.5
            return 0.0

        optimizer.step(closure)


SCRIPTS: dict[str, Callable[[], Script]] = {
    "a plain script": Script,
    "sgd, a rate in a tensor": lambda: RateInTensor(SGD, sparse=True),
    "adagrad, a rate in a tensor": lambda: RateInTensor(Adagrad, sparse=False),
    "a scheduler": Scheduled,
    "GradScaler": lambda: Scaled(fused=False),
    "GradScaler, fused": lambda: Scaled(fused=True),
    "fused": Fused,
    "a hook before the step": HookBefore,
    "a hook after the step": HookAfter,
    "a closure": Closure,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_step_of_each_row_is_that_of_its_batch(name: str) -> None:
    script = SCRIPTS[name]()
    found = on_threads(lambda trainer: _trained(trainer, SCRIPTS[name]()), sparse=script.sparse)
    expected = _whole(script, ranks=2)
    for one in found:
        assert isinstance(one, _Found), one
        assert one.rows.differences(expected) == []
        is_delayed = one.stats.reduced_at_once < one.stats.reduced_rows
        assert is_delayed == script.is_delayed


def test_only_hooks_of_a_script_keep_steps_from_being_delayed() -> None:
    model, cache = cached_model({"users": 20, "items": 20}, sparse=True)
    optimizer, slots = SGD([model.users.weight], lr=0.1), cache.tables["users"].slots
    trackers = {}
    for table in plain_tables(model).tables:
        assert isinstance(table, CachedTable)
        trackers[table.key] = CachedTracker(table, table.cached_rows)
    OptimizerWatch([optimizer], trackers).install()
    assert optimizer._optimizer_step_pre_hooks and optimizer._optimizer_step_post_hooks
    assert LaterStep.of(optimizer, slots) is not None
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        hook = register(lambda *_: None)
        assert LaterStep.of(optimizer, slots) is None
        hook.remove()
        assert LaterStep.of(optimizer, slots) is not None
    cache.close()


class _Found(NamedTuple):
    rows: Rows
    stats: CacheStats


def _trained(trainer: Trainer, script: Script) -> _Found:
    model = trainer.model
    optimizer = script.optimizer([model.users.weight, model.items.weight])
    dense = SGD(model.top.parameters(), lr=0.1)
    script.begin(optimizer)
    reader = iter(trainer.reader())
    for _ in range(BATCHES):
        trainer.backward(next(reader), scale=script.scale)
        _make_steps(script, model, optimizer, dense)
    return _Found(rows_of_cache(trainer.cache), trainer.cache.stats)


def _whole(script: Script, ranks: int) -> Rows:
    """Train whole tables with the gradients of all ranks, which are added in rank order."""
    model = plain_model(sparse=script.sparse)
    optimizer = script.optimizer([model.users.weight, model.items.weight])
    dense = SGD(model.top.parameters(), lr=0.1)
    script.begin(optimizer)
    for number in range(BATCHES):
        parts: list[list[Tensor]] = []
        for rank in range(ranks):
            model.zero_grad()
            (loss_of(model, Batches(seed=rank).batch(number)) * script.scale).backward()
            parts.append([present(one.grad) for one in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
            parameter.grad = added(gradients)
        _make_steps(script, model, optimizer, dense)
    return rows_of_plain(model, optimizer)


def _make_steps(script: Script, model: Model, optimizer: Optimizer, dense: Optimizer) -> None:
    for parameter in model.top.parameters():
        present(parameter.grad).div_(script.scale)
    script.step(optimizer)
    dense.step()
    script.after(optimizer)
    optimizer.zero_grad()
    dense.zero_grad()
