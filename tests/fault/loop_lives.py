"""Lives of a training whose loop ends: each goes on where the one before was killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from recpoint import Checkpointer, Lookahead, ResumableLoader, Staging, Timeouts
from tests.training_builder import InlineAgent, seed_everything, until

__all__ = ["BATCHES_AN_EPOCH", "ReaderKind", "loop_life", "new_reader"]

BATCHES_AN_EPOCH, _BATCH = 5, 4

ReaderKind = Literal["resumable", "sampler", "stateful", "stateful sampler", "own"]


class OwnReader:
    """A reader with a state: one pass ends after some batches, and the next begins anew."""

    def __init__(self) -> None:
        self.position = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < BATCHES_AN_EPOCH:
            self.position += 1
            yield torch.arange(_BATCH) + _BATCH * (self.position - 1)
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def new_reader(kind: ReaderKind) -> Any:
    """A reader of one of the kinds that a loop has to work with."""
    if kind == "own":
        return OwnReader()
    samples = TensorDataset(torch.arange(_BATCH * BATCHES_AN_EPOCH))
    settings: dict[str, Any] = {"batch_size": _BATCH, "shuffle": True}
    if "sampler" in kind:
        # Its shuffle follows from the number of the epoch alone.
        sampler: DistributedSampler[Any] = DistributedSampler(samples, num_replicas=1, rank=0)
        settings = {"batch_size": _BATCH, "sampler": sampler}
    if "stateful" in kind:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(samples, **settings)
    return ResumableLoader(DataLoader(samples, **settings))


def loop_life(
    *,
    place: str,
    told: str,
    kind: ReaderKind,
    interval_batches: int,
    epochs: int | None = None,
    total: int | None = None,
    kill_in: int | None = None,
    window: int | None = None,
) -> None:
    """Train to the end, or into batch `kill_in` of the run; tell each batch in a file at once.

    With a `window`, the reader reads so many batches ahead.
    """
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    seed_everything(1)
    table, noise = nn.Embedding(40, 3, sparse=True), nn.Dropout(0.3)
    model = nn.ModuleDict({"goods": table, "noise": noise})
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    reader = new_reader(kind)
    if window is not None:
        reader = Lookahead(reader, model, ids=lambda batch: {"goods": _goods(batch)}, window=window)
    with (
        open(told, "a") as file,
        InlineAgent(Path(place) / "staging"),
        Checkpointer(
            model,
            optimizer,
            run=f"{place}/run",
            reader=reader,
            interval_batches=interval_batches,
            staging=Staging(directory=f"{place}/staging"),
            timeouts=Timeouts(close_seconds=120.0, drain_seconds=120.0),
        ) as checkpoints,
    ):
        checkpoints.restore()
        first = checkpoints.batches_done
        for batch in checkpoints.batches(epochs=epochs, total=total):
            number = checkpoints.batches_done + 1
            due = (number - 1) // interval_batches - first // interval_batches
            _until_committed(checkpoints, due)  # each life has the same
            goods = _goods(batch)
            file.write(json.dumps([number, checkpoints.epochs_done, goods.tolist()]) + "\n")
            file.flush()
            if number == kill_in:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            noise(table(goods)).square().sum().backward()
            optimizer.step()
        file.write(json.dumps(["end", table.weight.tolist()]) + "\n")


def _goods(batch: Any) -> Any:
    return batch[0] if isinstance(batch, list | tuple) else batch


def _until_committed(checkpoints: Checkpointer, count: int) -> None:
    until(lambda: checkpoints.stats.committed == count)
