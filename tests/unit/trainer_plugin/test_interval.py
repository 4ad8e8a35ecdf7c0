"""The interval that follows from what a checkpoint costs and how often the job fails."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recpoint.trainer_plugin.schedule.ledger import Statistics
from recpoint.trainer_plugin.schedule.schedule import (
    FIRST_SECONDS,
    MAX_SECONDS,
    MIN_SECONDS,
    choose,
)
from recpoint.trainer_plugin.settings import Rate

DAY = Rate(per_hour=1 / 24, source="settings")


@pytest.mark.parametrize(
    ("stall", "per_hour", "persist", "seconds"),
    [
        (7.0, 1 / 24, 1.0, math.sqrt(2 * 7 * 86_400)),  # Young: 1,100 s
        (7.0, 1 / 24, None, math.sqrt(2 * 7 * 86_400)),
        (7.0, 1 / 24, 2_000.0, 2_000.0),  # two checkpoints do not overlap
        (0.005, 1 / 24, 1.0, math.sqrt(2 * 0.005 * 86_400)),
        (0.001, 1.0, 1.0, MIN_SECONDS),
        (0.001, 1.0, 11.0, 11.0),
        (60.0, 0.001, 1.0, MAX_SECONDS),
        (60.0, 0.001, 7_200.0, MAX_SECONDS),
        (0.005, 1 / 24, 36_000.0, MAX_SECONDS),
        (1.0, 0.0, 1.0, MAX_SECONDS),  # it never fails
        (0.0, 1.0, 0.0, MIN_SECONDS),
        (None, 1.0, None, FIRST_SECONDS),
        (None, 1.0, 90.0, 90.0),
    ],
)
def test_the_interval(
    stall: float | None, per_hour: float, persist: float | None, seconds: float
) -> None:
    rate = Rate(per_hour=per_hour, source="settings")
    found = choose(rate, stall_seconds=stall, persist_seconds=persist)
    assert found.seconds == pytest.approx(seconds)


def test_the_reason_names_what_was_measured_and_what_decided() -> None:
    plain = choose(DAY, stall_seconds=7, persist_seconds=3).reason
    assert "7e+03 ms" in plain and "0.0417 failures an hour (settings)" in plain
    assert "outside" not in plain and "committed" not in plain
    assert "outside 10 to 3600 s" in choose(DAY, stall_seconds=1e-4, persist_seconds=3).reason
    slow = choose(DAY, stall_seconds=1e-4, persist_seconds=30).reason
    assert slow.endswith("30 s to be committed")
    slower = choose(DAY, stall_seconds=1e-4, persist_seconds=7_200).reason
    assert slower.endswith("7.2e+03 s to be committed, more than the longest interval of 3600 s")
    assert "no checkpoint" in choose(DAY, stall_seconds=None, persist_seconds=None).reason


def commits(*seconds: float) -> Statistics:
    found = Statistics()
    for one in seconds:
        cut = time.monotonic() - one
        found.safe(1, cut, kind="increment", stored_bytes=1, committed_ms=1)
    return found


def test_a_commit_that_waited_for_an_outage_does_not_move_what_commits_take() -> None:
    hours = 36_000.0
    for seconds in ((100.0, hours), (hours, 100.0), (100.0, 100.0, hours), (*7 * (100.0,), hours)):
        assert commits(*seconds).persist_seconds == pytest.approx(100, abs=50)
    # Nothing is left of it when the store has become slow: only the last eight count.
    assert commits(*8 * (1.0,), *8 * (500.0,)).persist_seconds == pytest.approx(500, abs=50)
    assert commits().persist_seconds is commits(hours).persist_seconds is None


costs = st.floats(0, 10_000)


@given(
    stall=costs,
    persist=st.none() | costs,
    per_hour=st.floats(0, 1_000),
    factor=st.floats(1, 100),
    longer=st.floats(0, 100),
)
def test_more_failures_never_lengthen_it_and_dearer_checkpoints_never_shorten_it(
    stall: float, persist: float | None, per_hour: float, factor: float, longer: float
) -> None:
    def seconds(rate: float, stall: float, persist: float | None) -> float:
        given = Rate(per_hour=rate, source="settings")
        return choose(given, stall_seconds=stall, persist_seconds=persist).seconds

    interval = seconds(per_hour, stall, persist)
    assert max(MIN_SECONDS, min(persist or 0, MAX_SECONDS)) <= interval <= MAX_SECONDS
    assert seconds(per_hour * factor, stall, persist) <= interval
    assert seconds(per_hour, stall + longer, persist) >= interval
    assert seconds(per_hour, stall, (persist or 0) + longer) >= interval
