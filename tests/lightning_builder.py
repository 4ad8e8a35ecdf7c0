"""Builds a Lightning module with every kind of state, fits it, and returns its end as bytes."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from recpoint import LightningCallback, Options, ResumableLoader, Staging
from recpoint.format import state_tree
from tests.training_builder import BATCH, ROWS, Recommender, seed_everything

SAMPLES = 6 * BATCH


class Samples(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Samples that depend on their number, plus noise from every global generator."""

    def __init__(self, count: int = SAMPLES) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = np.random.default_rng(number)
        noise = random.random() + float(np.random.random()) + torch.rand(())
        return (
            torch.tensor(int(generator.integers(0, ROWS))),
            torch.from_numpy(generator.integers(0, ROWS // 2, 3)),
            torch.tensor(generator.random(), dtype=torch.float32) + noise,
        )


class Stream(IterableDataset[tuple[Tensor, Tensor, Tensor]]):
    """The same samples, without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        samples = Samples()
        return (samples[number] for number in range(len(samples)))


class Module(LightningModule):
    """The recommender under SGD, with a schedule for each step and one for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Recommender(sparse=True)
        self.seen: list[float] = []

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        users, items, target = batch
        self.seen.append(float(target.sum()))
        return nn.functional.mse_loss(self.net(users, items), target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        users, items, target = batch
        self.log("val", nn.functional.mse_loss(self.net(users, items), target))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        by_step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


class Manual(Module):
    """Two optimizers, stepped by the module; every third batch steps neither."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        if batch_idx % 3 == 1:
            return loss
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        schedulers: Any = self.lr_schedulers()
        schedulers.step()
        return loss

    def configure_optimizers(self) -> Any:
        tables = [*self.net.users.parameters(), *self.net.items.parameters()]
        dense = [*self.net.norm.parameters(), *self.net.top.parameters()]
        first = torch.optim.Adagrad(tables, lr=0.1)
        return [first, torch.optim.Adam(dense, lr=0.01)], [
            torch.optim.lr_scheduler.StepLR(first, step_size=2, gamma=0.9)
        ]


class Breaks(Callback):
    """Ends training in the forward pass of a batch, counted over all epochs."""

    def __init__(self, at: int, error: type[BaseException] = RuntimeError) -> None:
        self._at, self._error = at, error

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self._at:
            raise self._error(f"at batch {self._at}")


class Dies(Callback):
    """Kills its own process before the backward pass of a batch, counted over all epochs."""

    def __init__(self, at: int) -> None:
        self._at = at

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def loader(kind: str = "shuffled", **settings: Any) -> ResumableLoader:
    """Return a loader of six batches an epoch: "shuffled", or "stream", which has no length."""
    data: Any = Samples() if kind == "shuffled" else Stream()
    return ResumableLoader(
        DataLoader(data, batch_size=BATCH, shuffle=kind == "shuffled", **settings)
    )


def fit(
    module: Module,
    batches: Any,
    *callbacks: Any,
    validate: bool = True,
    trainer_class: Any = Trainer,
    **settings: Any,
) -> Trainer:
    """Fit quietly on one CPU, with a validation in the middle and at the end of each epoch."""
    stopping = [EarlyStopping("val", patience=50)] if validate else []
    trainer: Trainer = trainer_class(
        **{
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": 3,
            "val_check_interval": 3 if batches_have_length(batches) else 1.0,
            "callbacks": [*callbacks, *stopping],
            **settings,
        }
    )
    checked = DataLoader(Samples(2 * BATCH), batch_size=BATCH, shuffle=False)
    trainer.fit(module, batches, checked if validate else None)
    return trainer


def batches_have_length(batches: Any) -> bool:
    """Whether Lightning knows when an epoch ends."""
    try:
        len(batches)
    except TypeError:
        return False
    return True


def ended(trainer: Trainer) -> list[Any]:
    """Return all state at the end of a fit, as JSON and bytes."""
    module: Any = trainer.lightning_module
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    loops = trainer.fit_loop.state_dict()
    loops["state_dict"].pop("combined_loader", None)
    tree, tensors = state_tree.flatten(
        {
            "model": dict(module.state_dict()),
            "optimizers": [dict(optimizer.state_dict()) for optimizer in trainer.optimizers],
            "schedulers": [
                {key: value for key, value in config.scheduler.state_dict().items()}
                for config in trainer.lr_scheduler_configs
            ],
            "callbacks": {
                callback.state_key: callback.state_dict()
                for callback in callbacks
                if isinstance(callback, EarlyStopping)
            },
            "loops": loops,
            "steps": [trainer.global_step, trainer.current_epoch],
            "next": [random.random(), float(np.random.random()), torch.rand(3)],
        }
    )
    return [
        tree.decode(),
        *[tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors],
    ]


def life(*, run: str, staging: str, evidence: str, seen: str, wait_at: int | None = None) -> None:
    """Fit in its own process; `seen` gets a line for each batch, `evidence` the final state.

    After batch `wait_at`, the process waits to be killed.
    """
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    seed_everything(5)

    class Tells(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            with Path(seen).open("a") as file:
                file.write(f"{trainer.fit_loop.total_batch_idx}\n")
            while trainer.fit_loop.total_batch_idx == wait_at:
                signal.pause()

    callback = LightningCallback(run=run, staging=staging, interval_batches=4)
    trainer = fit(Module(), loader(), Tells(), callback, max_epochs=12)
    Path(evidence).write_text(json.dumps(ended(trainer)))


def rank_life(
    rank: int, ranks: int, *, meeting: str, run: str, staging: str, evidence: str, dies_at: int
) -> None:
    """Fit as one rank under DDP, started by the test as torchrun does; -1: it does not die."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
    )
    # Lightning uses an existing process group. The ranks meet at a file, because another process
    # could take a port meanwhile.
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    seed_everything(5)
    data = Samples(ranks * SAMPLES)
    shares: Any = DistributedSampler(data, num_replicas=ranks, rank=rank)
    batches = ResumableLoader(DataLoader(data, batch_size=BATCH, sampler=shares))
    callback = LightningCallback(
        run=run,
        staging=Staging(directory=staging, when_busy="wait"),
        interval_batches=4,
        options=Options(on_error="raise"),
    )
    module = Module()
    settings: dict[str, Any] = {
        "devices": ranks,
        "strategy": "ddp",
        "use_distributed_sampler": False,
    }
    trainer = fit(module, batches, Dies(dies_at), callback, max_epochs=3, **settings)
    Path(evidence).write_text(json.dumps([len(module.seen), ended(trainer)]))
