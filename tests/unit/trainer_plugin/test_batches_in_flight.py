"""Loops that take batches before they train them: no batch is trained twice, and none is left out.

Each loop is played whole, and again with a stop and a restart in another process's state. Both must
end with the same bits, and must have trained the same batches in the same order.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from recpoint import Checkpointer, Lookahead, ResumableLoader
from recpoint.errors import SettingsError
from tests.training_builder import (
    BATCH,
    ROWS,
    Batches,
    Place,
    Training,
    checkpointer,
    everything,
    seed_everything,
    simple_training,
)

BATCHES_AN_EPOCH, EPOCHS = 5, 3

Loop = Callable[[Training, Checkpointer, Any, int | None], list[int]]


class Samples(Dataset[tuple[Tensor, Tensor, Tensor, int]]):
    """Samples with noise from every global generator."""

    def __len__(self) -> int:
        return BATCHES_AN_EPOCH * BATCH

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor, int]:
        own = np.random.default_rng(number)
        noise = random.random() + float(np.random.random()) + torch.rand(())
        users = torch.tensor(int(own.integers(0, ROWS)))
        items = torch.from_numpy(own.integers(0, ROWS // 2, 3))
        return users, items, torch.tensor(own.random(), dtype=torch.float32) + noise, number


class Positioned(DataLoader[Any]):
    """A loader with a position of its own: the samples of an epoch are drawn when it begins."""

    def __init__(self) -> None:
        super().__init__(Samples(), batch_size=BATCH)
        self.order: list[int] = []

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if not self.order:
            self.order = torch.randperm(len(self.dataset)).tolist()  # type: ignore[arg-type]
        while self.order:
            numbers, self.order = self.order[:BATCH], self.order[BATCH:]
            yield torch.utils.data.default_collate([self.dataset[n] for n in numbers])

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


def shuffled() -> ResumableLoader:
    return ResumableLoader(DataLoader(Samples(), batch_size=BATCH, shuffle=True))


def undrawn() -> ResumableLoader:
    """A loader that draws from no global generator, so that a thread may read it."""
    drawn = map(Samples().__getitem__, range(len(Samples())))
    samples: Any = [(users, items, torch.tensor(0.5), n) for users, items, _, n in drawn]
    generator = torch.Generator().manual_seed(3)
    return ResumableLoader(DataLoader(samples, batch_size=BATCH, shuffle=True, generator=generator))


def positioned() -> ResumableLoader:
    return ResumableLoader(Positioned())


def looked_ahead() -> Lookahead:
    return Lookahead(shuffled(), ids=lambda batch: {"users": batch[0]}, window=3)


def forward(training: Training, batch: Any) -> Tensor:
    for optimizer in training.optimizers:
        optimizer.zero_grad()
    return nn.functional.mse_loss(training.model(batch[0], batch[1]), batch[2])


def train(training: Training, batch: Any) -> int:
    forward(training, batch).backward()
    for optimizer in training.optimizers:
        optimizer.step()
    return int(batch[3].sum())


class Prefetcher:
    """Takes `depth` batches before it hands out the first, as a prefetcher onto a GPU does."""

    def __init__(self, batches: Iterable[Any], depth: int) -> None:
        self._batches = iter(batches)
        self._depth = depth

    def __iter__(self) -> Iterator[Any]:
        held: deque[Any] = deque()
        for batch in self._batches:
            held.append(batch)
            if len(held) > self._depth:
                yield held.popleft()
        yield from held


class Pipeline:
    """A pipeline like TorchRec's, but for its name: `progress` trains one batch."""

    def __init__(self, training: Training, *, mid_step: bool = False) -> None:
        self._training = training
        self._mid_step = mid_step
        self.held: deque[Any] = deque()
        self.trained: list[int] = []

    def progress(self, batches: Iterator[Any]) -> int:
        while len(self.held) < 3:
            batch = next(batches, None)
            if batch is None:
                break
            self.held.append(batch)
        if not self.held:
            raise StopIteration
        batch = self.held.popleft()
        loss = forward(self._training, batch)
        if self._mid_step:
            following = next(batches, None)
            self.held.extend([] if following is None else [following])
        loss.backward()
        self._training.optimizers[0].step()
        self.trained.append(int(batch[3].sum()))
        return self.trained[-1]


