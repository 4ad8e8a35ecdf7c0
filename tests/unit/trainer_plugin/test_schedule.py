"""When a checkpoint is due, and what the reader is told."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from recpoint import Checkpointer
from recpoint.trainer_plugin.pipeline import reader_pace
from recpoint.trainer_plugin.ranks.agreement import AgreedSchedule
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.schedule.schedule import (
    AutoInterval,
    BatchInterval,
    Schedule,
    SecondsInterval,
)
from tests.polling import until
from tests.running_parts import pipeline_of
from tests.training_builder import Place, Training, checkpointer, simple_training, train


def checkpoints(seconds: float, batch_seconds: list[float]) -> tuple[list[int], list[int]]:
    """Run the schedule against batches that take these times; (due batches, grants)."""
    return replay(SecondsInterval(seconds), batch_seconds)


def replay(schedule: Schedule, batch_seconds: list[float]) -> tuple[list[int], list[int]]:
    now = 100.0
    granted = left = schedule.restart(now)
    due, grants = [], [granted]
    for number, taken in enumerate(batch_seconds, start=1):
        now += taken
        left -= 1
        if left == 0:
            left = schedule.extend(now, batches=granted)
            if left == 0:
                due.append(number)
                left = schedule.restart(now)
            granted = left
            grants.append(granted)
    return due, grants


def test_batches_are_exact() -> None:
    schedule = BatchInterval(7)
    assert schedule.restart(0.0) == 7
    assert schedule.extend(1e9, batches=7) == 0
    assert schedule.due_seconds == math.inf


@pytest.mark.parametrize(("batches", "parts"), [(16, [2] * 8), (10, [2] * 5), (9, [2, 2, 2, 2, 1])])
def test_an_interval_of_batches_in_parts(batches: int, parts: list[int]) -> None:
    schedule = BatchInterval(batches)
    grants = [schedule.restart(0.0, in_parts=True)]
    while (more := schedule.extend(1e9, batches=grants[-1])) > 0:
        grants.append(more)
    assert grants == parts
    assert schedule.restart(1e9) == batches


def test_seconds_become_batches() -> None:
    due, grants = checkpoints(10.0, [0.5] * 100)
    assert due == [20, 40, 60, 80, 100]
    assert grants[:8] == [1, 2, 3, 3, 3, 3, 3, 2]  # one batch to measure, then eighths
    assert grants[8:15] == [3, 3, 3, 3, 3, 3, 2]


@pytest.mark.parametrize("batch_seconds", [0.001, 0.013, 0.1, 0.9, 3.0])
def test_steady_batches_need_few_decisions(batch_seconds: float) -> None:
    due, grants = checkpoints(100.0, [batch_seconds] * round(1_000 / batch_seconds))
    for before, after in zip([0, *due], due, strict=False):
        assert (after - before) * batch_seconds == pytest.approx(100.0, abs=batch_seconds)
    assert len(due) >= 9
    assert len(grants) <= 10 * (len(due) + 1) + math.log(100 / batch_seconds, 3)


@pytest.mark.parametrize(
    ("backlog", "quick", "slow", "seconds"), [(20, 0.01, 5.0, 10.0), (50, 0.002, 0.5, 1.0)]
)
def test_batches_become_slower(backlog: int, quick: float, slow: float, seconds: float) -> None:
    """A stream's backlog is read quickly, and then each batch takes as long as it takes."""
    taken = [quick] * backlog + [slow] * 50
    due, grants = checkpoints(seconds, taken)
    in_time = backlog + seconds / slow
    # Promised batches are kept to: no more than twice what was measured before them.
    assert in_time - 1 <= due[0] <= 3 * backlog
    assert [after - before for before, after in zip(due[1:], due[2:], strict=False)] == [
        round(seconds / slow)
    ] * (len(due) - 2)
    assert max(grants) <= 2 * backlog


def test_a_long_backlog_does_not_put_the_first_checkpoint_off_for_days() -> None:
    due, _ = checkpoints(300.0, [0.01] * 200 + [10.0] * 200)
    assert due[0] <= 600
    assert due[1] - due[0] == pytest.approx(30, abs=3)


def test_slower_batches_within_a_settled_run_are_late_by_one_part() -> None:
    taken = [0.01] * 4_510 + [1.0] * 500  # half of the fifth interval is over
    due, _ = checkpoints(10.0, taken)
    assert due[:4] == pytest.approx([1_000, 2_000, 3_000, 4_000], abs=1)
    assert 4_515 <= due[4] <= 4_510 + 125
    assert due[6] - due[5] == pytest.approx(10, abs=1)


