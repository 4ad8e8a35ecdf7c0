"""What staged checkpoints take at most, with the state that optimizers make when they step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from recpoint import Checkpointer, Consecutive
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from tests.running_parts import pipeline_of
from tests.training_builder import (
    DIM,
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    seed_everything,
    train,
    until,
)

SLOTS = 2

Make = Callable[[list[torch.nn.Parameter]], Optimizer]
MAKERS: dict[str, tuple[bool, Make]] = {
    "SparseAdam": (True, SparseAdam),
    "Adam": (False, Adam),
    "AdamW, amsgrad": (False, partial(AdamW, amsgrad=True)),
    "SGD, momentum": (False, partial(SGD, lr=0.1, momentum=0.9)),
}


def training_with(make: Make, *, sparse: bool) -> Training:
    """The recommender, its tables trained by what `make` makes."""
    seed_everything(1)
    model = Recommender(sparse=sparse)
    model.users = torch.nn.Embedding(4_000, DIM, sparse=sparse)  # large against a sample of it
    tables = [*model.users.parameters(), *model.items.parameters()]
    dense = [*model.norm.parameters(), *model.top.parameters()]
    return Training(model, [make(tables), Adagrad(dense)], Batches(1))


def bounds_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "staged checkpoints take at most" in text]


def staged_bytes(place: Place, ckpt: Checkpointer) -> int:
    """Bytes of a checkpoint that is cut now, in its slot."""
    before = len(StagedRun(place.run_directory).staged_jobs())
    assert ckpt.checkpoint()
    until(lambda: len(StagedRun(place.run_directory).staged_jobs()) > before)
    return job_files.read_job(StagedRun(place.run_directory).staged_jobs()[-1]).slot_bytes


@pytest.mark.filterwarnings("ignore:every checkpoint stores these tables as a whole")
@pytest.mark.parametrize("name", MAKERS)
def test_state_that_an_optimizer_makes_counts_from_the_step_after(
    name: str, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    sparse, make = MAKERS[name]
    training = training_with(make, sparse=sparse)
    settings: dict[str, Any] = {"reader": None, "jobs": SLOTS}
    ckpt = checkpointer(training, place, interval_batches=10**6, **settings)
    with caplog.at_level(logging.INFO, logger="recpoint"):
        ckpt.restore()
        before = ckpt.memory_bound_bytes
        train(training, ckpt, 1)
        bound = ckpt.memory_bound_bytes
        assert ckpt.host_memory_bound_bytes == bound > before
        first, again = bounds_told(caplog)
        assert f"at most {before} bytes" in first and f"at most {bound} bytes" in again
        train(training, ckpt, 3)
        taken = staged_bytes(place, ckpt)
    assert 0.8 * bound < SLOTS * taken <= bound  # what a sample takes less
    assert ckpt.memory_bound_bytes == pytest.approx(bound, rel=0.01)
    assert len(bounds_told(caplog)) == 2
    ckpt.close(final=False)


def test_a_later_life_knows_it_from_the_start(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = training_with(SparseAdam, sparse=True)
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
        bound = ckpt.memory_bound_bytes
    training = training_with(SparseAdam, sparse=True)
    with checkpointer(training, place) as again:
        with caplog.at_level(logging.INFO, logger="recpoint"):
            again.restore()
            train(training, again, 1)
        assert again.memory_bound_bytes == pytest.approx(bound, rel=0.01)
        assert len(bounds_told(caplog)) == 1
        again.close(final=False)


def test_what_a_cut_takes_more_counts_as_well(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader's state is not asked for outside a cut, and no optimizer announces what it holds."""
    training = training_with(partial(SGD, lr=0.1), sparse=True)
    state = training.reader.state_dict
    training.reader.state_dict = lambda: state() | {"seen": bytes(100_000)}  # type: ignore[method-assign]
    ckpt = checkpointer(training, place, interval_batches=10**6)
    with caplog.at_level(logging.INFO, logger="recpoint"):
        ckpt.restore()
        train(training, ckpt, 1)
        before = ckpt.memory_bound_bytes
        taken = staged_bytes(place, ckpt)
    assert before < taken <= ckpt.memory_bound_bytes == ckpt.host_memory_bound_bytes
    assert f"at most {ckpt.memory_bound_bytes} bytes" in bounds_told(caplog)[-1]
    ckpt.close(final=False)


def test_a_slot_has_no_room_for_what_was_large_once(place: Place) -> None:
    """Such room is in no bound, and where there is none of it, checkpoints that fit would fail."""
    training = training_with(partial(SGD, lr=0.1), sparse=True)
    state, seen = training.reader.state_dict, {"seen": b""}
    training.reader.state_dict = lambda: state() | seen  # type: ignore[method-assign]
    ckpt = checkpointer(training, place, interval_batches=1, policy=Consecutive(full_every=2))
    ckpt.restore()
    with place.agent():
        for more in (0, 60_000, 0, 0):
            seen = {"seen": bytes(more)}
            train(training, ckpt, 1)
            until(lambda: ckpt.stats.committed == ckpt.batches_done)
            (slot,) = StagedRun(place.run_directory).slots_directory.iterdir()
            assert slot.stat().st_size <= ckpt.memory_bound_bytes
        ckpt.close(final=False)


def test_the_first_cut_finds_room_for_what_the_bound_did_not_count(place: Place) -> None:
    """To extend a slot in the stall maps all of it anew."""
    training = training_with(partial(SGD, lr=0.1), sparse=True)
    ckpt = checkpointer(training, place, interval_batches=10**6)
    ckpt.restore()
    slot = pipeline_of(ckpt)._area.free_slot(set())
    mapped, bound = slot.data, ckpt.memory_bound_bytes
    train(training, ckpt, 3)
    assert staged_bytes(place, ckpt) <= bound == ckpt.memory_bound_bytes
    assert slot.data is mapped and slot.path.stat().st_size <= bound
    ckpt.close(final=False)


def test_a_state_that_cannot_be_measured_does_not_stop_training(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    class Extra:
        broken = False

        def state_dict(self) -> dict[str, Any]:
            if self.broken:
                raise ValueError("no state today")
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    training, extra = training_with(SparseAdam, sparse=True), Extra()
    ckpt = checkpointer(training, place, interval_batches=10**6, extras={"one": extra})
    ckpt.restore()
    before = ckpt.memory_bound_bytes
    extra.broken = True
    train(training, ckpt, 2)
    assert ckpt.memory_bound_bytes == before and ckpt.stats.failed == 0
    assert [text for text in caplog.messages if "no state today" in text] == caplog.messages[-1:]
    extra.broken = False
    taken = staged_bytes(place, ckpt)
    assert before < taken <= ckpt.memory_bound_bytes
    ckpt.close(final=False)
