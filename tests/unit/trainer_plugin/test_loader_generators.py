"""Generators that are a dataloader's own: a restore goes on with what they would have drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from recpoint import ResumableLoader
from recpoint.format import state_tree
from recpoint.trainer_plugin.state import loader_parts, rng
from tests.training_builder import seed_everything

_SAMPLES = TensorDataset(torch.arange(24))
_BATCHES = 6


class _Shuffled(Sampler[int]):
    """Draws from a generator of any library."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        ids = list(range(len(_SAMPLES)))
        self.generator.shuffle(ids)
        yield from ids


class _Noisy(Dataset[Any]):
    """Draws for each sample."""

    def __init__(self) -> None:
        self.noise = np.random.Generator(np.random.Philox(5))

    def __len__(self) -> int:
        return len(_SAMPLES)

    def __getitem__(self, index: int) -> Any:
        return (index, self.noise.random())


def _loader(kind: str) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    shuffled = RandomSampler(_SAMPLES, generator=generator)
    samplers: dict[str, Any] = {
        "random": shuffled,
        "subset": SubsetRandomSampler(range(24), generator=generator),
        "weighted": WeightedRandomSampler([1.0] * 24, 24, generator=generator),
        "numpy": _Shuffled(np.random.default_rng(4)),
        "philox": _Shuffled(np.random.Generator(np.random.Philox(4))),
        "RandomState": _Shuffled(np.random.RandomState(4)),
        "python": _Shuffled(random.Random(4)),
    }
    if kind == "loader":
        return DataLoader(_SAMPLES, batch_size=4, shuffle=True, generator=generator)
    if kind == "batch sampler":
        return DataLoader(_SAMPLES, batch_sampler=BatchSampler(shuffled, 4, drop_last=False))
    if kind == "dataset":
        return DataLoader(_Noisy(), batch_size=4)
    return DataLoader(_SAMPLES, batch_size=4, sampler=samplers[kind])


_KINDS = (
    *("loader", "batch sampler", "dataset", "random", "subset", "weighted"),
    *("numpy", "philox", "RandomState", "python"),
)


def _batches(loader: ResumableLoader, epochs: int) -> list[Any]:
    return [[part.tolist() for part in batch] for _ in range(epochs) for batch in loader]


def _stored(state: dict[str, Any]) -> Any:
    """As it is stored and read back."""
    tree, tensors = state_tree.flatten(state)
    return state_tree.unflatten(tree, [tensor.clone() for tensor in tensors])


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("at", [1, 6, 8])
def test_a_restore_draws_what_would_have_been_drawn(kind: str, at: int) -> None:
    seed_everything(1)
    whole = _batches(ResumableLoader(_loader(kind)), 3)
    seed_everything(1)
    loader = ResumableLoader(_loader(kind))
    states = []
    for _ in range(3):
        for _ in loader:
            states.append((_stored(loader.state_dict()), rng.capture()))

    seed_everything(2)
    resumed = ResumableLoader(_loader(kind))
    resumed.load_state_dict(states[at - 1][0])
    rng.restore(states[at - 1][1])
    epochs_begun = (at + _BATCHES - 1) // _BATCHES
    assert _batches(resumed, 4 - epochs_begun) == whole[at:]


@pytest.mark.parametrize("kind", _KINDS)
def test_an_epoch_that_has_not_begun_is_drawn_alike(kind: str) -> None:
    seed_everything(1)
    whole = _batches(ResumableLoader(_loader(kind)), 2)
    seed_everything(1)
    loader = ResumableLoader(_loader(kind))
    _batches(loader, 1)
    batches = iter(loader)
    states = []
    loader.before_fetch = lambda: states.append(_stored(loader.state_dict()))
    next(batches)

    seed_everything(2)
    resumed = ResumableLoader(_loader(kind))
    resumed.load_state_dict(states[0])
    assert _batches(resumed, 1) == whole[_BATCHES:]


def _told_epochs(sampler: Any, epochs: range, state: Any) -> tuple[list[Any], list[Any]]:
    """The batches of a loop that tells the sampler its epochs, and the state after each."""
    loader = ResumableLoader(DataLoader(_SAMPLES, batch_size=4, sampler=sampler))
    if state is not None:
        loader.load_state_dict(state)
    taken, states = [], []
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            taken.append(batch[0].tolist())
            states.append(_stored(loader.state_dict()))
    return taken, states


