"""Readers whose public bug reports at neighbours named a loss: tried here, each is resumed right.

meta-pytorch/data#1283: a `StatefulDataLoader` whose snapshots are further apart than its batches.
huggingface/accelerate#2016: a run that is resumed in its second epoch, with each kind of sampler.
huggingface/datasets#7447: persistent workers, killed near an epoch's end; `test_short_epochs` has
datasets that begin each later epoch where they were resumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from recpoint import Checkpointer, Options, ResumableLoader, Staging, Timeouts
from tests.training_builder import Place, seed_everything, until

ROWS, BATCH, BATCHES, END = 40, 4, 6, 14


class Draws(IterableDataset[Tensor]):
    """Rows that are drawn while they are read, from the generator of their process."""

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(BATCH * BATCHES):
            yield torch.randint(ROWS, ())


class OwnDraws(IterableDataset[Tensor]):
    """Rows that are drawn from a generator of the dataset, whose state is the dataset's state."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self._given = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self._given < BATCH * BATCHES:
            self._given += 1
            yield torch.randint(ROWS, (), generator=self._generator)
        self._given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state(), "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._given = state["given"]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, number: int) -> int:
        return number


class Life:
    """A training of one table, and the rows of each batch that it was trained on."""

    def __init__(self, seed: int, loader: Callable[[], Any]) -> None:
        seed_everything(seed)
        self.model = nn.ModuleDict({"table": nn.Embedding(ROWS, 2)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.reader = loader()
        self.rows: list[list[int]] = []

    def train(self, batch: Tensor) -> None:
        self.rows.append(batch.tolist())
        self.optimizer.zero_grad()
        self.model["table"](batch).sum().backward()
        self.optimizer.step()

    def checkpointer(self, place: Place) -> Checkpointer:
        return Checkpointer(
            self.model,
            self.optimizer,
            reader=self.reader,
            run=place.run,
            staging=Staging(directory=place.staging, when_busy="wait"),
            interval_batches=5,
            timeouts=Timeouts(close_seconds=60.0, drain_seconds=60.0),
            options=Options(handle_sigterm=False, announce=False, on_error="raise"),
        )


def _resumes(place: Place, loader: Callable[[], Any], killed_at: int) -> None:
    """A life ends between two checkpoints; the next one trains what an unbroken life trains."""
    unbroken = Life(1, loader)
    for epoch in range(-(-END // BATCHES)):
        # `batches()` tells samplers their epoch, as scripts do.
        if hasattr(getattr(unbroken.reader, "sampler", None), "set_epoch"):
            unbroken.reader.sampler.set_epoch(epoch)
        for batch in itertools.islice(unbroken.reader, END - len(unbroken.rows)):
            unbroken.train(batch)
    first = Life(1, loader)
    with place.agent():
        with first.checkpointer(place) as checkpoints:
            checkpoints.restore()
            for batch in checkpoints.batches(total=killed_at):
                first.train(batch)
            until(lambda: checkpoints.stats.committed == killed_at // 5)
            checkpoints.close(final=False)  # batches after the checkpoint are lost, as by a kill
        second = Life(2, loader)
        with second.checkpointer(place) as checkpoints:
            checkpoints.restore()
            begun = checkpoints.batches_done
            for batch in checkpoints.batches(total=END):
                second.train(batch)
            checkpoints.close(final=False)
    assert begun == killed_at // 5 * 5
    assert first.rows == unbroken.rows[:killed_at]
    assert second.rows == unbroken.rows[begun:]
    for name, weight in unbroken.model.named_parameters():
        assert weight.equal(second.model.get_parameter(name))


# Of torchdata itself, which tells torch that it is there.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("data", [Draws, OwnDraws])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "wrapped",
    [True, pytest.param(False, marks=pytest.mark.nightly("loops"))],
    ids=["ResumableLoader", "itself"],
)
def test_snapshots_further_apart_than_batches(
    place: Place, data: type[Any], workers: int, wrapped: bool
) -> None:
    def loader() -> Any:
        stateful = StatefulDataLoader(
            data(), batch_size=BATCH, num_workers=workers, snapshot_every_n_steps=4
        )
        return ResumableLoader(stateful) if wrapped else stateful

    _resumes(place, loader, 9)


@pytest.mark.parametrize("kept", [True, False], ids=["persistent", "new each epoch"])
def test_workers_of_iterable_data_near_the_end_of_an_epoch(place: Place, kept: bool) -> None:
    def loader() -> ResumableLoader:
        return ResumableLoader(DataLoader(Draws(), BATCH, num_workers=1, persistent_workers=kept))

    _resumes(place, loader, BATCHES)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(Numbers()),
    "random": lambda: RandomSampler(Numbers()),
    "random, own generator": lambda: RandomSampler(Numbers(), generator=_generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * len(Numbers()), len(Numbers())),
    "weighted, own generator": lambda: WeightedRandomSampler(
        [1.0] * len(Numbers()), len(Numbers()), generator=_generator()
    ),
    "subset": lambda: SubsetRandomSampler(range(len(Numbers()))),
    "distributed": lambda: DistributedSampler(Numbers(), num_replicas=1, rank=0),
    "Accelerate's": lambda: SeedableRandomSampler(Numbers(), generator=_generator(), data_seed=11),
}


#: By day; `make nightly` tries the others.
_BY_DAY = ("random", "weighted, own generator", "Accelerate's")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in _BY_DAY else [pytest.mark.nightly("loops")])
        for kind in SAMPLERS
    ],
)
def test_resumed_in_the_second_epoch(place: Place, kind: str) -> None:
    def loader() -> ResumableLoader:
        return ResumableLoader(DataLoader(Numbers(), BATCH, sampler=SAMPLERS[kind]()))

    _resumes(place, loader, BATCHES + 5)


@pytest.mark.parametrize("kind", ["random", "random, own generator", "Accelerate's"])
def test_a_batch_sampler_in_the_second_epoch(place: Place, kind: str) -> None:
    def loader() -> ResumableLoader:
        batches = BatchSampler(SAMPLERS[kind](), BATCH, drop_last=False)
        return ResumableLoader(DataLoader(Numbers(), batch_sampler=batches))

    _resumes(place, loader, BATCHES + 5)
