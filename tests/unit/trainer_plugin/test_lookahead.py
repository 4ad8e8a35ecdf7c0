"""A reader ahead of training: what it reads, knows, stores and refuses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from recpoint import Lookahead, ResumableLoader
from recpoint.errors import IncompatibleModel, SettingsError
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.lookahead import load_divided
from tests.training_builder import (
    ROWS,
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    everything,
    seed_everything,
    simple_training,
    until,
)

_TABLES = {"users": ROWS, "items": ROWS // 2}


class _Reader:
    """Reads `length` batches an epoch; notes what it is asked for."""

    def __init__(self, length: int = 50, fails_at: int | None = None) -> None:
        self.length, self.fails_at = length, fails_at
        self.at = self.reads = 0
        self.loaded = False
        self.told: list[Any] = []

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        self.at = self.at if self.loaded else 0
        self.loaded = False
        return _Iterator(self)

    def batch(self, number: int) -> Any:
        return {"users": torch.tensor([[number]]), "label": torch.tensor([0.5])}

    def state_dict(self) -> dict[str, Any]:
        self.told.append("state")
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.loaded = state["at"], True


class _Iterator:
    """An iterator that goes on after an error, as a DataLoader's does."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader

    def __iter__(self) -> _Iterator:
        return self

    def __next__(self) -> Any:
        reader = self.reader
        if reader.at == reader.length:
            raise StopIteration
        reader.at += 1
        reader.reads += 1
        if reader.at == reader.fails_at:
            raise OSError(f"batch {reader.at} is unreadable")
        return reader.batch(reader.at)


class _Budget(_Reader):
    def batches_until_checkpoint(self, n: int) -> None:
        self.told.append(n)


def _number(batch: Any) -> int:
    return int(batch["users"])


def _attached(reader: Any, **settings: Any) -> Lookahead:
    ahead = Lookahead(reader, **settings)
    ahead.attach(_TABLES)
    return ahead


# Reading.


def test_at_most_two_are_read_for_each_until_the_window_is_held() -> None:
    reader = _Reader(30)
    ahead = _attached(reader, window=5)
    assert (len(ahead), ahead.window, ahead.reader) == (30, 5, reader)
    held, reads, numbers = [], [0], []
    for batch in ahead:
        numbers.append(_number(batch))
        held.append(ahead.held)
        reads.append(reader.reads)
        coming = [int(ids["users"]) for ids in ahead.coming(ahead.held)]
        assert coming == list(range(numbers[-1] + 1, numbers[-1] + 1 + ahead.held))
    assert numbers == list(range(1, 31))
    assert held == [0, 1, 2, 3, 4, *[5] * 20, 4, 3, 2, 1, 0]
    assert max(later - earlier for earlier, later in zip(reads, reads[1:], strict=False)) == 2
    assert [_number(batch) for batch in ahead] == list(range(1, 31))  # another epoch


def test_a_window_longer_than_the_epoch_reads_to_its_end() -> None:
    ahead = _attached(_Reader(4))
    batches = iter(ahead)
    assert [_number(next(batches)) for _ in range(3)] == [1, 2, 3]
    assert ahead.held == 1 and ahead.reader.reads == 4
    assert [_number(one) for one in batches] == [4]
    assert next(batches, None) is None  # and stays at its end
    assert ahead.reader.reads == 4


