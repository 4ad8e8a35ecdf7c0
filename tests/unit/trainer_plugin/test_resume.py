"""A run that was cut off and resumed ends bit for bit where an uninterrupted one ends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR

from recpoint import Checkpointer, Consecutive, Options
from recpoint.embeddings.tables.optimizers import FullyDirtyTables
from tests.training_builder import (
    Batches,
    Place,
    Recommender,
    Training,
    everything,
    seed_everything,
    until,
)


class RowWiseAdagrad(Optimizer):
    """One accumulator a row, float32 whatever the table's dtype; changes looked-up rows only."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            self._step()

    def _step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["sum"] = torch.zeros(weight.shape[0], dtype=torch.float32)
                    state["batches"] = 0
                state["batches"] += 1
                gradient = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
                rows = gradient.abs().sum(1).nonzero().squeeze(1)
                state["sum"][rows] += gradient[rows].float().pow(2).mean(1)
                scale = group["lr"] / (state["sum"][rows].sqrt() + 1e-6)
                weight[rows] -= (scale.unsqueeze(1) * gradient[rows].float()).to(weight.dtype)


def table_parameters(model: Recommender) -> list[Any]:
    return [model.users.weight, model.items.weight]


def dense_parameters(model: Recommender) -> list[nn.Parameter]:
    return [*model.norm.parameters(), *model.top.parameters()]


def two(make: Callable[[list[Any]], Optimizer], sparse: bool, dtype: torch.dtype) -> Any:
    def build(seed: int) -> Training:
        seed_everything(seed)
        model = Recommender(sparse=sparse, dtype=dtype)
        tables = make(table_parameters(model))
        dense = Adam(dense_parameters(model), lr=0.01)
        schedulers = [
            LambdaLR(tables, lambda step: 0.97**step),
            MultiStepLR(dense, milestones=[3, 9, 14], gamma=0.5),
        ]
        return Training(model, [tables, dense], Batches(seed), schedulers)

    return build


CASES = {
    "sgd dense": (two(lambda p: SGD(p, lr=0.1), False, torch.float32), True),
    "sgd sparse": (two(lambda p: SGD(p, lr=0.1), True, torch.float32), True),
    "sgd fused": (two(lambda p: SGD(p, lr=0.1, fused=True), False, torch.float32), True),
    "sgd momentum": (two(lambda p: SGD(p, lr=0.1, momentum=0.9), False, torch.float32), False),
    "sgd momentum sparse": (
        two(lambda p: SGD(p, lr=0.1, momentum=0.9), True, torch.float32),
        False,
    ),
    "sgd decay": (two(lambda p: SGD(p, lr=0.1, weight_decay=0.1), False, torch.float32), False),
    "sgd maximize": (two(lambda p: SGD(p, lr=0.1, maximize=True), False, torch.float32), False),
    "adagrad dense": (two(lambda p: Adagrad(p, lr=0.1), False, torch.float32), True),
    "adagrad sparse": (two(lambda p: Adagrad(p, lr=0.1), True, torch.float32), True),
    "adagrad lr_decay": (two(lambda p: Adagrad(p, 0.1, lr_decay=0.1), False, torch.float64), True),
    "adagrad half": (two(lambda p: Adagrad(p, lr=0.1), False, torch.float16), False),
    "adagrad half large eps": (
        two(lambda p: Adagrad(p, lr=0.1, eps=1e-3), False, torch.float16),
        True,
    ),
    "sparse adam": (two(lambda p: SparseAdam(p, lr=0.1), True, torch.float32), True),
    "adam": (two(lambda p: Adam(p, lr=0.1, amsgrad=True), False, torch.float32), False),
    "row wise": (two(lambda p: RowWiseAdagrad(p), True, torch.float32), True),
    "row wise bf16": (two(lambda p: RowWiseAdagrad(p), False, torch.bfloat16), True),
}


def checkpointer(training: Training, place: Place, **settings: Any) -> Checkpointer:
    return Checkpointer(
        training.model,
        training.optimizers,
        run=place.run,
        staging=place.staging,
        reader=training.reader,
        schedulers=training.schedulers,
        options=Options(row_local_optimizers=(RowWiseAdagrad,)),
        **{"interval_batches": 3, "policy": Consecutive(full_every=3), **settings},
    )


@pytest.mark.parametrize("case", CASES)
def test_resumed_is_bit_identical(case: str, place: Place) -> None:
    build, row_local = CASES[case]
    uninterrupted = build(1)
    for _ in range(17):
        uninterrupted.batch()
    expected = everything(uninterrupted)

    first = build(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FullyDirtyTables)
        ckpt = checkpointer(first, place)
    assert [w.category for w in caught] == ([] if row_local else [FullyDirtyTables])
    with place.agent(), ckpt:
        assert ckpt.restore() is None
        while ckpt.batches_done < 11:
            first.batch()
            ckpt.step()
            until(lambda: ckpt.stats.committed == ckpt.batches_done // 3)
        assert ckpt.stats.failed == ckpt.stats.skipped == 0
        ckpt.close(final=False)  # batches 10 and 11 are lost, as by a kill

    second = build(99)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FullyDirtyTables)
        again = checkpointer(second, place)
    with place.agent(), again:
        report = again.restore()
        assert report is not None and report.restored.step == again.batches_done == 9
        assert report.chain_length == 3
        while again.batches_done < 17:
            second.batch()
            again.step()
        assert again.stats.failed == 0
        again.close(final=False)
    resumed = everything(second)
    assert resumed[0] == expected[0]
    assert resumed == expected


class LazyBatches(Batches):
    """Starts like torchdata's StatefulDataLoader: when first needed, drawing a random seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.started = False

    def start(self) -> None:
        if not self.started:
            self.started = True
            torch.rand(1)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.start()
        return super().__next__()

    def state_dict(self) -> dict[str, Any]:
        self.start()
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.started = False
        super().load_state_dict(state)


def test_a_reader_that_draws_when_it_starts(place: Place) -> None:
    def build(seed: int) -> Training:
        seed_everything(seed)
        model = Recommender()
        return Training(model, [SGD(model.parameters(), lr=0.1)], LazyBatches(seed))

    uninterrupted = build(1)
    for _ in range(8):
        uninterrupted.batch()
    expected = everything(uninterrupted)
    first = build(1)
    with place.agent(), checkpointer(first, place) as ckpt:
        ckpt.restore()
        for _ in range(4):
            first.batch()
            ckpt.step()
    second = build(9)
    with place.agent(), checkpointer(second, place) as again:
        again.restore()
        assert again.batches_done == 4
        while again.batches_done < 8:
            second.batch()
            again.step()
        again.close(final=False)
    assert everything(second) == expected
