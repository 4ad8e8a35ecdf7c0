"""Says what becomes of staged jobs nobody attends to; discards those of a run that is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from recpoint.catalog.staging import area
from recpoint.catalog.staging.agent import AgentLock, sweep_of
from recpoint.catalog.staging.area import remove_mark, write_mark
from recpoint.catalog.store.run_url import naming_run
from recpoint.errors import (
    CheckpointCancelled,
    FormatError,
    NothingToRestore,
    SettingsError,
    StagingError,
)
from recpoint.format.job import Job

__all__ = [
    "Fate",
    "JobFate",
    "StagedLoss",
    "StagedWork",
    "discard_staged",
    "run_is_gone",
    "staged_losses",
    "there_is_a_run",
]


# What becomes of staged jobs that no trainer and no agent is there for: what is told of it.


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


# Discarding what is staged for a run that is not there any more (format §6.5).
#
# Nothing can ever be committed to it, and without somebody's word nobody may tell a run that is
# gone for good from a mount that is missing for a day.


_POLL_SECONDS = 0.05
#: Since the last job that the agent has dropped.
_AGENT_SECONDS = 30.0


class StagedLoss(NamedTuple):
    """A staged job, and what is lost with it; zeros and empty text where it cannot be read.

    Attributes:
        job: its name.
        kind: `full` or `increment`.
        step: of the checkpoint.
        rows: that are staged, of all tables.
        bytes: that its slot holds.
        snapshot_ms: when it was cut.
    """

    job: str
    kind: str = ""
    step: int = 0
    rows: int = 0
    bytes: int = 0
    snapshot_ms: int = 0


def staged_losses(run_dir: Path) -> list[StagedLoss]:
    """What would be lost if all that is staged for a run were discarded; nothing is changed."""
    losses = []
    for path in area.staged_jobs(run_dir):
        job = _readable(path)
        if job is None:
            losses.append(StagedLoss(path.stem))
            continue
        rows = sum(table.row_count for table in job.tables)
        losses.append(
            StagedLoss(path.stem, job.kind, job.step, rows, job.slot_bytes, job.snapshot_ms)
        )
    return losses


def run_is_gone(error: NothingToRestore, run_dir: Path) -> NothingToRestore:
    """The error of a run that is not there, saying what is staged for it if there is something."""
    jobs = area.staged_jobs(run_dir)
    if not jobs:
        return error
    count = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    return NothingToRestore(
        error.subject,
        found=f"{error.found}, and {count} staged for it in {run_dir}",
        expected="the run that they are for",
        next_step=naming_run(
            "mount it or put it back, and they can be stored; if it is gone for good, "
            "recpoint sweep URL --discard-staged --dry-run",
            error.subject,
        ),
    )


def there_is_a_run(run_url: str) -> SettingsError:
    """The error of who wants to discard what can still be stored."""
    return SettingsError(
        "--discard-staged",
        found=f"a run at {run_url}",
        expected="none: what is staged for a run that is there can be stored, or is rejected",
        next_step="recpoint sweep URL",
    )


def discard_staged(run_dir: Path) -> list[StagedLoss]:
    """Answer each staged job of a run that is gone with a rejection, so that its slot is free.

    Without an agent at once; one that serves the staging area is told by a mark, as a trainer
    would tell it, and waited for. Killed anywhere, each job is either staged or answered.

    Args:
        run_dir: the run's directory in a staging area of this host.

    Returns:
        What was discarded.

    Raises:
        StagingError: a trainer of the run is at work, or a sweep or drain is on this staging area,
            or its agent drops no job any more.
        OSError: the staging area cannot be written.
    """
    if area.trainer_is_running(run_dir):
        raise StagingError(
            str(run_dir),
            found="a trainer of the run at work",
            expected="none: it stages more",
            next_step="stop it first",
        )
    losses = staged_losses(run_dir)
    if not losses:
        return []
    # Not at the top: it imports torch, which commands that only list do without.
    from recpoint.catalog.persist.persist import reject_job

    lock = AgentLock(run_dir.parent, sweep_of(run_dir))
    other = lock.take()
    if other is None:
        try:
            for path in area.staged_jobs(run_dir):
                reject_job(path, _discarded(path))
        finally:
            lock.release()
    elif other.ends_by_itself:
        raise lock.refused(other)  # it comes to no mark of these jobs, or not again
    else:
        _have_the_agent_discard(run_dir)
    return losses


def _have_the_agent_discard(run_dir: Path) -> None:
    marked = []
    jobs = area.staged_jobs(run_dir)
    for path in jobs:
        job = _readable(path)
        if job is not None:  # else the agent rejects it unasked
            write_mark(run_dir, job.ref, job.rank)
            marked.append(job)
    fewest = len(jobs)
    deadline = time.monotonic() + _AGENT_SECONDS
    while left := area.staged_jobs(run_dir):
        if len(left) < fewest:  # it is at it: how long one takes, nobody can tell
            fewest = len(left)
            deadline = time.monotonic() + _AGENT_SECONDS
        if time.monotonic() >= deadline:
            raise StagingError(
                str(run_dir),
                found=f"{len(left)} jobs that were to be dropped, and none that was for "
                f"{_AGENT_SECONDS:.0f} s",
                expected="an agent that drops them",
                next_step="see the agent's log; or stop it, and do this again",
            )
        time.sleep(_POLL_SECONDS)
    for job in marked:
        remove_mark(run_dir, job.ref, job.rank)


def _discarded(path: Path) -> CheckpointCancelled:
    return CheckpointCancelled(
        str(path),
        found="the word of a person that its run is gone for good",
        expected="a run that it can be committed to",
        next_step="nothing",
    )


def _readable(path: Path) -> Job | None:
    try:
        return area.read_job(path)
    except (FormatError, FileNotFoundError):
        return None
