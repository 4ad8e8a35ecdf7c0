"""Describes what becomes of staged jobs that have neither trainer nor agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from recpoint.catalog.staging.agent_lock import AtWork
from recpoint.catalog.staging.area import StagedRun

__all__ = [
    "Fate",
    "JobFate",
    "StagedWork",
    "left_to",
]


Fate = Literal[
    "would finish", "would be rejected", "waits for its agent", "committed", "rejected", "stays"
]


class JobFate(NamedTuple):
    """One staged job, what becomes of it, and why, unless that is obvious."""

    job: str
    fate: Fate
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class StagedWork:
    """What was done, or would be done, about the jobs of a run.

    Attributes:
        jobs: the fate of each job, in the order in which they are handled.
        unreadable: files of the jobs that would be rejected because they cannot be read; which
            chunks they need is unknown, but after the rejection nothing needs them.
    """

    jobs: tuple[JobFate, ...] = ()
    unreadable: tuple[Path, ...] = ()

    @property
    def would_go(self) -> frozenset[str]:
        """Return the names of the jobs that would be committed or rejected."""
        return frozenset(job.job for job in self.jobs if job.fate.startswith("would "))


def left_to(worker: AtWork, staged_run: StagedRun) -> StagedWork:
    """Return that all staged jobs of a run are left to an agent or sweep that is at work."""
    fate: Fate = "waits for its agent"
    why = "an agent serves this staging area"
    if worker.ends_by_itself:  # it may be for another run, or be past these jobs already
        fate, why = "stays", f"{worker} is at work here: run this again after it"
    jobs = staged_run.staged_jobs()
    return StagedWork(jobs=tuple(JobFate(path.stem, fate, why) for path in jobs))
