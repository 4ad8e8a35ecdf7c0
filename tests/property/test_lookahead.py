"""Batches read ahead are those of an uninterrupted run, whatever restarts and however far ahead."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from recpoint import Lookahead, ResumableLoader
from recpoint.format import state_tree
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.lookahead_state import load_without
from tests.example_counts import examples
from tests.training_builder import Batches, seed_everything

_SAMPLES, _BATCH = 70, 2  # 35 batches: two anchors and a rest


class _Noisy(Dataset[Any]):
    """Samples with noise from all global generators."""

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.randn()), float(torch.randn(()))


class _Epochs:
    """A reader of epochs of `length` batches that are drawn from all global generators."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = self.at = 0
        self._goes_on = False

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on:
            self.at = 0
            self.epoch += 1
        self._goes_on = False
        while self.at < self.length:
            self.at += 1
            noise = random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))
            yield self.epoch, self.at, *noise

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self._goes_on = state["epoch"], state["at"], True


def _reader(kind: str) -> Any:
    data = _Noisy()
    if kind == "torchdata":
        return StatefulDataLoader(data, _BATCH, shuffle=True)
    if kind == "resumable":
        return ResumableLoader(DataLoader(data, _BATCH, shuffle=True))
    if kind == "resumable torchdata":
        return ResumableLoader(StatefulDataLoader(data, _BATCH, shuffle=True))
    if kind == "own generator":
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(4))
        return ResumableLoader(DataLoader(data, _BATCH, sampler=sampler))
    if kind == "told epochs":
        told: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1)
        return ResumableLoader(DataLoader(data, 1, sampler=told))
    if kind == "short":
        return _Epochs(3)
    return _Epochs(35) if kind == "epochs" else Batches(4)


_KINDS = (
    *("torchdata", "resumable", "resumable torchdata", "own generator", "told epochs"),
    *("short", "epochs", "endless"),
)


def _plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [_plain(one) for one in batch] if isinstance(batch, list | tuple) else batch


def _stored(state: Any) -> Any:
    """As it is stored and read back."""
    tree, tensors = state_tree.flatten(state)
    return state_tree.unflatten(tree, [tensor.clone() for tensor in tensors])


def _ids(batch: Any) -> dict[str, torch.Tensor]:
    return {"table": torch.tensor([len(batch)])}


class _Life:
    """A training whose model draws after each batch, over restarts of its process."""

    def __init__(self, kind: str, window: int) -> None:
        seed_everything(3)
        self.kind = kind
        self.batches: list[Any] = []
        self.drawn: list[Any] = []
        self.ahead = True
        self.epoch = 0
        self.reader: Any = Lookahead(_reader(kind), ids=_ids, window=window)
        self._batches = self._iterate()

    def train(self, count: int, *, draws: bool = True) -> None:
        for _ in range(count):
            self.batches.append(_plain(self._next()))
            if draws:
                noise = float(np.random.randn()), float(torch.randn(()))
                self.drawn.append((random.gauss(0, 1), *noise))
            if isinstance(self.reader, Lookahead):
                assert self.reader.held <= self.reader.window
                assert len(self.reader.coming(self.reader.held)) == self.reader.held

    def leave_epoch(self, *, draws: bool) -> None:
        """Begin another epoch, and train one batch of it, so that it has begun."""
        self.epoch += 1
        self._batches = self._iterate()
        self.train(1, draws=draws)

    def restart(self, window: int | None) -> None:
        state, generators = _stored(self.reader.state_dict()), _stored(rng.capture())
        seed_everything(99)
        reader = _reader(self.kind)
        self.reader = reader if window is None else Lookahead(reader, ids=_ids, window=window)
        self._tell()
        # In the order of TrainingState.restore.
        if window is None and self.ahead:
            rng.restore(generators)
            load_without(reader, state)
        else:
            self.reader.load_state_dict(state)
            self.reader.state_dict()
            rng.restore(generators)
        if isinstance(self.reader, Lookahead):
            self.reader.generators_restored()
        self.ahead = window is not None
        self._batches = iter(self.reader)

    def _iterate(self) -> Iterator[Any]:
        self._tell()
        return iter(self.reader)

    def _tell(self) -> None:
        inner = self.reader.reader if isinstance(self.reader, Lookahead) else self.reader
        if self.kind == "told epochs":
            inner.sampler.set_epoch(self.epoch)

    def _next(self) -> Any:
        while True:
            try:
                return next(self._batches)
            except StopIteration:
                self.epoch += 1
                self._batches = self._iterate()


_WINDOWS = st.sampled_from((1, 2, 5, 16, 40))
_TRAIN = st.tuples(st.just("train"), st.integers(1, 40))
_LEAVE = st.tuples(st.just("leave"), st.just(0))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=examples(30), deadline=None)
@given(
    windows=st.tuples(_WINDOWS, _WINDOWS),
    does=st.lists(_TRAIN | _LEAVE | st.tuples(st.just("restart"), _WINDOWS), max_size=6),
)
def test_restarts_and_windows_change_nothing(
    kind: str, windows: tuple[int, int], does: list[tuple[str, int]]
) -> None:
    whole, parts = _Life(kind, windows[0]), _Life(kind, windows[1])
    for life in whole, parts:
        seed_everything(5)
        life.train(1)
        for what, how in does:
            if what == "train":
                life.train(how)
            elif what == "leave":
                life.leave_epoch(draws=True)
            elif life is parts:
                life.restart(how)
            if what == "restart":
                life.train(1)  # the first loop after a restart goes on in the epoch
        life.train(3)
    assert parts.batches == whole.batches
    assert parts.drawn == whole.drawn == _drawn_without_reader(len(whole.drawn))


def _drawn_without_reader(count: int) -> list[Any]:
    seed_everything(5)
    return [
        (random.gauss(0, 1), *reversed((float(torch.randn(())), float(np.random.randn()))))
        for _ in range(count)
    ]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("kind", _KINDS)
@settings(max_examples=examples(30), deadline=None)
@given(
    does=st.lists(
        _TRAIN | _LEAVE | st.tuples(st.just("restart"), st.none() | _WINDOWS), max_size=6
    ),
)
def test_with_and_without_lookahead_the_same_batches_come(
    kind: str, does: list[tuple[str, Any]]
) -> None:
    """The model draws nothing here, because without Lookahead both draw from one generator."""
    whole, parts = _Life(kind, 20), _Life(kind, 20)
    for life in whole, parts:
        life.train(1, draws=False)
        for what, how in [*does, ("restart", None), ("train", 40)]:
            if what == "train":
                life.train(how, draws=False)
            elif what == "leave":
                life.leave_epoch(draws=False)
            elif life is parts:
                life.restart(how)
            if what == "restart":
                life.train(1, draws=False)
    assert parts.batches == whole.batches
