"""Finishes the staged jobs that a dead trainer or agent has left, if no agent is running.

It does once, for one run, what an agent does: each job is committed, or rejected if it can never be
committed; a job that only has to wait stays staged (format §7).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from recpoint.catalog.persist.persist import PersistJob, classify, persist_job
from recpoint.catalog.persist.ranks import missing_ranks, parts_text
from recpoint.catalog.retention.staged import JobFate, StagedWork, left_to
from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.agent_lock import AgentLock, at_work, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.job import open_slot
from recpoint.errors import MissingLink, ObjectNotFound, RanksMissing, RecpointError, StagingRefused
from recpoint.format.records import CheckpointRef

__all__ = ["finish_staged", "foresee_staged"]


def finish_staged(staged_run: StagedRun, *, on_step: OnStep = unwatched) -> StagedWork:
    """Commit or reject the staged jobs of a run and empty its spool, unless an agent does.

    If it is killed, the remaining jobs are unchanged: an agent or the next call continues.

    Args:
        staged_run: the run's directory in a staging area of this host; it need not exist.
        on_step: called after each job, in this thread.

    Raises:
        StagingError: other users can write to the staging area.
        OSError: the staging area cannot be read or written.
    """
    if not staged_run.exists():
        return StagedWork()
    if (other := at_work(staged_run.staging)) is not None:
        return left_to(other, staged_run)
    lock = AgentLock(staged_run.staging, sweep_of(staged_run))
    if (other := lock.take()) is not None:  # an agent or sweep has started just now
        return left_to(other, staged_run)
    try:
        staged_run.clean()
        return _finish(staged_run, on_step)
    finally:
        lock.release()


def foresee_staged(run: Run, staged_run: StagedRun) -> StagedWork:
    """Predict what `finish_staged` would do, without reading the slots.

    Raises:
        OSError: the staging area cannot be read.
    """
    if (other := at_work(staged_run.staging)) is not None:
        return left_to(other, staged_run)
    fates: list[JobFate] = []
    unreadable: list[Path] = []
    coming: set[CheckpointRef] = set()
    waits = ""
    for path in staged_run.staged_jobs():
        if waits:
            fates.append(JobFate(path.stem, "stays", waits))
            continue
        try:
            job = PersistJob.open(path, store=run.store)
        except FileNotFoundError:
            continue  # finished meanwhile
        except StagingRefused as error:
            fates.append(JobFate(path.stem, "stays", str(error)))
            waits = f"{path.stem} is before it"
            continue
        except RecpointError as error:
            fates.append(JobFate(path.stem, "would be rejected", str(error)))
            unreadable.append(path)
            continue
        try:
            missing = _foresee(run, job, coming)
        except RecpointError as error:
            if classify(error) == "rejected":
                fates.append(JobFate(path.stem, "would be rejected", str(error)))
            else:
                fates.append(JobFate(path.stem, "stays", str(error)))
                waits = f"{path.stem} is before it"
            continue
        if missing:
            others = parts_text(missing, job.job.ranks)
            why = f"its part would be stored; {others} would still be missing"
            fates.append(JobFate(path.stem, "stays", why))
        else:
            fates.append(JobFate(path.stem, "would finish"))
            coming.add(job.job.ref)
    return StagedWork(jobs=tuple(fates), unreadable=tuple(unreadable))


def _finish(staged_run: StagedRun, on_step: OnStep) -> StagedWork:
    fates: list[JobFate] = []
    waits = ""
    jobs = staged_run.staged_jobs()
    for done, path in enumerate(jobs, 1):
        if waits:
            fates.append(JobFate(path.stem, "stays", waits))
            continue
        try:
            if not job_files.finish_answered(path):
                persist_job(path)
            outcome = job_files.answer_given(path)
        except FileNotFoundError:
            continue  # its trainer has just started and removed it
        except RanksMissing as error:  # its part is stored, so the jobs after it need not wait
            fates.append(JobFate(path.stem, "stays", str(error)))
        except (RecpointError, OSError, MemoryError) as error:
            fates.append(JobFate(path.stem, "stays", f"{type(error).__name__}: {error}"))
            waits = f"{path.stem} is before it"
        else:
            if outcome is not None:
                fates.append(JobFate(path.stem, outcome.result, outcome.error))
        on_step("finishing staged jobs", done, len(jobs))
    return StagedWork(jobs=tuple(fates))


def _foresee(run: Run, opened: PersistJob, coming: Collection[CheckpointRef]) -> tuple[int, ...]:
    """Return the parts that a job would wait for; raise the error that would reject or delay it."""
    job, (stored, committed) = opened.job, opened.find_done()
    if committed is not None:
        return ()
    if not stored:
        open_slot(opened.path, job)
        if job.parent is not None and job.parent not in coming:
            _require_parent(run, job.ref, job.parent)
    if job.parts == 1:
        return ()
    return tuple(number for number in missing_ranks(run, job) if number != job.rank)


def _require_parent(run: Run, ref: CheckpointRef, parent: CheckpointRef) -> None:
    found = "no manifest"
    try:
        there = run.manifest(parent.step, parent.generation)
    except ObjectNotFound:
        pass
    else:
        if there.ref == parent:
            return
        found = str(there.ref)
    raise MissingLink(
        str(parent),
        found=found,
        expected=f"the checkpoint after which {ref} was taken",
        next_step="nothing: the next checkpoint of a trainer is a full",
    )
