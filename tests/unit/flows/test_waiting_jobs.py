"""When an agent looks at a job again that waits for parts, or for whoever joins them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from recpoint.flows.agent.waiting_jobs import WaitingJobs

JOB = Path("job.json")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)

    def next_look(self, jobs: WaitingJobs) -> float:
        """Go on until the job is looked at; return the seconds until then."""
        began_seconds = self.seconds
        while not jobs.is_due(JOB):
            self.seconds += 0.01
        return self.seconds - began_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("parts", [2, 64, 1024])
def test_an_agent_gives_way_for_as_long_as_a_join_may_take(clock: Clock, parts: int) -> None:
    looks = []
    for _ in range(20):
        jobs = WaitingJobs()
        jobs.waits(JOB, (1,), of=parts)
        began_seconds = clock.seconds
        while jobs.gives_way(JOB, parts):
            assert clock.next_look(jobs) <= 4.01  # a commit is noticed as soon as before
        looks.append(clock.seconds - began_seconds)
    assert parts * 0.02 <= min(looks) and max(looks) <= parts * 0.04 + 0.02
    assert len({round(look, 3) for look in looks}) > 1 or parts == 2, "not all at one moment"


def test_a_look_after_the_wait_does_not_wait_anew(clock: Clock) -> None:
    jobs = WaitingJobs()
    jobs.waits(JOB, (1,), of=2)
    assert jobs.gives_way(JOB, 2)
    clock.seconds += 1
    assert not jobs.gives_way(JOB, 2) and not jobs.gives_way(JOB, 2)
