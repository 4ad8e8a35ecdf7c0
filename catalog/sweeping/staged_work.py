"""What becomes of staged jobs that no trainer and no agent is there for: what is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["Fate", "JobFate", "StagedWork"]

Fate = Literal[
    "would finish", "would be rejected", "waits for its agent", "committed", "rejected", "stays"
]


class JobFate(NamedTuple):
    """One staged job, what becomes of it, and why where that is no matter of course."""

    job: str
    fate: Fate
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class StagedWork:
    """What was, or would be, done about the jobs of a run.

    Attributes:
        jobs: in the order in which they are done.
        unreadable: of those that would be rejected, the files that nobody can read: what they need
            is unknown, and not needed any more.
    """

    jobs: tuple[JobFate, ...] = ()
    unreadable: tuple[Path, ...] = ()

    @property
    def would_go(self) -> frozenset[str]:
        """Names of the jobs that would be done with."""
        return frozenset(job.job for job in self.jobs if job.fate.startswith("would "))
