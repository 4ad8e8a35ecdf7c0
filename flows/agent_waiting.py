"""Jobs whose part is stored and that wait for other ranks, which other agents may serve.

Nobody tells an agent when they are done: it looks, soon at first, then less and less often.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from recpoint.catalog.persist.ranks import ranks_text

__all__ = ["NAME_AFTER_SECONDS", "LateJob", "WaitingJobs"]

#: How long a job waits before the ranks that are missing are named.
NAME_AFTER_SECONDS: Final = 60.0

_FIRST_PAUSE_SECONDS: Final = 0.25
_LONGEST_PAUSE_SECONDS: Final = 4.0


class LateJob(NamedTuple):
    """A job that has waited for longer than one would expect, and for whom."""

    job: str
    ranks: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return f"has waited {self.seconds:.0f} s for the part of {ranks_text(self.ranks)}"


@dataclass
class _Waiting:
    since: float
    next_look: float
    pause: float = _FIRST_PAUSE_SECONDS
    ranks: tuple[int, ...] = ()
    named: tuple[int, ...] = ()


class WaitingJobs:
    """Those of one run. Changed by the thread that serves the run, read by any.

    Args:
        name_after_seconds: from then on a job is late.
    """

    def __init__(self, name_after_seconds: float = NAME_AFTER_SECONDS) -> None:
        self._name_after = name_after_seconds
        self._jobs: dict[Path, _Waiting] = {}

    def waits(self, job_file: Path, ranks: tuple[int, ...]) -> LateJob | None:
        """Note that a job waits for `ranks`; what to tell of it, once for each set of ranks."""
        now = time.monotonic()
        waiting = self._jobs.get(job_file)
        if waiting is None:
            waiting = self._jobs[job_file] = _Waiting(since=now, next_look=now)
        else:
            waiting.pause = min(2 * waiting.pause, _LONGEST_PAUSE_SECONDS)
        waiting.next_look = now + waiting.pause
        waiting.ranks = ranks
        if now - waiting.since < self._name_after or waiting.named == ranks:
            return None
        waiting.named = ranks
        return LateJob(job_file.stem, ranks, now - waiting.since)

    def holds(self, job_file: Path) -> bool:
        """Whether a job waits."""
        return job_file in self._jobs

    def is_due(self, job_file: Path) -> bool:
        """Whether to look for the parts of the others again, or to begin with the job."""
        waiting = self._jobs.get(job_file)
        return waiting is None or time.monotonic() >= waiting.next_look

    def look_soon(self) -> None:
        """Something was committed: what waits may be, too."""
        for waiting in self._jobs.values():
            waiting.next_look, waiting.pause = 0.0, _FIRST_PAUSE_SECONDS

    def keep(self, job_files: Collection[Path]) -> None:
        """Forget those that are not staged any more."""
        for gone in self._jobs.keys() - set(job_files):
            del self._jobs[gone]

    def late(self) -> list[LateJob]:
        """Those that wait for longer than one would expect, oldest first."""
        now = time.monotonic()
        found = [
            LateJob(path.stem, waiting.ranks, now - waiting.since)
            for path, waiting in list(self._jobs.items())
            if waiting.ranks and now - waiting.since >= self._name_after
        ]
        return sorted(found, key=lambda late: -late.seconds)
