"""Loops that train keyed tables in other ways than batch by batch go on bit for bit, too."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from recpoint import KeyedEmbedding, LightningCallback, ResumableLoader
from recpoint.embeddings import Uniform
from tests.flat_settings import arguments
from tests.keyed_training import KeyedReader, KeyedTraining, everything, keyed_checkpointer
from tests.training_builder import Place, seed_everything, until


class Accumulating(KeyedTraining):
    """Steps after every second batch."""

    def batch(self) -> None:
        self.forward()
        if self.reader.position % 2 == 0:
            self.step()


class Scaled(KeyedTraining):
    """Steps through a GradScaler, which skips the step of a batch whose gradients overflow."""

    def __init__(self) -> None:
        super().__init__(12)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def batch(self) -> None:
        keys, target = next(self.reader)
        overflow = torch.inf if self.reader.position in (5, 11) else 1.0
        loss = nn.functional.mse_loss(self.model(keys), target) * overflow
        self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Evaluated(KeyedTraining):
    """Looks up keys that have no rows after each batch, in evaluation and without gradients."""

    def batch(self) -> None:
        super().batch()
        inserted = self.model.users.slots.inserted
        self.model.eval()
        self.model(torch.arange(50))
        self.model.train()
        with torch.no_grad():
            self.model(torch.arange(50))
        assert self.model.users.slots.inserted == inserted


def _extras(training: KeyedTraining) -> dict[str, Any]:
    return {"scaler": training.scaler} if isinstance(training, Scaled) else {}


@pytest.mark.parametrize(
    "build", [lambda: Accumulating(14), Scaled, lambda: Evaluated(12)], ids=["sum", "amp", "eval"]
)
def test_a_loop_goes_on_as_if_it_had_not_ended(place: Place, build: Any) -> None:
    uninterrupted = build()
    for _ in range(18):
        uninterrupted.batch()
    slots = uninterrupted.model.users.slots
    assert slots.evicted > 0
    assert slots.steps == {Accumulating: 9, Scaled: 16, Evaluated: 18}[type(uninterrupted)]
    for last in (10, 18):
        training = build()
        with keyed_checkpointer(training, place, extras=_extras(training)) as ckpt:
            ckpt.restore()
            while training.reader.position < last:
                training.batch()
                ckpt.step()
                if training.reader.position in (6, 12):
                    assert ckpt.checkpoint()
                    until(lambda: place.persist_all() > 0)
    assert everything(training) == everything(uninterrupted)


def test_batches_may_be_read_ahead_of_training(place: Place) -> None:
    """The reader is two batches ahead; keys are looked up when their batch is trained."""
    uninterrupted = KeyedTraining(12)
    for _ in range(12):
        uninterrupted.batch()
    for last in (7, 12):
        training = KeyedTraining(12)
        batches: Any = list(islice(KeyedReader(), 12))
        loader = ResumableLoader(DataLoader(batches, batch_size=None))
        settings = {"reader": loader, "interval_batches": 3, "in_flight": 3}
        with place.agent(), keyed_checkpointer(training, place, **settings) as ckpt:
            ckpt.restore()
            waiting: deque[Any] = deque()
            for batch in ckpt.batches(total=last):
                waiting.append(batch)
                if len(waiting) == 3:
                    _train(training, waiting.popleft())
            while waiting:
                _train(training, waiting.popleft())
    assert rows(training) == rows(uninterrupted)


def test_lookups_ahead_of_their_batch_are_warned_of(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart would look these keys up a second time."""
    training = KeyedTraining(12)
    with place.agent(), keyed_checkpointer(training, place, interval_batches=2) as ckpt:
        ckpt.restore()
        for batch in ckpt.batches(total=4):
            _train(training, batch)
        assert "before this checkpoint" not in caplog.text
        for batch in ckpt.batches(total=8):
            _train(training, batch)
            training.model(batch[0])
    assert caplog.text.count("before this checkpoint") == 1


def _train(training: KeyedTraining, batch: Any) -> None:
    keys, target = batch
    nn.functional.mse_loss(training.model(keys), target).backward()
    training.step()


def rows(training: KeyedTraining) -> list[object]:
    """Return the model's state and the clock; the reader is ahead of it."""
    return [
        [tensor.tolist() for tensor in training.model.parameters()],
        [state.tolist() for state in training.model.users.slots.row_states.values()],
        training.model.users.slots.steps,
    ]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lightning_goes_on(place: Place) -> None:
    pytest.importorskip("lightning.pytorch", reason="needs the extra [lightning]")
    from tests.lightning_builder import Breaks, Module, ended, fit, loader

    def module() -> Module:
        seed_everything(5)
        built = Module()
        users = KeyedEmbedding(6, 40, sparse=True, initial=Uniform(seed=3), name="users")
        built.net.users = users  # type: ignore[assignment]
        return built

    whole = ended(fit(module(), loader()))

    def callback() -> LightningCallback:
        settings = {"run": place.run, "directory": place.staging, "interval_batches": 2}
        return LightningCallback(**arguments({**settings, "when_busy": "wait"}))

    with place.agent():
        with pytest.raises(RuntimeError, match="at batch 7"):
            fit(module(), loader(), Breaks(7), callback())
        resumed = ended(fit(module(), loader(), callback()))
    # The generators' next numbers differ, because each life has built its model.
    assert resumed[1:-1] == whole[1:-1]


@pytest.mark.nightly("accelerate")
def test_accelerate_goes_on(place: Place) -> None:
    accelerate = pytest.importorskip("accelerate", reason="prepares model and optimizer")
    uninterrupted = KeyedTraining(12)
    for _ in range(9):
        uninterrupted.batch()
    for last in (5, 9):
        training = KeyedTraining(12)
        accelerator = accelerate.Accelerator(cpu=True)
        model = accelerator.prepare(training.model)
        wrapped = [accelerator.prepare(optimizer) for optimizer in training.optimizers]
        with place.agent(), keyed_checkpointer(training, place, interval_batches=2) as ckpt:
            ckpt.restore()
            for keys, target in ckpt.batches(total=last):
                accelerator.backward(nn.functional.mse_loss(model(keys), target))
                for optimizer in wrapped:
                    optimizer.step()
                    optimizer.zero_grad()
    assert rows(training) == rows(uninterrupted)
