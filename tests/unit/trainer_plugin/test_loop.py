"""Loops over `batches`: where they end, what they count, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from recpoint import Checkpointer, ResumableLoader
from recpoint.errors import SettingsError
from tests.fault.loop_lives import BATCHES_AN_EPOCH, OwnReader
from tests.training_builder import (
    Place,
    checkpointer,
    everything,
    seed_everything,
    simple_training,
    train,
)


def resumable() -> ResumableLoader:
    samples = TensorDataset(torch.arange(4 * BATCHES_AN_EPOCH))
    return ResumableLoader(DataLoader(samples, batch_size=4, shuffle=True))


def started(place: Place, reader: object, **settings: Any) -> Checkpointer:
    """A Checkpointer of a small model; what it trains on is not what the reader gives."""
    settings = {"interval_batches": 1000, "schedulers": (), "in_flight": 0, **settings}
    ckpt = checkpointer(simple_training(), place, reader=reader, **settings)
    ckpt.restore()
    return ckpt


def goods(batches: Iterable[Any], count: int | None = None) -> list[list[int]]:
    """What is in the next batches; the loop is left after `count` of them."""
    found: list[list[int]] = []
    for batch in batches:
        found.append((batch[0] if isinstance(batch, list) else batch).tolist())
        if len(found) == count:
            break
    return found


def refused(ckpt: Checkpointer, *arguments: Any, **bound: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        ckpt.batches(*arguments, **bound)
    return str(caught.value)


def test_exactly_one_bound_is_required(place: Place) -> None:
    with started(place, OwnReader()) as ckpt:
        assert "found neither; expected exactly one of them" in refused(ckpt)
        assert "found both; expected exactly one of them" in refused(ckpt, epochs=1, total=1)
        for wrong in (0, -1, 1.5, "3", True):
            assert refused(ckpt, epochs=wrong).startswith("batches(epochs): found")
            assert refused(ckpt, total=wrong).startswith("batches(total): found")


@pytest.mark.parametrize("is_closed_by_hand", [False, True])
def test_a_loop_that_is_left_counts_its_batch_while_a_variable_keeps_its_iterator(
    is_closed_by_hand: bool, place: Place
) -> None:
    """As `bar = tqdm(ckpt.batches(...))` does: the iterator lives when the Checkpointer ends."""
    with place.agent():
        with started(place, resumable()) as ckpt:
            batches = ckpt.batches(epochs=1)
            first = goods(batches, 3)
            if is_closed_by_hand:
                ckpt.close()
        assert ckpt.batches_done == 3
        assert next(iter(batches), None) is None
        with started(place, resumable()) as again:
            assert again.batches_done == 3
            left = goods(again.batches(epochs=1))
            assert len(first) + len(left) == BATCHES_AN_EPOCH == again.batches_done


def test_it_is_called_between_restore_and_close(place: Place) -> None:
    ckpt = checkpointer(simple_training(), place, reader=OwnReader())
    assert "not started" in refused(ckpt, epochs=1)
    ckpt.restore()
    ckpt.close()
    assert "closed" in refused(ckpt, epochs=1)


def test_without_a_reader_it_needs_batches_and_knows_no_epochs(place: Place) -> None:
    with started(place, None) as ckpt:
        assert "found no reader" in refused(ckpt, total=1)
        assert "found a int" in refused(ckpt, 7, total=1)
        said = refused(ckpt, OwnReader(), epochs=1)
        assert "found a Checkpointer without a reader" in said and "ResumableLoader" in said
        assert goods(ckpt.batches(OwnReader(), total=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert ckpt.batches_done == 2


def test_a_run_whose_epochs_nobody_counted_has_a_total_alone(place: Place) -> None:
    training = simple_training()
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 3)
        assert "found 3 batches that were trained without batches()" in refused(ckpt, epochs=1)
    again = simple_training(2)
    with place.agent(), checkpointer(again, place, in_flight=0) as ckpt:
        ckpt.restore()
        assert "3 batches" in refused(ckpt, epochs=1)
        assert len(list(ckpt.batches(total=5))) == 2
        assert ckpt.epochs_done == 0


def test_it_trains_as_a_loop_of_ones_own_does(place: Place) -> None:
    own = simple_training()
    with place.agent(), checkpointer(own, place) as ckpt:
        ckpt.restore()
        train(own, ckpt, 7)
        expected = everything(own)
    looped = simple_training()
    with place.agent(), checkpointer(looped, place) as ckpt:
        ckpt.restore(fresh=True)
        for users, items, target in ckpt.batches(total=7):
            looped.optimizers[0].zero_grad()
            nn.functional.mse_loss(looped.model(users, items), target).backward()
            looped.optimizers[0].step()
        assert ckpt.batches_done == 7
        assert everything(looped) == expected
    assert ckpt.stats.staged > 1  # not at the end alone


def test_step_is_not_called_in_a_loop_that_calls_it(place: Place) -> None:
    with started(place, OwnReader()) as ckpt:
        batches = ckpt.batches(total=4)
        next(batches)
        with pytest.raises(SettingsError, match="remove step\\(\\) from the loop"):
            ckpt.step()
        assert "one loop at a time" in refused(ckpt, total=4)
        next(batches)
        assert ckpt.batches_done == 1
        batches.close()  # type: ignore[attr-defined]  # a generator's
        assert ckpt.batches_done == 2
        ckpt.step()
        assert ckpt.batches_done == 3


@pytest.mark.parametrize("reader", [OwnReader, resumable])
def test_a_loop_that_is_left_goes_on_in_the_same_epoch(place: Place, reader: Any) -> None:
    with started(place, reader()) as ckpt:
        found = goods(ckpt.batches(epochs=2), 2)
        assert ckpt.batches_done == 2
        found += goods(ckpt.batches(total=4))
        assert (ckpt.batches_done, ckpt.epochs_done) == (4, 0)
        found += goods(ckpt.batches(epochs=1))
        assert sorted(sum(found, [])) == list(range(20))
        assert (ckpt.batches_done, ckpt.epochs_done) == (5, 1)
        assert goods(ckpt.batches(epochs=1)) == []
        assert len(goods(ckpt.batches(epochs=2))) == 5


def test_an_error_in_the_loop_leaves_its_batch_behind(place: Place) -> None:
    with started(place, OwnReader()) as ckpt:
        with pytest.raises(ZeroDivisionError):
            for _ in ckpt.batches(total=4):
                raise ZeroDivisionError
        assert goods(ckpt.batches(total=4)) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


@pytest.mark.parametrize("interval", [BATCHES_AN_EPOCH, 1000], ids=["by step", "by close"])
@pytest.mark.parametrize("reader", [OwnReader, resumable])
def test_a_later_bound_trains_the_epochs_that_are_new(
    place: Place, reader: Any, interval: int
) -> None:
    """The reader may give nothing first: whether its end was reached is not in its position."""
    with place.agent():
        for epochs in (1, 2, 2, 4):
            seed_everything(epochs)
            with started(place, reader(), interval_batches=interval) as ckpt:
                done = ckpt.batches_done // BATCHES_AN_EPOCH
                found = sum(goods(ckpt.batches(epochs=epochs)), [])
                assert sorted(found) == sorted([*range(20)] * (epochs - done))
                assert ckpt.epochs_done == epochs


def test_a_reader_that_has_no_more_to_give_is_named(place: Place) -> None:
    three = [torch.arange(2)] * 3
    with started(place, OwnReader()) as ckpt:
        with pytest.raises(SettingsError) as caught:
            goods(ckpt.batches(iter(three), total=7))
        assert str(caught.value).startswith(
            "batches(total=7): found no batch in epoch 2, after 3 batches; "
            "expected a reader that begins anew each time it is iterated"
        )
        with pytest.raises(SettingsError, match="epochs=2.*no batch in epoch 2"):
            goods(ckpt.batches([], epochs=2))


def test_the_reader_is_told_its_epochs(place: Place) -> None:
    reader = OwnReader()
    with place.agent(), started(place, reader) as ckpt:
        goods(ckpt.batches(epochs=2))
        assert reader.epochs == [0, 1]
        goods(ckpt.batches(epochs=3), 2)
        assert reader.epochs == [0, 1, 2]
    again = OwnReader()
    with started(place, again) as ckpt:
        assert again.epochs == [2]  # before its position
        goods(ckpt.batches(epochs=4))
        assert again.epochs == [2, 3]


def test_an_error_of_the_reader_is_no_end_of_its_epoch(place: Place) -> None:
    class Failing(OwnReader):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for batch in super().__iter__():
                if self.position == 3 and not self.epochs[1:]:
                    self.epochs.append(-1)
                    raise OSError("no such file")
                yield batch

    with started(place, Failing()) as ckpt:
        with pytest.raises(OSError, match="no such file"):
            goods(ckpt.batches(epochs=1))
        assert (ckpt.batches_done, ckpt.epochs_done) == (2, 0)
        goods(ckpt.batches(epochs=1))
        assert (ckpt.batches_done, ckpt.epochs_done) == (4, 1)