def test_an_error_is_raised_at_its_own_batch() -> None:
    reader = _Reader(30, fails_at=7)
    ahead = _attached(reader, window=20)
    batches = iter(ahead)
    assert [_number(next(batches)) for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert reader.reads == 7  # the error is known
    state = ahead.state_dict()
    with pytest.raises(OSError, match="batch 7 is unreadable"):
        next(batches)
    for before in state, ahead.state_dict():
        resumed = _attached(_Reader(30, fails_at=7), window=3)
        resumed.load_state_dict(before)
        with pytest.raises(OSError, match="batch 7 is unreadable"):
            next(iter(resumed))
    # A training that goes on with the next batch is restored to what it went on with.
    assert [_number(next(batches)) for _ in range(3)] == [8, 9, 10]
    resumed = _attached(_Reader(30, fails_at=7), window=3)
    resumed.load_state_dict(ahead.state_dict())
    assert [_number(batch) for batch in resumed] == [_number(batch) for batch in batches]


def test_an_epoch_is_read_again_if_its_first_batch_has_failed() -> None:
    reader = _Reader(9)
    ahead = _attached(reader)
    batches = iter(ahead)
    for _ in range(4):
        next(batches)
    resumed = _attached(_Reader(9, fails_at=5))
    resumed.load_state_dict(ahead.state_dict())
    with pytest.raises(OSError, match="batch 5"):
        next(iter(resumed))
    resumed.reader.fails_at = None
    assert [_number(batch) for batch in resumed] == [5, 6, 7, 8, 9]


def test_a_reader_that_does_not_know_its_position_fails_the_checkpoint_only() -> None:
    class Unsure(_Reader):
        def state_dict(self) -> dict[str, Any]:
            if 0 < self.at < 20:
                raise OSError("no position")
            return super().state_dict()

    ahead = _attached(Unsure(60), window=4)
    batches = iter(ahead)
    for number in range(1, 40):
        assert _number(next(batches)) == number
        if number < 17:
            with pytest.raises(OSError, match="no position"):
                ahead.state_dict()
    assert ahead.state_dict()["reader"]["at"] + ahead.state_dict()["forward"] == 39


def test_an_interrupt_is_raised_at_once_and_loses_no_batch() -> None:
    class Interrupted(_Reader):
        def batch(self, number: int) -> Any:
            if number == 9 and self.reads == 9:
                self.at -= 1
                raise KeyboardInterrupt
            return super().batch(number)

    ahead = _attached(Interrupted(20), window=6)
    batches, numbers = iter(ahead), []
    for _ in range(4):
        numbers.append(_number(next(batches)))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    state = ahead.state_dict()
    assert state["reader"]["at"] + state["forward"] == 4
    for batch in batches:
        numbers.append(_number(batch))
        state = ahead.state_dict()
        assert state["reader"]["at"] + state["forward"] == numbers[-1]
    assert numbers == list(range(1, 21))


# State.


@pytest.mark.parametrize("window", [1, 7, 40])
def test_a_restore_drops_at_most_fifteen_batches(window: int) -> None:
    ahead = _attached(_Reader(100), window=window)
    for number, _ in enumerate(ahead, 1):
        state = ahead.state_dict()
        assert 0 <= state["forward"] <= 15
        assert state["reader"]["at"] + state["forward"] == number
        # No state is kept that no position may need.
        assert len(ahead._anchors) <= window // 16 + 3


def test_the_reader_is_told_how_many_batches_come_before_its_state_is_taken() -> None:
    reader = _Budget(100)
    ahead = _attached(reader, window=20)
    assert not hasattr(ahead, "batches_until_checkpoint")
    batches = iter(ahead)
    for _ in range(60):
        next(batches)
    told = reader.told
    assert told[:2] == ["state", 1]  # before the epoch, and its first batch
    assert told[2:] == ["state", 16] * ((80 - 1) // 16 + 1)


def test_the_batch_after_which_an_epoch_is_over_ends_it_after_a_restore_too() -> None:
    """The script tells the next epoch, and the loader must not spend it on the end of the last."""

    def build() -> tuple[DistributedSampler[Any], Any]:
        samples = TensorDataset(torch.arange(20))
        sampler: DistributedSampler[Any] = DistributedSampler(samples, num_replicas=1, rank=0)
        return sampler, ResumableLoader(DataLoader(samples, 1, sampler=sampler))

    sampler, loader = build()
    ahead = _attached(loader, ids=lambda batch: {"users": batch[0]})
    for _ in zip(range(20), ahead, strict=False):
        pass
    state = ahead.state_dict()
    sampler.set_epoch(1)
    expected = [batch[0].item() for batch in ahead]
    sampler, loader = build()
    resumed = _attached(loader, ids=lambda batch: {"users": batch[0]})
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert [batch[0].item() for batch in resumed] == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_torchdata_read_ahead(persistent: bool) -> None:
    samples = TensorDataset(torch.arange(80))

    def build(window: int) -> Lookahead:
        settings: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
        loader: Any = StatefulDataLoader(samples, 2, shuffle=True, **settings)
        return _attached(loader, ids=lambda batch: {"users": batch[0]}, window=window)

    seed_everything(1)
    ahead = build(12)
    states: dict[int, Any] = {}
    batches = []
    for _ in range(2):
        for batch in ahead:
            batches.append(batch[0].tolist())
            if len(batches) in (3, 25, 40, 47):
                states[len(batches)] = ahead.state_dict()
    ahead.reader._iterator = None  # ends the workers
    assert sorted(sum(batches[:40], [])) == sorted(sum(batches[40:], [])) == list(range(80))
    for at, state in states.items():
        seed_everything(2)
        resumed = build(30)
        resumed.load_state_dict(state)
        found = batches[:at]
        while len(found) < 80:
            found += [batch[0].tolist() for batch in resumed]
        resumed.reader._iterator = None
        assert found == batches


def test_a_state_of_a_later_release_is_refused() -> None:
    ahead = _attached(_Reader())
    with pytest.raises(SettingsError, match="version 2 of a Lookahead's state"):
        ahead.load_state_dict({**ahead.state_dict(), "lookahead": 2})


def test_fewer_batches_than_were_trained_are_refused() -> None:
    ahead = _attached(_Reader(20))
    for _ in zip(range(14), ahead, strict=False):
        pass
    assert ahead.state_dict()["forward"] == 13
    short = _attached(_Reader(8))
    short.load_state_dict(ahead.state_dict())
    with pytest.raises(SettingsError, match="found 7 batches after the position"):
        next(iter(short))


class _Divided(_Reader):
    def load_state_dicts(self, states: Sequence[Any], rank: int, ranks: int) -> None:
        self.load_state_dict({"at": sum(state["at"] for state in states) // ranks})


@pytest.mark.parametrize("wrap", [True, False])
def test_the_readers_of_other_ranks_are_divided(wrap: bool) -> None:
    states = []
    for count in (11, 19):
        ahead = _attached(_Divided(40), window=20)
        for _ in zip(range(count), ahead, strict=False):
            pass
        states.append(ahead.state_dict())
    reader: Any = _attached(_Divided(40)) if wrap else _Divided(40)
    load_divided(reader, states, 0, 1)
    assert [_number(batch) for batch in reader] == list(range(31, 41))


# Ids.


@dataclass
class _Batch:
    users: Tensor
    items: Tensor
    label: Tensor


def test_ids_are_flat_and_those_of_the_batch() -> None:
    batches = [
        _Batch(torch.arange(6).view(2, 3).t(), torch.tensor([ROWS * 9]), torch.zeros(4)),
        _Batch(
            torch.arange(3, dtype=torch.int32), torch.empty(0, dtype=torch.int64), torch.ones(4)
        ),
        _Batch(torch.arange(3), torch.arange(2), torch.ones(4)),
    ]

    class Given(_Reader):
        def batch(self, number: int) -> Any:
            return batches[number - 1]

    ahead = Lookahead(
        Given(3), Recommender(), ids=lambda batch: {"users": batch.users, "items": batch.items}
    )
    taken = iter(ahead)
    next(taken)
    assert ahead.held == 0 and ahead.coming(0) == ()
    next(taken)
    (ids,) = ahead.coming(1)
    assert ids["users"].data_ptr() == batches[2].users.data_ptr()  # a view, which is not counted
    assert ahead.held_bytes == 3 * 8 + 2 * 8 + 4 * 4
    with pytest.raises(ValueError, match="2 batches are asked for, and 1 are held"):
        ahead.coming(2)
    next(taken)
    assert ahead.held_bytes == 0


def test_ids_that_are_no_view_are_contiguous_copies() -> None:
    class Given(_Reader):
        def batch(self, number: int) -> Any:
            return {"users": torch.arange(6).view(2, 3).t(), "label": torch.zeros(4)}

    ahead = _attached(Given(9))
    taken = iter(ahead)
    next(taken), next(taken)
    (ids,) = ahead.coming(1)
    assert ids["users"].is_contiguous() and ids["users"].tolist() == [0, 3, 1, 4, 2, 5]
    assert ahead.held_bytes == 2 * 6 * 8 + 4 * 4
    assert ids.keys() == {"users"}


def test_mappings_need_names_of_tables_which_may_come_later() -> None:
    ahead = Lookahead(_Reader())
    batches = iter(ahead)
    next(batches), next(batches)
    with pytest.raises(SettingsError, match="no names of tables"):
        ahead.coming(1)
    ahead.attach(_TABLES)
    assert ahead.coming(1)[0]["users"].tolist() == [3]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (lambda _: {"user": torch.tensor([1])}, r"table 'user'.*no such table.*'users'"),
        (lambda _: {"users": torch.tensor([1.0])}, r"'users'.*torch\.float32 on cpu"),
        (lambda _: {"users": torch.tensor([1], dtype=torch.int16)}, r"'users'.*torch\.int16"),
        (lambda _: {"users": torch.empty(1, dtype=torch.int64, device="meta")}, "on meta"),
        (lambda _: {"users": torch.eye(2).long().to_sparse()}, r"'users'.*torch\.sparse_coo"),
        (lambda _: {"users": [1]}, r"'users': found a list"),
        (lambda _: torch.tensor([1]), "a function that returned a Tensor"),
    ],
)
def test_ids_that_are_none_are_refused(ids: Callable[[Any], Any], expected: str) -> None:
    for ahead in (Lookahead(_Reader(), Recommender(), ids=ids), _attached(_Reader(), ids=ids)):
        with pytest.raises(SettingsError, match=expected):
            next(iter(ahead))


def test_a_batch_without_a_table_is_refused() -> None:
    class Tuples(_Reader):
        def batch(self, number: int) -> Any:
            return (torch.tensor([number]),)

    with pytest.raises(SettingsError, match=r"a batch that is a tuple.*Lookahead\(ids"):
        next(iter(_attached(Tuples())))
    other = Lookahead(_Reader())
    other.attach({"other": 5})
    with pytest.raises(SettingsError, match=r"'users', 'label'.*one of \['other'\]"):
        next(iter(other))


def test_names_that_were_read_before_the_tables_were_known_are_checked() -> None:
    ahead = Lookahead(_Reader(), ids=lambda batch: {"unknown": batch["users"]})
    batches = iter(ahead)
    next(batches), next(batches)
    with pytest.raises(SettingsError, match=r"table 'unknown'.*no such table"):
        ahead.attach(_TABLES)


# What is refused.


def _counted() -> ResumableLoader:
    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(4))))
    loader.expect_counts()
    return loader


