"""A loss is measured in loops that call `step`, read ahead or drive a pipeline; all train alike."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from recpoint import Checkpointer, Loss, Options, ResumableLoader, Staging
from recpoint.errors import SettingsError
from tests.training_builder import Place, seed_everything
from tests.unit.trainer_plugin.test_loss_bound import Batch, Ranker, count_seconds, loss_of, meter
from tests.unit.trainer_plugin.test_loss_in_loops import BATCHES, ClickData

AHEAD = 2


class MeasuredJob:
    """A model in training, which notes the batches that are measured.

    Args:
        place: of the run and the staging area.
        measured: whether a loss is measured.
        reader: "counted", "plain" or none.
    """

    def __init__(self, place: Place, measured: bool, *, reader: str = "counted", **options: Any):
        seed_everything(1)
        self.model = Ranker()
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        self.measured: list[int] = []
        self.trained: list[int] = []
        loader = DataLoader(ClickData(), batch_size=None)
        counted = ResumableLoader(loader) if reader == "counted" else None
        self.reader: Any = loader if counted is None else counted
        loss = Loss(increase=1e-3, of=self._loss, share=0.5)
        self.ckpt = Checkpointer(
            self.model,
            self.optimizer,
            run=f"{place.run}-{measured}",
            reader=counted,
            interval_batches=100,
            bits=loss if measured else "lossless",
            staging=Staging(directory=place.staging, jobs=3),
            options=Options(handle_sigterm=False, announce=False, on_error="raise", **options),
        )
        if measured:
            count_seconds(self.ckpt)
        self.ckpt.restore()

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        self.measured.append(_number(batch))
        return loss_of(model, batch)

    def note_looks(self) -> list[int]:
        """Return a list that gets the number of each batch that the meter is offered."""
        numbers: list[int] = []
        own_meter = meter(self.ckpt)
        look = own_meter.look

        def looked(batch: Batch) -> None:
            assert _number(batch) == len(self.trained)  # the first that is not trained
            numbers.append(_number(batch))
            look(batch)

        own_meter.look = looked  # type: ignore[method-assign]
        return numbers

    def train(self, batch: Batch) -> None:
        self.trained.append(_number(batch))
        self.optimizer.zero_grad()
        loss_of(self.model, batch).backward()
        self.optimizer.step()

    def end(self) -> list[Tensor]:
        self.ckpt.close(final=False)
        states = self.optimizer.state_dict()["state"].values()
        sums = [state["sum"] for state in states]
        return [*self.model.state_dict().values(), *sums, torch.get_rng_state()]


def _number(batch: Batch) -> int:
    """Return the number of a batch in the data."""
    numbers = [number for number in range(BATCHES) if torch.equal(ClickData()[number][0], batch[0])]
    return numbers[0]


def plain_steps(job: MeasuredJob) -> None:
    for batch in job.reader:
        job.ckpt.measure(batch)
        job.train(batch)
        job.ckpt.step()


def accumulated_steps(job: MeasuredJob) -> None:
    for number, batch in enumerate(job.reader):
        job.ckpt.measure(batch)
        job.trained.append(_number(batch))
        loss_of(job.model, batch).backward()
        if number % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.ckpt.step()


def steps_measured_twice(job: MeasuredJob) -> None:
    for batch in job.reader:
        for _ in range(2):
            job.ckpt.measure(batch)
        job.train(batch)
        job.ckpt.step()


def steps_measured_in_inference(job: MeasuredJob) -> None:
    for batch in job.reader:
        with torch.inference_mode():
            job.ckpt.measure(batch)
        job.train(batch)
        job.ckpt.step()


def steps_under_autocast(job: MeasuredJob) -> None:
    for batch in job.reader:
        with torch.autocast("cpu", torch.bfloat16):
            job.ckpt.measure(batch)
            job.train(batch)
        job.ckpt.step()


def steps_ahead(job: MeasuredJob) -> None:
    for batch in _ahead(iter(job.reader)):
        job.ckpt.measure(batch)
        job.train(batch)
        job.ckpt.step()


def batches_ahead(job: MeasuredJob) -> None:
    for batch in _ahead(job.ckpt.batches(epochs=1)):
        job.train(batch)


def _ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield batches, and hold some that come later."""
    held = deque(itertools.islice(batches, AHEAD))
    for batch in batches:
        held.append(batch)
        yield held.popleft()
    yield from held


class OwnPipeline:
    """Trains the oldest of the batches that it holds, as a train pipeline does."""

    def __init__(self, job: MeasuredJob) -> None:
        self._job = job
        self._held: deque[Batch] = deque()

    def progress(self, batches: Iterator[Batch]) -> None:
        self._held += itertools.islice(batches, AHEAD + 1 - len(self._held))
        if not self._held:
            raise StopIteration
        self._job.train(self._held.popleft())