def test_a_sampler_that_is_told_another_epoch_goes_on_with_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run(epochs: range, state: Any = None) -> tuple[list[Any], list[Any]]:
        return _told_epochs(DistributedSampler(_SAMPLES, num_replicas=1, rank=0), epochs, state)

    whole, states = run(range(3))
    assert not caplog.records
    resumed, _ = run(range(1), states[13])  # a script that counts its epochs from 0 again
    assert resumed == whole[14:]
    (record,) = caplog.records
    message = record.getMessage()
    assert "set to epoch 0, but 2 batches of epoch 2 are trained" in message
    assert "begin the loop over epochs with 2" in message


class _EpochsOfItsOwn(_Shuffled):
    """Shuffles by its generator and by the epoch that it is told."""

    epoch: int

    def __init__(self, generator: Any) -> None:
        super().__init__(generator)
        self.epoch = 0

    def __len__(self) -> int:
        return len(_SAMPLES)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        ids = list(super().__iter__())
        return iter(ids[self.epoch :] + ids[: self.epoch])


@pytest.mark.parametrize("kind", ["distributed", "own"])
@pytest.mark.parametrize("counts", ["by batches_done", "from 0"])
@pytest.mark.parametrize("done", [5, 6, 7, 12, 13])
def test_a_script_that_knows_its_epoch_trains_each_batch_once_wherever_it_ended(
    kind: str, counts: str, done: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run(epochs: range, state: Any = None) -> tuple[list[Any], list[Any]]:
        sampler: Any = _EpochsOfItsOwn(np.random.default_rng(4))
        if kind == "distributed":
            sampler = DistributedSampler(_SAMPLES, num_replicas=1, rank=0)
        return _told_epochs(sampler, epochs, state)

    whole, states = run(range(4))
    # From 0: with the epoch that was going on, of which nothing may be left.
    first = done // _BATCHES if counts == "by batches_done" else (done - 1) // _BATCHES
    resumed, others = run(range(first, 4), states[done - 1])
    assert resumed == whole[done:] and not caplog.records
    assert run(range(3, 4), others[17 - done])[0] == whole[18:]


def test_a_state_of_an_earlier_release_has_the_loaders_generator_alone() -> None:
    loader = ResumableLoader(_loader("loader"))
    own = loader_parts.capture(loader.loader)["states"]["generator"]
    whole = _batches(loader, 1)
    state = loader.state_dict()
    began = {name: value for name, value in state["began"].items() if name != "drawing"}
    del state["drawing"]
    resumed = ResumableLoader(_loader("loader"))
    resumed.load_state_dict({**state, "given": 2, "began": {**began, "own": own}})
    assert _batches(resumed, 1) == whole[2:]


def test_generators_without_a_state_and_parts_that_hold_each_other_are_passed_over() -> None:
    sampler: Any = _Shuffled(random.SystemRandom())
    sampler.dataset = sampler
    loader = DataLoader(_SAMPLES, batch_size=4, sampler=sampler)
    assert loader_parts.capture(loader) == {"states": {}, "epochs": {}}


class _Dice(random.Random):
    """Of a class of somebody's own, which is no help to who stores its state."""

    def __init__(self, state: Any) -> None:
        super().__init__(4)
        self._state = state

    def getstate(self) -> Any:
        if self._state is None:
            raise NotImplementedError("who throws dice keeps no state")
        return self._state


class _Wheel(np.random.PCG64):
    @property  # type: ignore[misc]  # it cannot be set
    def state(self) -> Any:
        raise NotImplementedError("nor does a wheel")


@pytest.mark.parametrize(
    "generator",
    [
        _Dice(None),
        _Dice(object()),
        np.random.Generator(_Wheel(4)),
        np.random.RandomState(np.random.PCG64(4)),  # numpy puts no such state back
    ],
)
def test_a_generator_that_nobody_can_put_back_ends_no_training(generator: Any) -> None:
    loader = ResumableLoader(DataLoader(_SAMPLES, batch_size=4, sampler=_Shuffled(generator)))
    batches = iter(loader)
    next(batches)
    state = _stored(loader.state_dict())
    loader.load_state_dict(state)
    assert len(_batches(loader, 1)) == _BATCHES - 1


@pytest.mark.parametrize("now", ["random", "numpy", "philox", "RandomState", "python"])
@pytest.mark.parametrize("then", ["random", "numpy", "RandomState", "python"])
def test_a_generator_of_another_kind_goes_on_as_it_was_made(
    then: str, now: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = ResumableLoader(_loader(then))
    next(iter(loader))
    resumed = ResumableLoader(_loader(now))
    resumed.load_state_dict(_stored(loader.state_dict()))
    assert len(_batches(resumed, 1)) == _BATCHES - 1
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (then != now)
    if then != now:
        assert "generator sampler.generator is not restored" in caplog.text
        assert _batches(resumed, 1) == _batches(ResumableLoader(_loader(now)), 2)[_BATCHES:]