@pytest.mark.parametrize(
    ("reader", "expected"),
    [
        (lambda: DataLoader(TensorDataset(torch.arange(4))), r"without state_dict.*Resumable"),
        (lambda: Lookahead(_Reader()), "found a Lookahead"),
        (lambda: torch.nn.Linear(1, 1), "a Linear that is not iterable"),
        (_counted, r"whose batches a framework counts.*Lightning"),
    ],
)
def test_what_cannot_be_read_ahead_is_refused(reader: Callable[[], Any], expected: str) -> None:
    with pytest.raises(SettingsError, match=rf"^Lookahead\(reader\): .*{expected}"):
        Lookahead(reader())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_that_accelerate_prepared_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate", reason="prepares a loader")
    settings = accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=settings)
    prepared = accelerator.prepare(DataLoader(TensorDataset(torch.arange(4))))
    with pytest.raises(SettingsError, match=r"Lookahead\(reader\): .*Accelerate's prepare\(\)"):
        Lookahead(prepared)


def test_a_loader_that_is_counted_later_is_refused_too() -> None:
    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(4))))
    ahead = _attached(loader, ids=lambda batch: {"users": batch[0]})
    loader.before_fetch = lambda: None
    with pytest.raises(SettingsError, match="whose batches a framework counts"):
        next(iter(ahead))


