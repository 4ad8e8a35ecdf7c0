"""How long the agent waits before it tries a job again."""

from __future__ import annotations

import time

import pytest

from recpoint.flows.agent.gate import growing_pause
from recpoint.flows.agent.runs import SHORTEST_SHARE, RunState


def after(failures: int, cuts_ms: tuple[int, ...] = (), *, heals: bool = True) -> float:
    """The pause of a run that has seen jobs cut then, after so many failures in a row."""
    state = RunState(failures=failures)
    for step, cut_ms in enumerate(cuts_ms):
        state.saw_cut(1, step, cut_ms)
    return state.pause_seconds(heals=heals)


def test_pauses_double_up_to_a_minute_or_five() -> None:
    assert [after(n) for n in (0, 1, 2, 5, 6, 7, 10_000)] == [1, 2, 4, 32, 60, 60, 60]
    assert [after(n, heals=False) for n in (0, 8, 9, 10_000)] == [1, 256, 300, 300]


def test_what_may_heal_is_tried_within_an_eighth_of_an_interval() -> None:
    assert after(9, (0, 80_000)) == 10
    assert after(1, (0, 80_000)) == 2
    assert after(9, (0, 80_000), heals=False) == 300
    assert after(9, (0, 3_600_000)) == 60


def test_no_interval_makes_it_shorter_than_the_first_pause() -> None:
    assert after(9, (0, 100)) == 1


def test_neither_an_outage_nor_a_job_seen_again_is_an_interval() -> None:
    state = RunState(failures=9)
    for step, cut_ms in enumerate((0, 80_000, 600_000, 680_000, 1_500_000, 1_580_000)):
        for _ in range(3):
            state.saw_cut(1, step, cut_ms)
    assert state.pause_seconds(heals=True) == 10


def test_what_lies_between_the_ranks_of_a_checkpoint_is_no_interval() -> None:
    state = RunState(failures=9)
    for step in range(1, 5):
        for rank in range(4):
            state.saw_cut(1, step, step * 600_000 + 3 * rank)
        state.saw_cut(1, max(1, step - 1), 600_000 * step)  # one that waited for others
    assert state.pause_seconds(heals=True) == 60
    assert set(state.gaps_seconds) == {600.0}
    state.saw_cut(2, 3, 3_000_000)  # gone back to an earlier step
    assert state.gaps_seconds[-1] == 600.0 and len(state.gaps_seconds) == 4


def test_tries_that_fail_each_second_have_a_flow_run_once_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    state, flows = RunState(), []
    for _ in range(600):
        flows += [now[0]] if state.is_worth_a_flow() else []
        state.failures += 1
        now[0] += 1.0
    # The first two, so that a fault that passes is seen to have passed.
    assert flows[:4] == [1000.0, 1001.0, 1046.0, 1091.0]
    assert len(flows) == 15
    state.failures = 0
    assert state.is_worth_a_flow() and state.is_worth_a_flow()


def test_where_intervals_are_long_every_try_has_a_flow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    state = RunState()
    for _ in range(50):
        assert state.is_worth_a_flow()
        now[0] += SHORTEST_SHARE * state.pause_seconds(heals=True)
        state.failures += 1


def test_an_outage_of_months_has_a_pause_too() -> None:
    pauses = [growing_pause(n, first=5.0, longest=120.0) for n in (0, 1, 4, 5, 1024, 10**6)]
    assert pauses == [5, 10, 80, 120, 120, 120]


def test_a_run_that_has_had_no_job_for_a_minute_is_looked_at_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    state = RunState(jobs_seen=now[0])

    def looks(seconds: float) -> int:
        """How often it is looked at in so long, by an agent that comes by five times a second."""
        count = 0
        for _ in range(round(5 * seconds)):
            count += state.is_to_be_looked_at()
            now[0] += 0.2
        return count

    assert looks(60) == 300
    assert 9 <= looks(10) <= 11
    state.jobs_seen = now[0]
    assert looks(10) == 50