def test_no_rank_decides_by_its_own_clock() -> None:
    schedule = AgreedSchedule(SecondsInterval(10.0), Ranks())
    due, grants = replay(schedule, [0.5] * 100)
    assert (due, grants) == checkpoints(10.0, [0.5] * 100)
    assert schedule.due_seconds == math.inf


class Wall:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()
    monkeypatch.setattr(reader_pace, "time", SimpleNamespace(monotonic=wall.monotonic))
    return wall


def train_timed(training: Training, ckpt: Checkpointer, wall: Wall, seconds: list[float]) -> None:
    for one in seconds:
        wall.now += one
        train(training, ckpt, 1)


def test_where_no_reader_counts_on_it_the_clock_decides(place: Place, wall: Wall) -> None:
    training = simple_training()
    ckpt = checkpointer(
        training, place, reader=None, interval_batches=None, interval_seconds=1_000.0
    )
    ckpt.restore()
    train_timed(training, ckpt, wall, [0.01] * 60)
    assert ckpt.stats.staged == 0
    train_timed(training, ckpt, wall, [300.0] * 3)
    assert ckpt.stats.staged == 0 and len(ckpt.stats.stalls_ms) == 0
    train_timed(training, ckpt, wall, [300.0])  # 1,200 s
    assert len(ckpt.stats.stalls_ms) == 1
    until(lambda: ckpt.stats.staged == 1)
    ckpt.close(final=False)


class ReadsAhead:
    """Reads all that it was told of at once, as workers do; nothing of it may be left over."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.in_flight = 0

    def batches_until_checkpoint(self, n: int) -> None:
        assert self.in_flight == 0 and n >= 1
        self.told.append(n)
        self.in_flight = n

    def take(self) -> None:
        assert self.in_flight > 0
        self.in_flight -= 1

    def state_dict(self) -> dict[str, Any]:
        assert self.in_flight == 0
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to go back to."""


@pytest.mark.parametrize("agent", [True, False])
def test_what_a_reader_is_promised_is_kept(place: Place, wall: Wall, agent: bool) -> None:
    training, reader = simple_training(), ReadsAhead()
    ckpt = checkpointer(
        training,
        place,
        reader=reader,
        interval_batches=None,
        interval_seconds=100.0,
        on_error="raise",
    )
    ckpt.restore()
    pipeline = pipeline_of(ckpt)
    for taken in [0.01] * 20 + [70.0] * 20 + [1.0] * 150 + [0.0] * 20 + [30.0] * 30:
        wall.now += taken
        reader.take()
        train(training, ckpt, 1)
        if agent:
            until(lambda: not pipeline._handoff.is_staging())
            place.persist_all()
            until(lambda: ckpt.stats.committed == len(ckpt.stats.stalls_ms))
    stats = ckpt.stats
    assert stats.failed == 0 and len(set(reader.told)) > 2
    assert (len(stats.stalls_ms) > 10) if agent else (stats.skipped > 10)
    ckpt.close(final=False)


def test_a_slow_first_batch_does_not_end_the_interval_early() -> None:
    due, _ = checkpoints(10.0, [4.0] + [0.1] * 169)
    assert due[0] == pytest.approx(61, abs=1)
    assert due[1] - due[0] == pytest.approx(100, abs=1)


def test_a_batch_longer_than_the_interval() -> None:
    due, grants = checkpoints(1.0, [5.0] * 4)
    assert due == [1, 2, 3, 4]
    assert set(grants) == {1}


def test_no_time_passes_at_all() -> None:
    schedule = SecondsInterval(5.0)
    grants = [schedule.restart(0.0)]
    for _ in range(4):
        grants.append(schedule.extend(0.0, batches=grants[-1]))
    assert grants == [1, 2, 6, 18, 54]
    assert schedule.due_seconds == 5.0


def test_an_interval_that_is_asked_for_again() -> None:
    answers = [10.0] * 9 + [20.0] * 100
    schedule = AutoInterval(lambda: answers.pop(0))
    due, grants = replay(schedule, [1.0] * 100)
    assert due == [10, 30, 50, 70, 90]
    assert grants[:6] == [1, 2, 2, 2, 2, 1]
    # When 13 are done it has become 20: ten more batches instead of a checkpoint at 20.
    assert grants[6:14] == [2, 2, 3, 3, 3, 3, 3, 1]


def test_an_interval_that_becomes_shorter_does_so_when_the_grant_is_used_up() -> None:
    answers = [10.0] * 8 + [5.0] * 100
    due, grants = replay(AutoInterval(lambda: answers.pop(0)), [1.0] * 30)
    assert due == [10, 15, 20, 25, 30]
    assert grants[:8] == [1, 2, 2, 2, 2, 1, 2, 1]