@pytest.mark.parametrize("window", [0, 1.5, True, "many"])
def test_another_window_is_refused(window: Any) -> None:
    with pytest.raises(SettingsError, match=r"Lookahead\.window"):
        Lookahead(_Reader(), window=window)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"Lookahead\(ids=\.\.\.\)"):
        Lookahead(_Reader(), ids={"users": 1})  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"Lookahead\(model\)"):
        Lookahead(_Reader(), _Reader())  # type: ignore[arg-type]


def test_an_iterator_of_an_earlier_epoch_is_refused() -> None:
    ahead = _attached(_Reader())
    earlier, later = iter(ahead), iter(ahead)
    assert _number(next(earlier)) == 1
    assert _number(next(later)) == 1
    with pytest.raises(SettingsError, match="after another epoch has begun"):
        next(earlier)
    assert _number(next(later)) == 2


# Draws.


def test_what_the_reader_draws_follows_the_global_ones_after_a_plain_checkpoint() -> None:
    class Draws(_Reader):
        def batch(self, number: int) -> Any:
            return {"users": torch.randint(ROWS, (3,)), "noise": random.random()}

    seed_everything(1)
    plain = Draws(40)
    batches = iter(plain)
    for _ in range(5):
        next(batches)
    state, generators = plain.state_dict(), rng.capture()
    expected = [(one["users"].tolist(), one["noise"]) for one in batches]
    ahead = _attached(Draws(40))
    ahead.load_state_dict(state)
    rng.restore(generators)
    ahead.generators_restored()
    random.random()  # the model
    assert [(one["users"].tolist(), one["noise"]) for one in ahead] == expected


