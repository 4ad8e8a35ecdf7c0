"""How long the agent waits before it tries a job again."""

from __future__ import annotations

from recpoint.flows.agent_runs import RunState
from recpoint.flows.pauses import growing_pause


def after(failures: int, cuts_ms: tuple[int, ...] = (), *, heals: bool = True) -> float:
    """The pause of a run that has seen jobs cut then, after so many failures in a row."""
    state = RunState(failures=failures)
    for cut_ms in cuts_ms:
        state.saw_cut(cut_ms)
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
    assert after(9, (0, 80_000, 80_000, 80_000, 600_000, 680_000, 1_500_000, 1_580_000)) == 10


def test_an_outage_of_months_has_a_pause_too() -> None:
    pauses = [growing_pause(n, first=5.0, longest=120.0) for n in (0, 1, 4, 5, 1024, 10**6)]
    assert pauses == [5, 10, 80, 120, 120, 120]