def stopped(trained: Iterable[int], stop_after: int | None) -> list[int]:
    """Return what is trained until the stop."""
    found: list[int] = []
    for number in trained:
        found.append(number)
        if len(found) == stop_after:
            break
    return found


def plain(training: Training, ckpt: Checkpointer, _: Any, stop: int | None) -> list[int]:
    return stopped((train(training, b) for b in ckpt.batches(epochs=EPOCHS)), stop)


def prefetched(training: Training, ckpt: Checkpointer, _: Any, stop: int | None) -> list[int]:
    batches = Prefetcher(ckpt.batches(epochs=EPOCHS), 2)
    return stopped((train(training, b) for b in batches), stop)


def prefetched_inside(training: Training, ckpt: Checkpointer, reader: Any, stop: int | None) -> Any:
    """The prefetcher lies between the reader and the loop over `batches`."""

    class Inside:
        def __iter__(self) -> Iterator[Any]:
            return iter(Prefetcher(reader, 2))

    batches = ckpt.batches(Inside(), epochs=EPOCHS)
    return stopped((train(training, b) for b in batches), stop)


def _epochs_left(ckpt: Checkpointer) -> int:
    return -(-(EPOCHS * BATCHES_AN_EPOCH - ckpt.batches_done) // BATCHES_AN_EPOCH)


def stepped(training: Training, ckpt: Checkpointer, reader: Any, stop: int | None) -> list[int]:
    def trained() -> Iterator[int]:
        for _ in range(_epochs_left(ckpt)):
            for batch in Prefetcher(reader, 2):
                number = train(training, batch)
                ckpt.step()
                yield number

    return stopped(trained(), stop)


def threaded(training: Training, ckpt: Checkpointer, reader: Any, stop: int | None) -> list[int]:
    """A thread fills a queue of two batches."""
    held: queue.Queue[Any] = queue.Queue(maxsize=2)

    def fill(epochs: int) -> None:
        for _ in range(epochs):
            for batch in reader:
                held.put(batch)
        held.put(None)

    threading.Thread(target=fill, args=(_epochs_left(ckpt),), daemon=True).start()

    def trained() -> Iterator[int]:
        while (batch := held.get()) is not None:
            number = train(training, batch)
            ckpt.step()
            yield number

    return stopped(trained(), stop)


def pipelined(training: Training, ckpt: Checkpointer, reader: Any, stop: int | None) -> list[int]:
    pipeline: Any = ckpt.pipelined(Pipeline(training, mid_step=True))
    batches = ckpt.batches(epochs=EPOCHS)
    while len(pipeline.trained) != stop:
        try:
            pipeline.progress(batches)
        except StopIteration:
            break
    found: list[int] = pipeline.trained
    return found


def pipelined_reader(training: Training, ckpt: Checkpointer, reader: Any, stop: int | None) -> Any:
    pipeline: Any = ckpt.pipelined(Pipeline(training))
    for _ in range(_epochs_left(ckpt)):
        batches = iter(reader)
        while len(pipeline.trained) != stop:
            try:
                pipeline.progress(batches)
            except StopIteration:
                break
    return pipeline.trained


@dataclass
class End:
    trained: list[int]
    state: list[object]
    committed: int


def life(
    loop: Loop,
    place: Place,
    make_reader: Callable[[], Any],
    seed: int,
    *,
    stop: int | None = None,
    change: Callable[[Training], None] = lambda training: None,
    **settings: Any,
) -> End:
    training = simple_training(seed)
    change(training)
    training.reader = Batches(0)  # not the reader that is checkpointed
    reader = make_reader()
    settings = {"when_busy": "wait", "jobs": 2, **settings}
    with place.agent(), checkpointer(training, place, reader=reader, **settings) as ckpt:
        ckpt.restore()
        trained = loop(training, ckpt, reader, stop)
        if stop is not None:
            ckpt.close(final=False)
    return End(trained, everything(training), ckpt.stats.committed)


def check(
    loop: Loop,
    place: Place,
    make_reader: Callable[[], Any] = shuffled,
    stop: int = 7,
    **settings: Any,
) -> None:
    run = place.run
    place.run = f"{run}-whole"
    whole = life(loop, place, make_reader, 1, **settings)
    assert len(whole.trained) == EPOCHS * BATCHES_AN_EPOCH
    place.run = f"{run}-stopped"
    first = life(loop, place, make_reader, 1, stop=stop, **settings)
    assert first.trained == whole.trained[:stop]
    second = life(loop, place, make_reader, 2, **settings)
    assert second.trained and second.trained == whole.trained[-len(second.trained) :]
    assert len(second.trained) <= EPOCHS * BATCHES_AN_EPOCH - stop + 2  # one interval is lost
    assert second.state == whole.state


@pytest.mark.parametrize(
    ("loop", "make_reader", "settings"),
    [
        (plain, shuffled, {"in_flight": 4}),
        (prefetched, shuffled, {"in_flight": 2}),
        pytest.param(prefetched, positioned, {"in_flight": 2}, marks=pytest.mark.nightly("loops")),
        (prefetched, looked_ahead, {"in_flight": 2}),
        (prefetched_inside, shuffled, {"in_flight": 2}),
        (stepped, shuffled, {"in_flight": 2}),
        pytest.param(stepped, looked_ahead, {"in_flight": 2}, marks=pytest.mark.nightly("loops")),
        (threaded, undrawn, {"in_flight": 4}),
        (pipelined, shuffled, {}),
        pytest.param(pipelined_reader, positioned, {}, marks=pytest.mark.nightly("loops")),
    ],
)
def test_a_stopped_loop_ends_as_a_whole_one(
    loop: Loop, make_reader: Callable[[], Any], settings: dict[str, Any], place: Place
) -> None:
    """The stop lies in the second epoch; whole runs have batches of two epochs in flight."""
    check(loop, place, make_reader, **settings)


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(4, marks=pytest.mark.nightly("loops")),
        5,
        pytest.param(6, marks=pytest.mark.nightly("loops")),
    ],
)
def test_a_stop_at_the_end_of_an_epoch(stop: int, place: Place) -> None:
    check(prefetched, place, stop=stop, in_flight=2, interval_batches=1)