# With a Checkpointer.


class _Life:
    """A training in one process whose reader draws from all global generators."""

    def __init__(self, seed: int, window: int | None) -> None:
        self.training: Training = simple_training(seed)
        self.reader: Any = self.training.reader
        if window is not None:
            self.reader = Lookahead(
                self.reader,
                self.training.model,
                ids=lambda batch: {"users": batch[0], "items": batch[1]},
                window=window,
            )
        self.seen: list[Any] = []

    def live(self, place: Place, upto: int) -> None:
        """Train with a checkpoint every 10 batches; what comes after the last one is lost."""
        with (
            place.agent(),
            checkpointer(
                self.training, place, reader=self.reader, interval_batches=10
            ) as checkpoints,
        ):
            checkpoints.restore()
            committed = 0
            batches = iter(self.reader)
            while checkpoints.batches_done < upto:
                users, items, target = next(batches)
                self.seen.append((users.tolist(), items.tolist(), target.tolist()))
                self.training.optimizers[0].zero_grad()
                loss = self.training.model(users, items).sub(target).square().mean()
                loss.backward()
                self.training.optimizers[0].step()
                checkpoints.step()
                if checkpoints.batches_done % 10 == 0:
                    committed += 1
                    until(lambda: checkpoints.stats.committed == committed)  # noqa: B023
            checkpoints.close(final=False)

    def all_but_the_reader(self) -> list[object]:
        """All state as `everything` gives it; the reader inside is ahead."""
        self.training.reader = Batches(0)
        return everything(self.training)


@pytest.mark.parametrize("windows", [(200, 3, 30), (1, 200, 1)])
def test_a_resumed_training_is_bit_identical(windows: tuple[int, int, int], place: Place) -> None:
    whole = _Life(1, 12)
    whole.live(place, 64)
    expected = whole.all_but_the_reader()
    place.run += "-parts"
    seen: list[Any] = []
    for seed, (window, upto) in enumerate(zip(windows, (27, 45, 64), strict=True), start=1):
        life = _Life(seed, window)
        life.live(place, upto)
        seen = seen[: len(seen) // 10 * 10] + life.seen
    assert seen == whole.seen
    assert life.all_but_the_reader() == expected


def test_a_checkpoint_goes_from_lookahead_to_none_and_back(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """All lives see the same users and items, which come from a generator of the reader's own."""
    whole = _Life(1, 12)
    whole.live(place, 64)
    place.run += "-parts"
    seen: list[Any] = []
    for window, upto in ((200, 27), (None, 45), (8, 64)):
        life = _Life(1, window)
        caplog.clear()
        life.live(place, upto)
        assert ("the checkpoint's reader was in a Lookahead" in caplog.text) == (window is None)
        if window is None:  # where the model has not drawn yet, the noise is the same, too
            assert life.seen[0] == whole.seen[20]
        seen = seen[: len(seen) // 10 * 10] + life.seen
    assert [batch[:2] for batch in seen] == [batch[:2] for batch in whole.seen]


def test_a_reader_that_yields_nothing_cannot_go_forward(place: Place) -> None:
    class Elsewhere:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("it does not fit")

    _Life(1, 5).live(place, 10)
    life = _Life(1, None)
    life.reader = Elsewhere()
    with (
        checkpointer(life.training, place, reader=life.reader) as checkpoints,
        pytest.raises(IncompatibleModel, match="the reader here, a Elsewhere, is not iterable"),
    ):
        checkpoints.restore()


def test_batches_trained_past_the_reader_are_noticed(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(40)), 1))
    ahead: Any = Lookahead(loader, ids=lambda batch: {"users": batch[0]})
    with place.agent(), checkpointer(training, place, reader=ahead) as checkpoints:
        checkpoints.restore()
        for _ in loader.loader:
            checkpoints.step()
            if checkpoints.batches_done == 4:
                break
    assert "take the batches from the Lookahead that is the reader" in caplog.text
