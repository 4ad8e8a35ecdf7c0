"""Cancel marks: a trainer asks for a staged job to be dropped (format §7, S4b)."""

from __future__ import annotations

import os
from pathlib import Path

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.staged import read_job
from recpoint.errors import CheckpointCancelled, FormatError, StagingRefused
from recpoint.format.job import Cancel, Job
from recpoint.format.naming import job_stem
from recpoint.format.records import MAX_RECORD_BYTES, CheckpointRef, pack_record, unpack_record

__all__ = [
    "cancel_path",
    "cancels_directory",
    "is_cancelled",
    "raise_if_cancelled",
    "remove_mark",
    "write_mark",
]


def cancels_directory(run_dir: Path | str) -> Path:
    """Where cancel marks are."""
    return Path(run_dir) / "cancels"


def cancel_path(run_dir: Path | str, ref: CheckpointRef, rank: int) -> Path:
    """The cancel mark of the job of one snapshot."""
    return cancels_directory(run_dir) / f"{job_stem(ref.generation, ref.step, rank)}.json"


def write_mark(run_dir: Path | str, ref: CheckpointRef, rank: int) -> None:
    """Ask for a job to be dropped; durable when it returns.

    The agent may commit the job all the same, when it is past the point where it looks.

    Raises:
        StagingRefused: the directory is not this user's own; the job goes on.
        OSError: it could not be written; the job then goes on, most likely.
    """
    path, area = cancel_path(run_dir, ref, rank), Path(run_dir).parent
    owned.make_directory(area, path.parent)
    mark = Cancel(step=ref.step, generation=ref.generation, attempt=ref.attempt)
    owned.write_atomically(area, path, pack_record(mark))


def remove_mark(run_dir: Path | str, ref: CheckpointRef, rank: int) -> None:
    """The job has been answered. A mark that is left behind means nothing for any other job."""
    owned.remove(Path(run_dir).parent, cancel_path(run_dir, ref, rank))


def is_cancelled(job_file: Path | str) -> bool:
    """Whether the trainer wants this job dropped; False when its mark cannot be read or is older.

    Raises:
        FileNotFoundError: there is no such job (any more).
        FormatError, StagingRefused: the job cannot be read.
    """
    marked = _marked_attempt(Path(job_file))
    return marked is not None and marked == read_job(job_file).attempt


def raise_if_cancelled(job_file: Path | str, job: Job) -> None:
    """Stop the work on a job that the trainer wants dropped, or that is not there any more.

    Args:
        job_file: the job.
        job: what was read from it.

    Raises:
        CheckpointCancelled: the trainer wants it dropped.
        FileNotFoundError: there is no such job any more.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    job_file = Path(job_file)
    owned.file_status(job_file.parent.parent.parent, job_file)
    if _marked_attempt(job_file) == job.attempt:
        raise CheckpointCancelled(
            str(job_file),
            found="a cancel mark of the trainer",
            expected="a job that is still wanted",
            next_step="nothing: the next checkpoint holds these rows too",
        )


def _marked_attempt(job_file: Path) -> str | None:
    """The attempt that the mark of a job's name is for; None: there is no mark to be read.

    Marks are named as their jobs are: one of an earlier attempt at the step is not for this one.
    """
    run_dir = job_file.parent.parent
    path = cancels_directory(run_dir) / job_file.name
    try:
        data = owned.read(run_dir.parent, path, MAX_RECORD_BYTES + 1)
    except (OSError, StagingRefused):
        return None
    try:
        mark = unpack_record(Cancel, data, name=os.fspath(path), next_step="nothing: it is ignored")
    except FormatError:
        return None
    return mark.attempt