def accumulated(training: Training, ckpt: Checkpointer, _: Any, stop: int | None) -> list[int]:
    """Every third batch has a step; a checkpoint that is due between waits for it."""

    def trained() -> Iterator[int]:
        for number, batch in enumerate(ckpt.batches(epochs=EPOCHS), ckpt.batches_done + 1):
            scores = training.model.__call__(batch[0], batch[1])
            nn.functional.mse_loss(scores, batch[2]).backward()
            if number % 3 == 0:
                training.optimizers[0].step()
                training.optimizers[0].zero_grad()
            yield int(batch[3].sum())

    return stopped(trained(), stop)


def overflowing(training: Training, ckpt: Checkpointer, _: Any, stop: int | None) -> list[int]:
    """The scaler leaves out the steps of two batches, whose losses overflow."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scaler.load_state_dict(SCALER or scaler.state_dict())

    def trained() -> Iterator[int]:
        for number, batch in enumerate(ckpt.batches(epochs=EPOCHS), ckpt.batches_done):
            loss = nn.functional.mse_loss(training.model(batch[0], batch[1]), batch[2])
            scaler.scale(loss * (torch.inf if number in (0, 5) else 1)).backward()
            scaler.step(training.optimizers[0])
            scaler.update()
            training.optimizers[0].zero_grad()
            SCALER.update(scaler.state_dict())
            yield int(batch[3].sum())

    return stopped(trained(), stop)


#: The state of the scaler of `overflowing`, which is an extra of its Checkpointer.
SCALER: dict[str, Any] = {}


class ScalerState:
    def state_dict(self) -> dict[str, Any]:
        return dict(SCALER)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        SCALER.update(state)


def adversarial(training: Training, ckpt: Checkpointer, _: Any, stop: int | None) -> list[int]:
    """Two optimizers step after passes of their own, the second for every other batch."""
    tables = [training.model.users.weight, training.model.items.weight]
    dense = [p for p in training.model.parameters() if not any(p is table for table in tables)]
    optimizers = training.optimizers
    assert [len(o.param_groups[0]["params"]) for o in optimizers] == [len(tables), len(dense)]

    def trained() -> Iterator[int]:
        for number, batch in enumerate(ckpt.batches(epochs=EPOCHS), ckpt.batches_done):
            for optimizer in optimizers[: 1 + number % 2]:
                forward(training, batch).backward()
                optimizer.step()
            yield int(batch[3].sum())

    return stopped(trained(), stop)


def two_optimizers(training: Training) -> None:
    tables = [training.model.users.weight, training.model.items.weight]
    dense = [p for p in training.model.parameters() if not any(p is table for table in tables)]
    training.optimizers = [torch.optim.SGD(tables, lr=0.1), torch.optim.SGD(dense, lr=0.05)]


def unhooked(training: Training, ckpt: Checkpointer, _: Any, stop: int | None) -> list[int]:
    """Parameters change in place, by no optimizer of torch's; the model is called by its parts."""

    def trained() -> Iterator[int]:
        for batch in ckpt.batches(epochs=EPOCHS):
            training.model.zero_grad()
            scores = training.model.forward(batch[0], batch[1])
            nn.functional.mse_loss(scores, batch[2]).backward()
            with torch.no_grad():
                for parameter in training.model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)
            yield int(batch[3].sum())

    return stopped(trained(), stop)


