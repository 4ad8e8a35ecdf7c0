"""A position for dataloaders that have none, to the batch, whatever draws around them."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from recpoint import ResumableLoader
from recpoint.errors import SettingsError
from recpoint.format import state_tree
from recpoint.trainer_plugin.state import rng
from tests.combinations import combinations
from tests.training_builder import (
    Batches,
    Place,
    checkpointer,
    everything,
    seed_everything,
    simple_training,
)

_SAMPLES = TensorDataset(torch.arange(40))
_SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "in order": lambda: SequentialSampler(_SAMPLES),
    "replacing": lambda: RandomSampler(_SAMPLES, replacement=True, num_samples=40),
    "weighted": lambda: WeightedRandomSampler(torch.arange(1.0, 41.0).tolist(), 40),
    "subset": lambda: SubsetRandomSampler(range(40)),
}
if find_spec("accelerate") is not None:
    from accelerate.data_loader import SeedableRandomSampler

    _SAMPLERS["of Accelerate"] = lambda: SeedableRandomSampler(_SAMPLES, data_seed=5)


def _through_a_checkpoint(state: dict[str, Any]) -> Any:
    """As it is stored and read back."""
    tree, tensors = state_tree.flatten(state)
    return state_tree.unflatten(tree, [tensor.clone() for tensor in tensors])


def _loader(kind: str) -> ResumableLoader:
    settings: dict[str, Any] = {"shuffle": True}
    if kind == "generator":
        settings["generator"] = torch.Generator().manual_seed(4)
    if "workers" in kind:
        settings["num_workers"] = 1
        settings["persistent_workers"] = kind == "kept workers"
    if kind == "distributed":
        sampler: DistributedSampler[Any] = DistributedSampler(_SAMPLES, num_replicas=2, rank=1)
        settings = {"sampler": sampler}
    if kind in _SAMPLERS:
        settings = {"sampler": _SAMPLERS[kind]()}
    if kind == "batches of a sampler":
        batches = BatchSampler(RandomSampler(_SAMPLES), 4, drop_last=True)
        return ResumableLoader(DataLoader(_SAMPLES, batch_sampler=batches))
    return ResumableLoader(DataLoader(_SAMPLES, batch_size=4, **settings))


def _epochs(loader: ResumableLoader, first: int, taken: list[Any], most: int) -> list[Any]:
    """Batches of epochs `first` to 2, each followed by draws of its own, until there are `most`."""
    for epoch in range(first, 3):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            taken.append((batch[0].tolist(), random.random(), float(torch.rand(()))))
            if len(taken) == most:
                return taken
    return taken


@pytest.mark.parametrize(
    ("kind", "at"),
    combinations(
        [
            *("shuffled", "generator", "workers", "kept workers", "distributed"),
            *(*_SAMPLERS, "batches of a sampler"),
        ],
        [1, 7, 10, 13],
    ),
)
def test_it_goes_on_with_the_next_batch(kind: str, at: int) -> None:
    seed_everything(3)
    batches = _epochs(_loader(kind), 0, [], 1000)
    seed_everything(3)
    loader = _loader(kind)
    done = _epochs(loader, 0, [], at)
    state = _through_a_checkpoint(loader.state_dict())
    drawn = rng.capture()

    seed_everything(99)
    resumed = _loader(kind)
    resumed.load_state_dict(state)
    rng.restore(drawn)
    epoch = at // len(resumed) if at % len(resumed) else at // len(resumed) - 1
    assert _epochs(resumed, epoch, done, 1000) == batches


@pytest.mark.parametrize("at", [1, 13])
def test_workers_that_are_there_already_shuffle_nothing_otherwise(at: int) -> None:
    seed_everything(3)
    batches = _epochs(_loader("kept workers"), 0, [], 1000)
    seed_everything(3)
    loader = _loader("kept workers")
    done = _epochs(loader, 0, [], at)
    state = _through_a_checkpoint(loader.state_dict())
    drawn = rng.capture()

    seed_everything(99)
    resumed = _loader("kept workers")
    _epochs(resumed, 0, [], 3)  # somebody has looked at some batches before the restore
    resumed.load_state_dict(state)
    rng.restore(drawn)
    assert _epochs(resumed, at // len(resumed), done, 1000) == batches


def test_an_epoch_that_has_not_begun_begins_with_the_workers_there_were() -> None:
    """A framework takes its checkpoint where it asks for the first batch of an epoch."""
    seed_everything(3)
    batches = _epochs(_loader("kept workers"), 0, [], 1000)
    for epoch in range(3):
        seed_everything(3)
        loader = _loader("kept workers")
        done: list[Any] = []
        for _ in range(epoch):
            done += _epochs(loader, 2, [], 1000)  # one epoch
        found: list[Any] = []

        def before_fetch(loader: ResumableLoader = loader, found: list[Any] = found) -> None:
            found.append(_through_a_checkpoint(loader.state_dict()))

        loader.before_fetch = before_fetch
        next(iter(loader))

        seed_everything(99)
        resumed = _loader("kept workers")
        resumed.load_state_dict(found[0])
        assert _epochs(resumed, epoch, done, 1000) == batches


def test_a_loader_with_a_position_is_asked_for_it(place: Place) -> None:
    def run(seed: int, batches: int) -> list[object]:
        training = simple_training(seed)
        reader = ResumableLoader(training.reader)
        with place.agent():
            with checkpointer(training, place, reader=reader) as checkpoints:
                checkpoints.restore()
                for users, items, target in reader:
                    training.optimizers[0].zero_grad()
                    training.model(users, items).sub(target).square().mean().backward()
                    training.optimizers[0].step()
                    checkpoints.step()
                    if checkpoints.batches_done == batches:
                        break
        return everything(training)

    run(1, 5)
    resumed = run(2, 9)
    place.run += "-whole"
    assert run(1, 9) == resumed


def test_fewer_batches_than_were_trained_are_refused() -> None:
    loader = _loader("shuffled")
    _epochs(loader, 0, [], 9)
    state = loader.state_dict()
    short = ResumableLoader(DataLoader(TensorDataset(torch.arange(8)), batch_size=4))
    short.load_state_dict(state)
    with pytest.raises(SettingsError, match="2 batches in the epoch"):
        next(iter(short))


def test_more_than_one_batch_ahead_is_refused() -> None:
    loader = _loader("shuffled")
    loader.expect_counts()
    batches = iter(loader)
    next(batches), next(batches)
    with pytest.raises(SettingsError, match="2 batches that were read and not trained"):
        loader.state_dict()


def test_what_is_no_iterable_is_refused() -> None:
    with pytest.raises(SettingsError, match="a method"):
        ResumableLoader(Batches(1).__next__)  # type: ignore[arg-type]


class _Stateless(Batches):
    """A loader without a length that knows its position, but for the third."""

    def state_dict(self) -> dict[str, Any]:
        if self.position == 2:
            raise OSError("no position")
        return super().state_dict()


def test_a_loader_that_cannot_say_where_it_is_goes_on() -> None:
    loader = ResumableLoader(_Stateless(5))
    loader.expect_counts()
    batches = iter(loader)
    for number in range(1, 6):
        next(batches)  # one ahead of what is trained
        if number == 3:
            with pytest.raises(OSError, match="no position"):
                loader.state_dict()
        else:
            assert loader.state_dict()["own"]["position"] == number - 1
        loader.count_consumed()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_that_accelerate_prepared_is_refused(place: Place, stateful: bool) -> None:
    accelerate = pytest.importorskip("accelerate", reason="prepares a loader")
    settings = accelerate.DataLoaderConfiguration(use_stateful_dataloader=stateful)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    prepared = accelerator.prepare(DataLoader(_SAMPLES, batch_size=4, shuffle=True))
    with pytest.raises(SettingsError, match=r"ResumableLoader\(loader\): .*prepare\(\)") as caught:
        ResumableLoader(prepared)
    assert "without prepare()" in str(caught.value)
    training = simple_training()
    training.reader = prepared
    with pytest.raises(SettingsError, match="^reader: found a DataLoaderShard of Accelerate's"):
        checkpointer(training, place)


def test_a_loader_whose_state_dict_is_compiled_is_no_reason_to_fail() -> None:
    """What is compiled need not say where it is from."""

    class Compiled(DataLoader[Any]):
        state_dict = dict.fromkeys

    assert Compiled.state_dict.__module__ is None
    assert list(ResumableLoader(Compiled(_SAMPLES, batch_size=64)))
