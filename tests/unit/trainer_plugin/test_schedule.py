"""When a checkpoint is due, and what the reader is told."""

from __future__ import annotations

import pytest

from recpoint.trainer_plugin.schedule import AutoInterval, BatchInterval, Schedule, SecondsInterval


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


def test_seconds_become_batches() -> None:
    due, grants = checkpoints(10.0, [0.5] * 100)
    assert due == [20, 40, 60, 80, 100]
    assert grants[:2] == [1, 19]  # one batch to measure, then the rest in one grant
    assert set(grants[2:]) == {20}


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
    granted = schedule.restart(0.0)
    assert schedule.extend(0.0, batches=granted) > 1_000_000


def test_an_interval_that_is_asked_for_again() -> None:
    answers = [10.0] * 4 + [20.0] * 100
    schedule = AutoInterval(lambda: answers.pop(0))
    due, grants = replay(schedule, [1.0] * 100)
    assert due == [10, 30, 50, 70, 90]
    assert grants[:4] == [1, 9, 10, 10]  # the last: ten more batches instead of a checkpoint
    assert set(grants[4:]) == {20}


def test_an_interval_that_becomes_shorter_does_so_when_the_grant_is_used_up() -> None:
    answers = [10.0] * 4 + [5.0] * 100
    due, grants = replay(AutoInterval(lambda: answers.pop(0)), [1.0] * 30)
    assert due == [10, 20, 25, 30]
    assert grants[:4] == [1, 9, 10, 5]