def test_steps_without_a_hook_are_seen_by_what_they_change(place: Place) -> None:
    check(unhooked, place)


def test_an_end_waits_not_for_ever_for_a_step(place: Place) -> None:
    """Every step is left out, as while each loss overflows, when SIGTERM comes."""
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        training = simple_training()
        settings = {"reader": shuffled(), "interval_batches": 1000, "handle_sigterm": True}
        with place.agent(), checkpointer(training, place, **settings) as ckpt:
            ckpt.restore()
            for number, batch in enumerate(ckpt.batches(epochs=9)):
                if received:
                    break
                forward(training, batch).backward()
                if number < 2:
                    training.optimizers[0].step()
                if number == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] and ckpt.stats.committed
    finally:
        signal.signal(signal.SIGTERM, before)


def accumulated_in_steps(
    training: Training, ckpt: Checkpointer, reader: Any, stop: int | None
) -> list[int]:
    """Every third batch has an optimizer step, and each has a call of step()."""

    def trained() -> Iterator[int]:
        while ckpt.batches_done < EPOCHS * BATCHES_AN_EPOCH:
            for batch in reader:
                scores = training.model(batch[0], batch[1])
                nn.functional.mse_loss(scores, batch[2]).backward()
                if (ckpt.batches_done + 1) % 3 == 0:
                    training.optimizers[0].step()
                    training.optimizers[0].zero_grad()
                ckpt.step()
                yield int(batch[3].sum())

    return stopped(trained(), stop)


@pytest.mark.parametrize("interval_batches", [2, 4])
def test_a_loop_with_step_waits_for_gradients_too(interval_batches: int, place: Place) -> None:
    """A checkpoint that is due before the first optimizer step waits as well."""
    check(accumulated_in_steps, place, stop=8, interval_batches=interval_batches)


@pytest.mark.parametrize("is_called_by_its_parts", [False, True])
def test_gradients_that_wait_for_a_step_are_in_no_checkpoint(
    is_called_by_its_parts: bool, place: Place
) -> None:
    """A model that is called by its parts shows no pass, but its gradients."""

    def change(training: Training) -> None:
        if is_called_by_its_parts:
            training.model.__call__ = training.model.forward

    check(accumulated, place, stop=8, change=change)


def test_a_batch_whose_step_is_left_out_counts(place: Place) -> None:
    SCALER.clear()
    place.run += "-whole"
    whole = life(overflowing, place, shuffled, 1, extras={"scaler": ScalerState()})
    assert SCALER["scale"] != 2.0**16
    SCALER.clear()
    place.run += "-stopped"
    life(overflowing, place, shuffled, 1, stop=7, extras={"scaler": ScalerState()})
    SCALER.clear()
    second = life(overflowing, place, shuffled, 2, extras={"scaler": ScalerState()})
    assert second.trained == whole.trained[-len(second.trained) :]
    assert second.state == whole.state


