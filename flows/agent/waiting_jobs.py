"""Keeps the jobs whose part is stored and which wait for other ranks, maybe of other agents.

Nobody tells an agent when those parts are stored: it looks, soon at first, then less often.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from recpoint.catalog.persist.ranks import parts_text

__all__ = [
    "NAME_AFTER_SECONDS",
    "WaitingJobs",
]


#: How long a job waits before status, log and metrics name the missing ranks.
NAME_AFTER_SECONDS: Final = 60.0
_FIRST_LOOK_SECONDS: Final = 0.25
_LONGEST_LOOK_SECONDS: Final = 4.0
#: How long an agent that wrote the last part may take to join them all, for each part.
_JOIN_SECONDS: Final = 0.02

#: A generator of its own: agents of all hosts must not choose the same moments.
_chance = random.SystemRandom()


class LateJob(NamedTuple):
    """A job that has waited too long for other parts of its checkpoint.

    Attributes:
        job: stem of the job's file.
        missing: numbers of the missing parts.
        of: how many ranks the checkpoint has; parts of embedding servers count on after them.
        seconds: how long it has waited.
    """

    job: str
    missing: tuple[int, ...]
    of: int
    seconds: float

    def __str__(self) -> str:
        text = parts_text(self.missing, self.of)
        return f"has waited {self.seconds:.0f} s for the part of {text}"

    def status(self) -> Mapping[str, object]:
        """Return the job's entry in a status file; servers are numbered from 1, as in texts."""
        return {
            "job": self.job,
            "ranks": [number for number in self.missing if number < self.of],
            "servers": [number - self.of + 1 for number in self.missing if number >= self.of],
            "seconds": round(self.seconds),
        }


@dataclass
class _WaitingJob:
    since: float
    next_look: float
    pause: float = _FIRST_LOOK_SECONDS
    missing: tuple[int, ...] = ()
    of: int = 1
    named: tuple[int, ...] = ()
    may_join_at: float | None = None


class WaitingJobs:
    """Keeps one run's jobs that wait for other parts of their checkpoints.

    Only the thread that serves the run may change it; any thread may read it.

    Args:
        name_after_seconds: a job is late when it has waited for so long.
    """

    def __init__(self, name_after_seconds: float = NAME_AFTER_SECONDS) -> None:
        self._name_after = name_after_seconds
        self._jobs: dict[Path, _WaitingJob] = {}

    def waits(self, job_file: Path, missing: tuple[int, ...], *, of: int) -> LateJob | None:
        """Note that a job waits for the parts `missing` of a checkpoint of `of` ranks.

        Returns:
            The job if it is late and these parts were not reported before; otherwise None.
        """
        now = time.monotonic()
        waiting = self._jobs.get(job_file)
        if waiting is None:
            waiting = self._jobs[job_file] = _WaitingJob(since=now, next_look=now)
        else:
            waiting.pause = min(2 * waiting.pause, _LONGEST_LOOK_SECONDS)
        waiting.next_look = now + waiting.pause
        waiting.missing, waiting.of = missing, of
        if now - waiting.since < self._name_after or waiting.named == missing:
            return None
        waiting.named = missing
        return LateJob(job_file.stem, missing, of, now - waiting.since)

    def gives_way(self, job_file: Path, parts: int) -> bool:
        """Tell whether an agent that finds all parts leaves it to the one that wrote the last.

        That agent is at work. If all others joined the parts beside it, each would read all of
        them. The others join if it was killed: they wait for as long as a join may take, and up to
        as long again, each for a time of its own. A job that waits so is looked at again by then.

        Args:
            job_file: a job that waits, of a checkpoint without a manifest.
            parts: how many parts it has.
        """
        now = time.monotonic()
        waiting = self._jobs[job_file]
        if waiting.may_join_at is None:
            waiting.may_join_at = now + parts * _JOIN_SECONDS * _chance.uniform(1.0, 2.0)
        if now >= waiting.may_join_at:
            return False
        waiting.next_look = min(now + waiting.pause, waiting.may_join_at)
        return True

    def holds(self, job_file: Path) -> bool:
        """Whether a job waits for other ranks."""
        return job_file in self._jobs

    def is_due(self, job_file: Path) -> bool:
        """Whether a job does not wait, or its missing parts are to be looked for now."""
        waiting = self._jobs.get(job_file)
        return waiting is None or time.monotonic() >= waiting.next_look

    def look_soon(self) -> None:
        """Look for all missing parts now: a commit makes others likely."""
        for waiting in self._jobs.values():
            waiting.next_look, waiting.pause = 0.0, _FIRST_LOOK_SECONDS

    def keep(self, job_files: Collection[Path]) -> None:
        """Forget all jobs but `job_files`, the ones that are still staged."""
        for ended_run in self._jobs.keys() - set(job_files):
            del self._jobs[ended_run]

    def late(self) -> list[LateJob]:
        """Return the late jobs, the longest wait first."""
        now = time.monotonic()
        late_jobs = [
            LateJob(path.stem, waiting.missing, waiting.of, now - waiting.since)
            for path, waiting in list(self._jobs.items())
            if waiting.missing and now - waiting.since >= self._name_after
        ]
        return sorted(late_jobs, key=lambda late: -late.seconds)
