"""Trains tables on a GPU, takes checkpoints, and restores them into a new process's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, SparseAdam

from tests.running_parts import pipeline_of
from tests.training_builder import (
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    everything,
    seed_everything,
    train,
)

pytestmark = pytest.mark.gpu

OPTIMIZERS: dict[str, tuple[Any, bool]] = {
    "sgd": (SGD, False),
    "sparse sgd": (SGD, True),
    "adagrad": (Adagrad, False),
    "sparse adagrad": (Adagrad, True),
    "sparse adam": (SparseAdam, True),
}


class OnGpu(Training):
    """A training whose batches move to the model's device."""

    def batch(self) -> None:
        device = self.model.users.weight.device
        users, items, target = (tensor.to(device) for tensor in next(self.reader))
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(self.model(users, items), target).backward()
        for optimizer in self.optimizers:
            optimizer.step()


def build(optimizer: str, device: torch.device, seed: int) -> OnGpu:
    make, sparse = OPTIMIZERS[optimizer]
    seed_everything(seed)
    model = Recommender(sparse=sparse).to(device)
    tables = [model.users.weight, model.items.weight]
    dense = [*model.norm.parameters(), *model.top.parameters()]
    return OnGpu(model, [make(tables, lr=0.1), Adam(dense, lr=0.01)], Batches(seed))


@pytest.fixture
def deterministic() -> Any:
    """Sums of a GPU in a fixed order, so that runs can be compared bit for bit."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    optimizer: str, device: torch.device, tmp_path: Path
) -> None:
    if device.type != "cuda":
        pytest.skip("training on the CPU has tests of its own")
    whole = build(optimizer, device, 1)
    for _ in range(11):
        whole.batch()
    expected = everything(whole)

    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    first = build(optimizer, device, 1)
    with place.agent(), checkpointer(first, place, when_busy="wait") as ckpt:
        ckpt.restore()
        train(first, ckpt, 7)
        ckpt.close(final=False)  # batch 7 is lost, as by a kill
        assert ckpt.stats.failed == ckpt.stats.skipped == 0

    resumed = build(optimizer, device, 2)
    with place.agent(), checkpointer(resumed, place, when_busy="wait") as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 6
        train(resumed, ckpt, 5)
        ckpt.close(final=False)
    assert everything(resumed) == expected


def test_no_kernel_is_compiled_in_a_stall(device: torch.device, tmp_path: Path) -> None:
    if device.type != "cuda":
        pytest.skip("nothing is compiled for a CPU")
    from recpoint.kernels.dirty_bitmap import triton as bitmaps
    from recpoint.kernels.row_gather import triton as gathers

    kernels = (bitmaps._count_many, bitmaps._collect_many, gathers._move_many)

    def versions() -> list[int]:
        return [sum(len(cache[0]) for cache in one.device_caches.values()) for one in kernels]

    training = build("sparse adam", device, 1)
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    with place.agent(), checkpointer(training, place, interval_batches=10**6) as ckpt:
        ckpt.restore()
        compiled = versions()
        assert min(compiled) > 0
        for _ in range(3):
            train(training, ckpt, 2)
            assert ckpt.checkpoint()
            pipeline_of(ckpt).outcomes.wait(float("inf"), until_below=1)
        assert versions() == compiled
