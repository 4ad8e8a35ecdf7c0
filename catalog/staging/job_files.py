"""Reads and answers the jobs in a staging area (format §7)."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import ForeignObject, FormatError, StagingRefused
from recpoint.format.job import Job, Outcome
from recpoint.format.records import MAX_RECORD_BYTES, pack_record, unpack_record

__all__ = [
    "answer_given",
    "finish",
    "finish_answered",
    "read_job",
    "read_outcome",
    "staged_attempts",
]


#: Outcomes that this process has written and not returned yet, by job file. They are kept in
#: memory too, because a trainer removes the files.
_answers: dict[str, Outcome] = {}
_MOST_ANSWERS = 64

_REJECTED = "nothing: the job is rejected, and the trainer stages its rows again"
#: The next step for a caller that only reads jobs and does not reject them.
_REJECT_FIRST = (
    "try again in a moment if an agent runs, which rejects the job; if none runs, recpoint sweep "
    "URL rejects it"
)


def read_job(path: Path | str) -> Job:
    """Return the job in a job file, after checking its form, its name and its run.

    Raises:
        FileNotFoundError: the file does not exist (any more).
        FormatError: it is not a job, or a job of another run or name.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    path = Path(path)
    staged_run = StagedRun.of_job(path)
    data = _read_record(staged_run, path)
    job = unpack_record(Job, data, name=str(path), next_step=_REJECTED)
    if path.name != f"{job.stem}.json":
        raise ForeignObject(
            str(path), found=f"the job {job.stem}", expected=path.stem, next_step=_REJECTED
        )
    if StagedRun.of(staged_run.staging, job.run_url) != staged_run:
        raise ForeignObject(
            str(path),
            found="a job for another run",  # whose URL may hold a credential
            expected=f"a job for the run of {staged_run.name}",
            next_step=_REJECTED,
        )
    return job


def staged_attempts(staged_run: StagedRun, *, besides: Collection[Path] = ()) -> set[str]:
    """Return the attempts whose chunks an agent on this host may still need.

    Args:
        staged_run: the run.
        besides: jobs that are not read, because they would be rejected.

    Raises:
        FormatError, StagingRefused: a job cannot be read, so it is unknown what it needs.
    """
    attempts = set()
    for path in staged_run.staged_jobs():
        if path in besides:
            continue
        try:
            attempts.add(read_job(path).attempt)
        except FileNotFoundError:
            continue  # finished meanwhile
        except FormatError as error:
            error.next_step = _REJECT_FIRST
            raise
    return attempts


def read_outcome(path: Path | str) -> Outcome:
    """Return the outcome in an outcome file.

    Raises:
        FileNotFoundError: there is no such file yet.
        FormatError: it is not an outcome.
        StagingRefused: it, or a directory above it, is not this user's own.
    """
    path = Path(path)
    data = _read_record(StagedRun.of_job(path), path)
    return unpack_record(Outcome, data, name=str(path), next_step="recpoint check RUN")


def finish(job_file: Path | str, outcome: Outcome) -> None:
    """Answer a job (format §7, staging order, rule 7).

    The job file is removed last, so no slot becomes free before its job is answered.

    Raises:
        StagingRefused: one of the directories is not this user's own.
        OSError: the answer could not be written, or the job could not be removed.
    """
    job_file = Path(job_file)
    staged_run = StagedRun.of_job(job_file)
    area = staged_run.staging
    answer = staged_run.outcomes_directory / job_file.name
    # The spool goes first, because the answer may need its room. A retry needs no spool.
    with suppress(OSError, StagingRefused):
        owned.remove_tree(area, staged_run.spool_directory / job_file.stem, ignore_errors=True)
    owned.make_directory(area, answer.parent)
    owned.write_atomically(area, answer, pack_record(outcome))
    _note_answer(job_file, outcome)
    owned.remove(area, job_file)


def finish_answered(job_file: Path | str) -> bool:
    """Remove a job that an agent has answered before it was killed; return whether it did."""
    job_file = Path(job_file)
    staged_run = StagedRun.of_job(job_file)
    try:
        outcome = read_outcome(staged_run.outcomes_directory / job_file.name)
        job = read_job(job_file)
    except (FileNotFoundError, FormatError):
        return False
    if outcome.attempt != job.attempt:
        return False  # the answer to an earlier job of this name, which no trainer has read yet
    _note_answer(job_file, outcome)
    owned.remove(staged_run.staging, job_file)
    return True


def answer_given(job_file: Path | str) -> Outcome | None:
    """Return this process's answer to a job, once, even if its trainer has removed the file."""
    return _answers.pop(str(job_file), None)


def _note_answer(job_file: Path, outcome: Outcome) -> None:
    while len(_answers) >= _MOST_ANSWERS:
        _answers.pop(next(iter(_answers)), None)
    _answers[str(job_file)] = outcome


def _read_record(staged_run: StagedRun, path: Path) -> bytes:
    # With one byte more than the bound the parser refuses a larger file, whatever its size.
    return owned.read(staged_run.staging, path, MAX_RECORD_BYTES + 1)
