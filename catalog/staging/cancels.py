"""Marks jobs that a trainer asks the agent to drop (format §7, staging order, rule 5)."""

from __future__ import annotations

import os
from pathlib import Path

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job_files import read_job
from recpoint.errors import CheckpointCancelled, FormatError, StagingRefused
from recpoint.format.job import Cancel, Job
from recpoint.format.records import MAX_RECORD_BYTES, CheckpointRef, pack_record, unpack_record

__all__ = ["is_cancelled", "raise_if_cancelled", "remove_mark", "write_mark"]


def write_mark(staged_run: StagedRun, ref: CheckpointRef, rank: int) -> None:
    """Ask the agent to drop a job; durable when it returns.

    The agent may still commit the job if it has already looked for a mark.

    Raises:
        StagingRefused: the directory is not this user's own; the job goes on.
        OSError: the mark could not be written; most likely the job goes on.
    """
    path = staged_run.cancel_path(ref, rank)
    owned.make_directory(staged_run.staging, path.parent)
    mark = Cancel(step=ref.step, generation=ref.generation, attempt=ref.attempt)
    owned.write_atomically(staged_run.staging, path, pack_record(mark))


def remove_mark(staged_run: StagedRun, ref: CheckpointRef, rank: int) -> None:
    """Remove the mark of an answered job; a mark that stays means nothing for other jobs."""
    owned.remove(staged_run.staging, staged_run.cancel_path(ref, rank))


def is_cancelled(job_file: Path | str) -> bool:
    """Tell whether the trainer wants this job dropped; False if the mark is unreadable or old.

    Raises:
        FileNotFoundError: there is no such job (any more).
        FormatError, StagingRefused: the job cannot be read.
    """
    marked = _marked_attempt(Path(job_file))
    return marked is not None and marked == read_job(job_file).attempt


def raise_if_cancelled(job_file: Path | str, job: Job) -> None:
    """Raise if the trainer wants a job dropped, or if its file does not exist any more.

    Args:
        job_file: the job file.
        job: the job that was read from it.

    Raises:
        CheckpointCancelled: the trainer wants it dropped.
        FileNotFoundError: there is no such job any more.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    job_file = Path(job_file)
    owned.file_status(StagedRun.of_job(job_file).staging, job_file)
    if _marked_attempt(job_file) == job.attempt:
        raise CheckpointCancelled(
            str(job_file),
            found="a cancel mark of the trainer",
            expected="a job that is still wanted",
            next_step="nothing: the next checkpoint holds these rows too",
        )


def _marked_attempt(job_file: Path) -> str | None:
    """Return the attempt in the mark with a job's name; None if there is no readable mark.

    A mark has the name of its job, so it may be for an earlier attempt at the same step.
    """
    staged_run = StagedRun.of_job(job_file)
    path = staged_run.cancels_directory / job_file.name
    try:
        data = owned.read(staged_run.staging, path, MAX_RECORD_BYTES + 1)
    except (OSError, StagingRefused):
        return None
    try:
        mark = unpack_record(Cancel, data, name=os.fspath(path), next_step="nothing: it is ignored")
    except FormatError:
        return None
    return mark.attempt