def test_no_checkpoint_is_cut_between_the_steps_of_one_batch(place: Place) -> None:
    training = simple_training()
    two_optimizers(training)
    with place.agent(), checkpointer(training, place, reader=shuffled(), when_busy="wait") as ckpt:
        ckpt.restore()
        for number, batch in enumerate(ckpt.batches(total=3)):
            for optimizer in training.optimizers:
                is_cut = bool(number) and ckpt.checkpoint()
                assert not is_cut
                forward(training, batch).backward()
                optimizer.step()
            assert ckpt.checkpoint()


def test_a_loop_that_trains_blocks_of_batches_is_refused(place: Place) -> None:
    def blocks(training: Training, ckpt: Checkpointer, _: Any) -> None:
        batches = ckpt.batches(total=4)
        while block := list(islice(batches, 4)):
            for batch in block:
                train(training, batch)

    assert "4 optimizer steps since it took 4 batches" in _refusal(blocks, place, in_flight=4)


def test_a_loop_that_reads_less_far_ahead_than_it_says_is_warned(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have left out the first batch, which would count as the one that was trained."""
    life(plain, place, shuffled, 1, stop=3, in_flight=4)
    assert caplog.text.count("pass Options(in_flight=0)") == 1
    caplog.clear()
    life(prefetched, place, shuffled, 1, stop=3, in_flight=2)
    assert "Options(in_flight=" not in caplog.text


@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_of_an_optimizer_that_steps_less_often_are_warned_of(
    accumulates: bool, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients of its last step say nothing: loops keep them until the next one."""
    training = simple_training()
    two_optimizers(training)
    often, seldom = training.optimizers
    with place.agent(), checkpointer(training, place, reader=shuffled(), jobs=2) as ckpt:
        ckpt.restore()
        for number, batch in enumerate(ckpt.batches(total=6)):
            is_due = number % 3 == 1
            if is_due and not accumulates:
                seldom.zero_grad()
            for parameter in seldom.param_groups[0]["params"]:
                parameter.requires_grad_(accumulates or is_due)
            often.zero_grad()
            loss = nn.functional.mse_loss(training.model(batch[0], batch[1]), batch[2])
            loss.backward()
            often.step()
            if is_due:
                seldom.step()
            if is_due and accumulates:
                seldom.zero_grad()
    assert caplog.text.count("has not stepped for a batch") == int(accumulates)


def test_several_optimizers_step_as_they_like(place: Place) -> None:
    check(adversarial, place, change=two_optimizers)


def evaluated(training: Training, ckpt: Checkpointer, _: Any, stop: int | None) -> list[int]:
    """An evaluation in mid-epoch takes batches of its own."""

    def trained() -> Iterator[int]:
        for batch in ckpt.batches(epochs=EPOCHS):
            number = train(training, batch)
            training.model.eval()
            for users, items, _target, _number in DataLoader(Samples(), batch_size=BATCH):
                training.model(users, items).sum().backward()
            training.model.train()
            yield number

    return stopped(trained(), stop)


def test_an_evaluation_in_mid_epoch_changes_nothing(place: Place) -> None:
    check(evaluated, place)


def _refusal(
    loop: Callable[[Training, Checkpointer, Any], object],
    place: Place,
    make_reader: Callable[[], Any] = shuffled,
    **settings: Any,
) -> str:
    training = simple_training()
    reader = make_reader()
    settings = {"interval_batches": 1000, **settings}
    with checkpointer(training, place, reader=reader, **settings) as ckpt:
        ckpt.restore()
        with pytest.raises(SettingsError) as caught:
            loop(training, ckpt, reader)
        ckpt.close(final=False)
    return str(caught.value)


@pytest.mark.parametrize("make_reader", [shuffled, looked_ahead])
def test_a_loop_that_reads_ahead_unsaid_is_refused_at_its_second_batch(
    make_reader: Callable[[], Any], place: Place
) -> None:
    said = _refusal(lambda t, c, r: prefetched(t, c, r, None), place, make_reader)
    assert "before anything was trained" in said and "Options(in_flight=N)" in said
    assert _refusal(lambda t, c, r: stepped(t, c, r, None), place, make_reader) == said
    assert _refusal(lambda t, c, r: prefetched_inside(t, c, r, None), place, make_reader) == said


def test_a_batch_is_left_out_after_the_first_or_as_the_setting_says(place: Place) -> None:
    training = simple_training()
    with checkpointer(training, place, reader=shuffled(), interval_batches=1000) as ckpt:
        ckpt.restore()
        for number, batch in enumerate(ckpt.batches(total=4)):
            if number != 2:
                train(training, batch)
        assert ckpt.batches_done == 4
        ckpt.close(final=False)
    with checkpointer(training, place, reader=shuffled(), in_flight=0) as ckpt:
        ckpt.restore(fresh=True)
        assert len(list(ckpt.batches(total=4))) == 4 == ckpt.batches_done
        ckpt.close(final=False)


def test_a_batch_left_out_of_those_in_flight_is_refused(place: Place) -> None:
    def leaving_out(training: Training, ckpt: Checkpointer, _: Any) -> None:
        for number, batch in enumerate(Prefetcher(ckpt.batches(epochs=1), 1)):
            if number != 1:
                train(training, batch)

    assert "has left a batch out" in _refusal(leaving_out, place, in_flight=3)


def test_more_batches_than_the_setting_says_are_refused(place: Place) -> None:
    said = _refusal(lambda t, c, r: prefetched(t, c, r, None), place, in_flight=1)
    assert "at most 1 beside the one in training" in said


def test_batches_asked_for_in_mid_step_are_refused(place: Place) -> None:
    def mid_step(training: Training, ckpt: Checkpointer, _: Any) -> None:
        pipeline, batches = Pipeline(training, mid_step=True), ckpt.batches(epochs=2)
        while True:
            pipeline.progress(batches)

    assert "in the middle of a step" in _refusal(mid_step, place, in_flight=4)


def test_a_thread_that_takes_batches_is_refused_unless_the_setting_says_so(place: Place) -> None:
    def in_reader(training: Training, ckpt: Checkpointer, reader: Any) -> None:
        batches = iter(reader)
        with ThreadPoolExecutor(1) as filler:
            while True:
                train(training, filler.submit(next, batches).result())
                ckpt.step()

    assert "a thread that takes batches" in _refusal(in_reader, place)

    def in_loop(training: Training, ckpt: Checkpointer, _: Any) -> None:
        batches = ckpt.batches(epochs=1)
        train(training, next(batches))
        with ThreadPoolExecutor(1) as filler:
            filler.submit(next, batches).result()

    assert "take batches there from iter(reader)" in _refusal(in_loop, place)


def test_a_loop_with_step_that_begins_to_read_ahead_is_refused(place: Place) -> None:
    """Its first batches may be trained plainly. No checkpoint has the wrong position meanwhile."""
    stalls = []

    def bursts(training: Training, ckpt: Checkpointer, reader: Any) -> None:
        batches = iter(reader)
        for count in (1, 2):
            for batch in list(islice(batches, count)):
                train(training, batch)
                ckpt.step()
                stalls.append(len(ckpt.stats.stalls_ms))

    assert "a second call since the last batch" in _refusal(bursts, place, interval_batches=2)
    assert stalls == [0, 0]


def test_a_loop_with_step_may_leave_batches_out(place: Place) -> None:
    training, reader = simple_training(), shuffled()
    with place.agent(), checkpointer(training, place, reader=reader, when_busy="wait") as ckpt:
        ckpt.restore()
        stalls = []
        for number, batch in enumerate(reader):
            if number in (1, 3):
                continue
            train(training, batch)
            ckpt.step()
            stalls.append(len(ckpt.stats.stalls_ms))
    assert stalls == [0, 0, 1]  # due after two batches: whether one was left out shows later


def test_training_may_move_to_another_thread(place: Place) -> None:
    def moving(training: Training, ckpt: Checkpointer, reader: Any, _: int | None) -> list[int]:
        def epoch() -> list[int]:
            numbers = []
            for batch in reader:
                numbers.append(train(training, batch))
                ckpt.step()
            return numbers

        with ThreadPoolExecutor(1) as thread:
            return epoch() + thread.submit(epoch).result()

    assert len(life(moving, place, undrawn, 1).trained) == 2 * BATCHES_AN_EPOCH


def test_a_reader_that_keeps_no_positions_is_refused(place: Place) -> None:
    said = _refusal(lambda t, c, r: c.pipelined(Pipeline(t)), place, lambda: Batches(1))
    assert said.startswith("reader: found a Batches") and "ResumableLoader" in said


@pytest.mark.parametrize("is_new", [False, True], ids=["same", "new"])
def test_a_new_pipeline_has_none_of_the_batches_of_the_one_before(
    is_new: bool, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The batches in flight would never be trained, and the run would end early, unsaid."""
    training = simple_training()
    with checkpointer(training, place, reader=undrawn(), interval_batches=1000) as ckpt:
        ckpt.restore()
        first, second = Pipeline(training), Pipeline(training)
        batches: Any = ckpt.batches(total=10)
        for _ in range(2):
            ckpt.pipelined(first).progress(batches)
        batches.close()
        pipeline: Any = ckpt.pipelined(second if is_new else first)
        batches = ckpt.batches(total=10)
        with suppress(StopIteration):
            while True:
                pipeline.progress(batches)
        assert ckpt.batches_done == 10
        ckpt.close(final=False)
    assert len(first.trained) + len(second.trained) == (8 if is_new else 10)
    dropped = [text for text in caplog.messages if "2 batches that the first one had taken" in text]
    assert len(dropped) == is_new


def test_step_is_not_called_beside_pipelined(place: Place) -> None:
    def both(training: Training, ckpt: Checkpointer, reader: Any) -> None:
        ckpt.pipelined(Pipeline(training)).progress(iter(reader))
        ckpt.step()

    assert "remove step() from the loop" in _refusal(both, place)


def test_no_checkpoint_is_cut_before_the_step_of_its_batch(place: Place) -> None:
    training = simple_training()
    settings = {"when_busy": "wait", "reader": shuffled()}
    with place.agent(), checkpointer(training, place, **settings) as ckpt:
        ckpt.restore()
        for batch in ckpt.batches(total=3):
            assert not ckpt.checkpoint()
            forward(training, batch).backward()
            assert not ckpt.checkpoint()
            training.optimizers[0].step()
            done = ckpt.batches_done
            assert ckpt.checkpoint() and ckpt.batches_done == done + 1
        assert ckpt.batches_done == 3


@pytest.mark.parametrize("steps_last", [True, False])
@pytest.mark.parametrize("calls_step", [True, False])
def test_an_end_warns_of_gradients_only_if_they_wait(
    steps_last: bool, calls_step: bool, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradients stay after their step, until the loop sets them to zero for the next batch."""
    training = simple_training()
    reader = shuffled()
    with place.agent(), checkpointer(training, place, reader=reader) as ckpt:
        ckpt.restore()
        for number, batch in enumerate(reader if calls_step else ckpt.batches(epochs=1), 1):
            forward(training, batch).backward()
            if steps_last or number < BATCHES_AN_EPOCH:
                training.optimizers[0].step()
            if calls_step:
                ckpt.step()
    assert ckpt.batches_done == BATCHES_AN_EPOCH
    assert ("gradients wait for an optimizer step" in caplog.text) is not steps_last


def test_a_step_without_training_has_its_checkpoint(place: Place) -> None:
    """A loop may call step() for a batch that it has left out."""
    training = simple_training()
    with place.agent(), checkpointer(training, place, when_busy="wait") as ckpt:
        ckpt.restore()
        training.batch()
        ckpt.step()
        ckpt.step()
        assert len(ckpt.stats.stalls_ms) == 1  # it is due after two batches
        ckpt.step()
        assert ckpt.checkpoint()


def test_a_loader_replays_what_was_in_flight_for_any_loop() -> None:
    """Batches are read with the generators that they were first read with, plainly or ahead."""
    seed_everything(5)
    reader = shuffled()
    reader.in_flight.read_ahead(threading.get_ident())
    batches = iter(reader)
    taken = []
    for _ in range(3):
        taken.append(next(batches)[2])
        torch.rand(3)  # the model draws between
    state = reader.state_dict()
    drawn = torch.rand(3)
    for gap in (0, 2):
        seed_everything(gap)
        again = shuffled()
        again.load_state_dict(state)
        found = [batch[2] for batch in Prefetcher(again, gap)][:3]
        assert all(torch.equal(one, other) for one, other in zip(found, taken, strict=True))
    again = shuffled()
    again.load_state_dict(state)
    next(iter(again))
    assert torch.equal(torch.rand(3), drawn)  # the model goes on with its own numbers
