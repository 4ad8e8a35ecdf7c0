"""Discards the jobs staged for a run that does not exist any more (format §6.5)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.agent_lock import AgentLock, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.cancels import remove_mark, write_mark
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
    "StagedLoss",
    "discard_staged",
    "run_is_gone",
    "staged_losses",
    "there_is_a_run",
]


_POLL_SECONDS = 0.05

#: How long the agent may take for one job before it counts as stuck.
_AGENT_SECONDS = 30.0


class StagedLoss(NamedTuple):
    """A staged job, and what is lost with it; fields are 0 or empty if it cannot be read.

    Attributes:
        job: name of the job.
        kind: `full` or `increment`.
        step: step of the checkpoint.
        rows: number of staged rows of all tables.
        bytes: bytes of its slot.
        snapshot_ms: time of the snapshot, in milliseconds since the epoch.
    """

    job: str
    kind: str = ""
    step: int = 0
    rows: int = 0
    bytes: int = 0
    snapshot_ms: int = 0


def staged_losses(staged_run: StagedRun) -> list[StagedLoss]:
    """Return what would be lost if all staged jobs of a run were discarded; changes nothing."""
    losses = []
    for path in staged_run.staged_jobs():
        job = _readable(path)
        if job is None:
            losses.append(StagedLoss(path.stem))
            continue
        rows = sum(table.row_count for table in job.tables)
        losses.append(
            StagedLoss(path.stem, job.kind, job.step, rows, job.slot_bytes, job.snapshot_ms)
        )
    return losses


def run_is_gone(error: NothingToRestore, staged_run: StagedRun) -> NothingToRestore:
    """Return the error for a missing run, with the number of jobs staged for it, if any."""
    jobs = staged_run.staged_jobs()
    if not jobs:
        return error
    count = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    return NothingToRestore(
        error.subject,
        found=f"{error.found}, and {count} staged for it in {staged_run}",
        expected="the run that they are for",
        next_step=naming_run(
            "mount it or put it back, and they can be stored; if it is gone for good, "
            "recpoint sweep URL --discard-staged --dry-run",
            error.subject,
        ),
    )


def there_is_a_run(run_url: str) -> SettingsError:
    """Return the error for a discard of jobs whose run exists."""
    return SettingsError(
        "--discard-staged",
        found=f"a run at {run_url}",
        expected="no run: jobs staged for an existing run can still be stored, or are rejected",
        next_step="recpoint sweep URL",
    )


def discard_staged(staged_run: StagedRun) -> list[StagedLoss]:
    """Reject each staged job of a run that is gone, so that its slot is free.

    If an agent serves the staging area, it is told by a mark, as a trainer would tell it, and this
    waits until the agent has dropped the jobs. If it is killed, each job is either staged or
    answered.

    Args:
        staged_run: the run's directory in a staging area of this host.

    Returns:
        The discarded jobs.

    Raises:
        StagingError: a trainer of the run is running, or a sweep or drain of this staging area is
            running, or its agent does not drop the jobs.
        OSError: the staging area cannot be written.
    """
    if staged_run.trainer_is_running():
        raise StagingError(
            str(staged_run),
            found="a trainer of the run at work",
            expected="no trainer, because it would stage more jobs",
            next_step="stop the trainer first",
        )
    losses = staged_losses(staged_run)
    if not losses:
        return []
    # Not at the top: it imports torch, which commands that only list do not need.
    from recpoint.catalog.persist.persist import reject_job

    lock = AgentLock(staged_run.staging, sweep_of(staged_run))
    other = lock.take()
    if other is None:
        try:
            for path in staged_run.staged_jobs():
                reject_job(path, _discarded(path))
        finally:
            lock.release()
    elif other.ends_by_itself:
        raise lock.refused(other)  # it may never look at the marks of these jobs
    else:
        _have_the_agent_discard(staged_run)
    return losses


def _have_the_agent_discard(staged_run: StagedRun) -> None:
    marked = []
    jobs = staged_run.staged_jobs()
    for path in jobs:
        job = _readable(path)
        if job is not None:  # the agent rejects an unreadable job by itself
            write_mark(staged_run, job.ref, job.rank)
            marked.append(job)
    fewest = len(jobs)
    deadline = time.monotonic() + _AGENT_SECONDS
    while left := staged_run.staged_jobs():
        if len(left) < fewest:  # it makes progress; how long a job takes is unknown
            fewest = len(left)
            deadline = time.monotonic() + _AGENT_SECONDS
        if time.monotonic() >= deadline:
            raise StagingError(
                str(staged_run),
                found=f"{len(left)} jobs that were to be dropped, and none dropped for "
                f"{_AGENT_SECONDS:.0f} s",
                expected="an agent that drops them",
                next_step="read the agent's log; or stop the agent, and run this command again",
            )
        time.sleep(_POLL_SECONDS)
    for job in marked:
        remove_mark(staged_run, job.ref, job.rank)


def _discarded(path: Path) -> CheckpointCancelled:
    return CheckpointCancelled(
        str(path),
        found="recpoint sweep --discard-staged, which declares its run gone for good",
        expected="a run that it can be committed to",
        next_step="nothing",
    )


def _readable(path: Path) -> Job | None:
    try:
        return job_files.read_job(path)
    except (FormatError, FileNotFoundError):
        return None