def pipelined(job: MeasuredJob) -> None:
    pipeline = job.ckpt.pipelined(OwnPipeline(job))
    batches = job.ckpt.batches(epochs=1)
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            break


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        (plain_steps, {}),
        (accumulated_steps, {}),
        (steps_measured_twice, {}),
        (steps_measured_in_inference, {}),
        (steps_under_autocast, {}),
        (steps_ahead, {"in_flight": AHEAD}),
        (batches_ahead, {"in_flight": AHEAD}),
        (pipelined, {}),
    ],
)
def test_a_loop_trains_the_same_and_measures_batches_that_it_trains_next(
    place: Place, loop: Callable[[MeasuredJob], None], options: dict[str, Any]
) -> None:
    ends = []
    for measured in (False, True):
        job = MeasuredJob(place, measured, **options)
        next_numbers: list[int] = []
        if measured:
            next_numbers = job.note_looks()
        loop(job)
        assert job.trained == list(range(BATCHES))
        # The last batches of a loop that reads ahead are counted at the end.
        assert job.ckpt.batches_done >= BATCHES - AHEAD
        figures = job.ckpt.stats.loss
        assert (figures is None) is not measured
        if figures is not None:
            assert figures.error is None and figures.batches >= 3
            assert set(job.measured) <= set(next_numbers)
            assert next_numbers == sorted(set(next_numbers)) and len(next_numbers) >= BATCHES - 3
        ends.append(job.end())
    assert all(torch.equal(plain, measured) for plain, measured in zip(*ends, strict=True))


def test_a_batch_that_is_measured_twice_counts_once(place: Place) -> None:
    job = MeasuredJob(place, True)
    next_numbers = job.note_looks()
    steps_measured_twice(job)
    assert next_numbers == list(range(BATCHES))
    job.end()


def refused(call: Callable[[], None]) -> str:
    with pytest.raises(SettingsError, match=r"measure\(\)") as caught:
        call()
    assert "checkpoints.measure(batch)" in str(caught.value)
    return str(caught.value)


def test_a_wrong_moment_is_refused(place: Place) -> None:
    job = MeasuredJob(place, True)
    batches = iter(job.reader)
    batch = next(batches)
    loss = loss_of(job.model, batch)
    assert "whose backward pass has not come" in refused(lambda: job.ckpt.measure(batch))
    loss.backward()
    job.ckpt.measure(batch)  # the model has not learned from it yet
    job.optimizer.step()
    assert "counted by step()" in refused(lambda: job.ckpt.measure(batch))
    job.ckpt.step()
    assert "no other was taken since" in refused(lambda: job.ckpt.measure(batch))
    job.ckpt.measure(next(batches))
    errors: list[str] = []
    thread = threading.Thread(
        target=lambda: errors.append(refused(lambda: job.ckpt.measure(batch)))
    )
    thread.start()
    thread.join()
    assert "another thread" in errors[0]
    job.end()


def test_a_call_inside_a_loop_that_measures_itself_is_refused(place: Place) -> None:
    job = MeasuredJob(place, True)
    for batch in job.ckpt.batches(total=1):
        with pytest.raises(SettingsError, match="has its batches measured itself"):
            job.ckpt.measure(batch)
        job.train(batch)
    job.end()


def test_before_the_start_no_batch_is_measured(place: Place) -> None:
    job = MeasuredJob(place, True)
    job.end()
    with pytest.raises(SettingsError, match="closed"):
        job.ckpt.measure(ClickData()[0])


def test_a_loop_that_never_measures_keeps_8_bits_and_is_told_the_call(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    job = MeasuredJob(place, True, reader="plain")
    with caplog.at_level(logging.WARNING, logger="recpoint"):
        for batch in job.reader:
            job.train(batch)
            job.ckpt.step()
    warnings = [record.getMessage() for record in caplog.records if "measured" in record.msg]
    assert len(warnings) == 1 and "call checkpoints.measure(batch)" in warnings[0]
    own = meter(job.ckpt)
    own._search.price = 1.0  # as after a restart
    assert all(own.allocation(live) is None and not own.is_exact(live) for live in own._live())
    assert own._rounded == own._priced
    job.end()


def test_without_a_loss_the_call_does_nothing(place: Place) -> None:
    job = MeasuredJob(place, False, reader="plain")
    for batch in itertools.islice(job.reader, 2):
        job.ckpt.measure(batch)
        job.train(batch)
        job.ckpt.step()
    assert job.ckpt.stats.loss is None
    job.end()


def test_an_error_of_the_first_measured_batch_ends_training(place: Place) -> None:
    job = MeasuredJob(place, True, reader="plain")
    with pytest.raises(IndexError):
        job.ckpt.measure((torch.zeros(1), torch.zeros(1)))
    job.end()


def test_where_passes_exchange_with_other_ranks_any_error_ends_training(place: Place) -> None:
    """Another rank would wait for this one in the next measured batch."""
    job = MeasuredJob(place, True, reader="plain")
    own_meter = meter(job.ckpt)
    own_meter._must_raise = True  # as on several ranks with sharded tables
    batches = iter(job.reader)
    job.ckpt.measure(next(batches))
    with pytest.raises(IndexError):
        for _ in range(BATCHES):
            job.ckpt.measure((torch.zeros(1), torch.zeros(1)))
    assert job.ckpt.stats.loss is not None and job.ckpt.stats.loss.error is None
    job.end()
