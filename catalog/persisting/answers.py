"""The answer to a staged job (format §7, S6): it is committed, or rejected for good, and why."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from recpoint.catalog.persisting.rank_parts import remove_parts
from recpoint.catalog.runs.committed import Committed
from recpoint.catalog.runs.rejections import leave_rejection
from recpoint.catalog.runs.run import Run
from recpoint.catalog.staging.job_store import job_store
from recpoint.catalog.staging.staged import finish, read_job
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.stores.store_contract import Store
from recpoint.errors import CheckpointCancelled, RecpointError
from recpoint.format.job import Job, Outcome
from recpoint.format.naming import MANIFEST_KEY, attempt_prefix, parse_job_stem
from recpoint.format.rejections import Rejection

__all__ = ["finish_committed", "reject_job"]


def finish_committed(job_file: Path | str, there: Committed) -> Outcome:
    """Tell the trainer that the checkpoint is there, and remove the job."""
    job = read_job(job_file)
    outcome = Outcome(
        step=job.step,
        generation=job.generation,
        attempt=job.attempt,
        result="committed",
        error_type="",
        error="",
        stored_bytes=there.stored_bytes,
        rank_bytes=there.rank_bytes,
        links_to_read=there.links_to_read,
        quantizers=there.quantizers,
        finished_ms=now_ms(),
    )
    finish(job_file, outcome)
    return outcome


def reject_job(
    job_file: Path | str, error: RecpointError, *, store: Store | None = None
) -> Outcome:
    """Tell the trainer that the checkpoint will never be there, and why; remove the job.

    Then leave word of it in the store, where that can be reached.
    """
    job: Job | None = None
    try:
        job = read_job(job_file)
        generation, step, attempt = job.generation, job.step, job.attempt
    except RecpointError:
        named = parse_job_stem(Path(job_file).stem)  # of one that cannot be read
        if named is None:
            raise
        generation, step, attempt = named[0], named[1], "0" * 32
    outcome = Outcome(
        step=step,
        generation=generation,
        attempt=attempt,
        result="rejected",
        error_type=type(error).__name__,
        error=str(error)[:4000],
        stored_bytes=0,
        rank_bytes=0,
        links_to_read=0,
        quantizers=(),
        finished_ms=now_ms(),
    )
    finish(job_file, outcome)
    if job is not None:
        # After the answer, since a store that is away must not keep the trainer waiting for it.
        with suppress(RecpointError):
            run = Run.open(job_store(job.run_url, job.attempt) if store is None else store)
            if run.id == job.run:
                _tell_others(run, job, outcome, error)
    return outcome


def _tell_others(run: Run, job: Job, outcome: Outcome, error: RecpointError) -> None:
    if job.ranks > 1:
        # Or the others could still make a checkpoint of it: one that is sound, and that nobody
        # expects. A sweep removes what is left.
        with suppress(RecpointError):
            remove_parts(run, job.ref, rank=job.rank)
    if isinstance(error, CheckpointCancelled) and not _looks_committed(run, job):
        return  # as its trainer wished: a newer one takes its place
    rejection = Rejection(
        checkpoint=job.ref,
        error_type=outcome.error_type[:80],
        error=outcome.error[:1024],
        rejected_ms=outcome.finished_ms,
    )
    leave_rejection(run, job.rank, rejection)


def _looks_committed(run: Run, job: Job) -> bool:
    """Whether what is stored of it would pass for a checkpoint whose manifest is gone (§6.5)."""
    prefix = attempt_prefix(job.step, job.generation, job.attempt)
    return not any(run.store.list(MANIFEST_KEY.prefix)) and any(run.store.list(prefix))
