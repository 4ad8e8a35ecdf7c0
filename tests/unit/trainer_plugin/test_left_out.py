"""State that a script keeps to itself is named in the log before a restart goes on without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

from recpoint import ResumableLoader
from tests.training_builder import Place, Training, checkpointer, simple_training, train


class Schedulers:
    """Several behind one state, as a script may have them."""

    def __init__(self, *schedulers: LRScheduler) -> None:
        self.all = list(schedulers)

    def state_dict(self) -> dict[str, Any]:
        return {str(number): one.state_dict() for number, one in enumerate(self.all)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, one in enumerate(self.all):
            one.load_state_dict(state[str(number)])


def _two_scheduled() -> tuple[Training, list[LRScheduler]]:
    training = simple_training()
    model = training.model
    tables = torch.optim.SGD([model.users.weight, model.items.weight], lr=0.1)
    dense = torch.optim.Adam([*model.norm.parameters(), *model.top.parameters()])
    training.optimizers = [tables, dense]
    return training, [LambdaLR(one, lambda step: 0.9**step) for one in training.optimizers]


def _warned(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in caplog.messages if text in message]


def test_each_optimizer_whose_scheduler_is_left_out_is_named(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training, schedulers = _two_scheduled()
    training.schedulers = schedulers[:1]
    with checkpointer(training, place, close_seconds=0.0) as ckpt:
        ckpt.restore()
    (warning,) = _warned(caplog, "learning-rate scheduler")
    assert "optimizers[1], a Adam," in warning and "schedulers=[...]" in warning


@pytest.mark.parametrize("how", ["schedulers", "chained", "one that does not say", "extra", "held"])
def test_a_scheduler_that_is_in_the_checkpoint_is_not_named(
    how: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training, schedulers = _two_scheduled()
    first, second = schedulers
    cases: dict[str, dict[str, Any]] = {
        "schedulers": {"schedulers": schedulers},
        "chained": {"schedulers": [ChainedScheduler([first]), second]},
        "one that does not say": {"schedulers": [Schedulers(first, second)]},
        "extra": {"schedulers": [first], "extras": {"second": second}},
        "held": {"extras": {"both": Schedulers(first, second)}},
    }
    with checkpointer(training, place, close_seconds=0.0, **cases[how]) as ckpt:
        ckpt.restore()
    assert not _warned(caplog, "learning-rate scheduler")


class NotReady(Schedulers):
    """It has an optimizer, later."""

    @property
    def optimizer(self) -> object:
        raise RuntimeError("fit() was not called")


@pytest.mark.parametrize("given", ["schedulers", "extras"])
def test_what_an_attribute_of_the_users_raises_is_passed_over(given: str, place: Place) -> None:
    training, _ = _two_scheduled()
    thing = NotReady()
    what: dict[str, Any] = {"schedulers": [thing]}
    if given == "extras":
        what = {"extras": {"it": thing}}
    with checkpointer(training, place, close_seconds=0.0, **what) as ckpt:
        assert ckpt.restore() is None


@pytest.mark.parametrize("extras", [{}, {"position": Schedulers()}])
def test_a_restore_without_a_reader_says_that_batches_may_be_others(
    extras: dict[str, Any], place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        training = simple_training()
        with (
            place.agent(),
            checkpointer(training, place, reader=None, extras=extras) as ckpt,
        ):
            first = ckpt.restore() is None
            found = _warned(caplog, "no reader was given")
            assert len(found) == (0 if first or extras else 1)
            train(training, ckpt, 2)
    assert not found or "restored after 2 batches" in found[0] and "ResumableLoader" in found[0]


@pytest.mark.parametrize("wrapped", [True, False])
def test_batches_taken_past_the_reader_are_noticed_once(
    wrapped: bool, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training()
    loader = DataLoader(TensorDataset(torch.arange(8)))
    reader = ResumableLoader(loader)
    with place.agent(), checkpointer(training, place, reader=reader) as ckpt:
        ckpt.restore()
        for _ in reader if wrapped else loader:
            train(training, ckpt, 1)
    assert ckpt.stats.staged > 1
    found = _warned(caplog, "the reader gave none of them")
    assert len(found) == (0 if wrapped else 1)


def test_a_cut_right_after_a_restore_is_no_batch_past_the_reader(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        training = simple_training()
        reader = ResumableLoader(DataLoader(TensorDataset(torch.arange(8))))
        with place.agent(), checkpointer(training, place, reader=reader) as ckpt:
            if ckpt.restore() is not None:
                ckpt.checkpoint()
            for _, _ in zip(range(4), reader, strict=False):
                train(training, ckpt, 1)
    assert ckpt.batches_done == 8 and not _warned(caplog, "the reader gave none of them")


@pytest.mark.parametrize("how", ["left out", "given", "extra", "averaged", "frozen"])
def test_parameters_that_an_optimizer_of_the_script_alone_trains_are_named_once(
    how: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training, _ = _two_scheduled()
    dense = training.optimizers[1]
    average = torch.optim.swa_utils.AveragedModel(training.model.top)
    given = training.optimizers if how in ("given", "averaged") else training.optimizers[:1]
    extras: dict[str, Any] = {"dense": dense} if how == "extra" else {}
    if how == "frozen":
        training.model.norm.requires_grad_(False)
        training.model.top.requires_grad_(False)
    if how == "averaged":
        training.model.add_module("average", average)
    trained = Training(training.model, list(given), training.reader)
    with place.agent(), checkpointer(trained, place, extras=extras) as ckpt:
        ckpt.restore()
        for _ in range(5):
            training.batch()
            if how == "averaged":
                average.update_parameters(training.model.top)
            ckpt.step()
    warnings = _warned(caplog, "in no optimizer")
    assert len(warnings) == (how == "left out")
    assert all("4 parameters, 'norm.weight', 'norm.bias', 'top.weight'," in w for w in warnings)
