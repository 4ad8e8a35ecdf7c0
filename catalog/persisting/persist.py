"""From a staged job to a committed checkpoint: the whole of a persist, without any orchestration.

The steps are functions of a job file's path and a group's number, so that a workflow engine can
run each of them as a task; `persist_job` runs them one after another, overlapped, by itself.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from recpoint.catalog.persisting.answers import finish_committed, reject_job
from recpoint.catalog.persisting.persist_encode import encode_group
from recpoint.catalog.persisting.persist_plan import Group, plan_groups
from recpoint.catalog.persisting.persist_quantize import (
    Quantization,
    quantization_of,
    quantize_group,
)
from recpoint.catalog.persisting.persist_spool import empty_spool
from recpoint.catalog.persisting.persist_upload import encoded_entries, upload_group
from recpoint.catalog.persisting.rank_parts import (
    commit_parts,
    missing_ranks,
    own_part,
    ranks_missing,
    remove_parts,
    write_part,
)
from recpoint.catalog.runs.commit import check_fence, commit
from recpoint.catalog.runs.committed import Committed, committed
from recpoint.catalog.runs.run import Run
from recpoint.catalog.staging.cancel import raise_if_cancelled
from recpoint.catalog.staging.job_store import forget_stores, job_store
from recpoint.catalog.staging.staged import read_job
from recpoint.catalog.staging.staged_job import StagedJob, open_job
from recpoint.catalog.stores.chunks_there import chunks_missing, not_there
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.stores.run_url import naming_run
from recpoint.catalog.stores.store import Store
from recpoint.errors import (
    ForeignObject,
    GenerationRecordLost,
    MalformedObject,
    MissingLink,
    NothingToRestore,
    ObjectNotFound,
    RanksMissing,
    RecpointError,
    RunRecordLost,
    StagingFull,
    StagingRefused,
    StaleWriter,
    StoreError,
)
from recpoint.format.job import Outcome
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import attempt_prefix

__all__ = [
    "Committed",
    "already_committed",
    "classify",
    "commit_job",
    "encode_step",
    "groups_of",
    "is_stored",
    "look_again",
    "open_target",
    "persist_job",
    "quantize_step",
    "upload_step",
    "verify_step",
]

#: Groups that are worked on at once: one is prepared while the one before it is uploaded.
_GROUPS_IN_FLIGHT = 2


def persist_job(job_file: Path | str, *, store: Store | None = None) -> Outcome:
    """Take a staged job to its end: committed, or rejected for good; then the job is removed.

    May be killed anywhere and called again: it goes on under the same keys.

    Args:
        job_file: the job; nothing else is needed.
        store: the store to write to; that of the job's run URL if None.

    Raises:
        FileNotFoundError: there is no such job (any more).
        RanksMissing: its part is stored, those of other ranks are not; the job stays staged.
        StoreError, StagingFull, StagingRefused, OSError: not now; the job stays staged and nothing
            is lost. Call again later.
    """
    job_file = Path(job_file)
    try:
        raise_if_cancelled(job_file)
        target = open_target(job_file, store)
        stored = is_stored(target, job_file)
        there = already_committed(target, job_file)
        if there is None:
            if not stored:
                _persist_groups(target.store, job_file)
            there = commit_job(job_file, store=target.store)
    except RecpointError as error:
        if classify(error) == "deferred":
            forget_stores()
            raise
        return reject_job(job_file, error, store=store)
    return finish_committed(job_file, there)


def classify(error: BaseException) -> Literal["rejected", "deferred"]:
    """Whether a job that failed with `error` can never succeed, or may do so later.

    Whatever the store or this host does, also refusing access, may be repaired, and a record that
    is lost be brought back: the job then stays staged. So does one of another user, or whose slot
    is: it is neither taken nor answered. What is wrong with the job itself, or was
    decided by another writer, stays so.
    """
    later = (
        StoreError,
        StagingFull,
        StagingRefused,
        NothingToRestore,
        RanksMissing,
        GenerationRecordLost,
    )
    if isinstance(error, RecpointError) and not isinstance(error, later):
        return "rejected"
    return "deferred"


def open_target(job_file: Path | str, store: Store | None = None) -> Run:
    """The run that a job is for.

    Raises:
        NothingToRestore: there is no run: a mount may be missing.
        ForeignObject: another run is there.
    """
    job = read_job(job_file)
    try:
        run = Run.open(job_store(job.run_url, job.attempt) if store is None else store)
    except RunRecordLost:
        raise
    except NothingToRestore as error:
        error.expected = "the run that the job is for"
        error.next_step = naming_run(
            "mount it or put it back; if it is gone for good, recpoint sweep URL --discard-staged",
            error.subject,
        )
        raise
    if run.id != job.run:
        raise ForeignObject(
            str(job_file),
            found=f"a job of run {job.run}",
            expected=f"a job of run {run.id}, which is at {run.url}",
            next_step="nothing: the job is rejected; another run took the place of its run",
        )
    return run


def already_committed(run: Run, job_file: Path | str) -> Committed | None:
    """What an agent that was killed right after the commit had done; None if it is all to do.

    Of several ranks, this one's part is removed if it is there still.

    Raises:
        StaleWriter: it is not committed and never will be; nothing has to be uploaded for that.
        MissingLink: nor will it be, since the store knows nothing of its generation.
        GenerationRecordLost: nor will it be before the record of its generation is back.
    """
    job = read_job(job_file)
    try:
        manifest = run.manifest(job.step, job.generation)
    except ObjectNotFound:
        check_fence(run, job.generation, job.step)
        return None
    if manifest.attempt != job.attempt:
        return None
    if job.ranks > 1:
        # One that was killed between commit and removal left it; and who commits may remove it
        # while its own agent is not yet told that it was written, which then writes it once more.
        with suppress(StoreError):  # a sweep removes what is left
            remove_parts(run, job.ref, rank=job.rank)
    return committed(run, manifest, job.rank)


def is_stored(run: Run, job_file: Path | str) -> bool:
    """Whether a job of one of several ranks only waits for the others: its own part is written.

    Ask before `already_committed`: a part that is gone by now may have been removed after the
    commit, which that then finds.

    Raises:
        CommitConflict: a part of another snapshot of this step is there.
        FormatError: it is damaged.
        StoreError: it cannot be read.
    """
    job = read_job(job_file)
    return job.ranks > 1 and own_part(run, job) is not None


def look_again(job_file: Path | str, *, store: Store | None = None) -> tuple[int, ...]:
    """Ranks that a job whose part is stored still waits for; none: it can be gone on with.

    Raises:
        FileNotFoundError, FormatError: there is no such job any more, or none that can be read.
        StoreError: the store cannot be read.
    """
    job = read_job(job_file)
    run = open_target(job_file, store)
    missing = missing_ranks(run, job)
    if not missing or job.rank in missing:
        return ()  # all are there; or parts were removed, as they are after a commit
    try:
        there = already_committed(run, job_file) is not None
    except (StaleWriter, MissingLink):
        return ()
    return () if there else missing


def groups_of(job_file: Path | str) -> list[Group]:
    """The groups of a job, each to be quantized if it says so, encoded and uploaded.

    Raises:
        FormatError, StagingError: the job cannot be persisted.
    """
    return plan_groups(open_job(job_file))


def verify_step(job_file: Path | str) -> None:
    """Check the digests of everything staged; MUST have succeeded before the commit.

    Raises:
        DigestMismatch: the slot is not what the trainer wrote.
        StagingError: it cannot be read.
    """
    open_job(job_file).verify()


def quantize_step(job_file: Path | str, group: int) -> str:
    """`quantize_group` by number; path of the result."""
    staged, chosen = _group(job_file, group)
    return quantize_group(staged, chosen)


def encode_step(job_file: Path | str, group: int) -> str:
    """`encode_group` by number; path of the result."""
    staged, chosen = _group(job_file, group)
    return encode_group(staged, chosen)


def upload_step(job_file: Path | str, group: int, *, store: Store | None = None) -> int:
    """`upload_group` by number; bytes of the group's chunks."""
    staged, chosen = _group(job_file, group)
    if store is None:
        store = job_store(staged.job.run_url, staged.job.attempt)
    return upload_group(store, staged, chosen)


def commit_job(job_file: Path | str, *, store: Store | None = None) -> Committed:
    """Create the manifest of a job, all of whose groups are uploaded.

    With several ranks: write its part, and the manifest if all others are there.

    Raises:
        RanksMissing: others are not.
        CommitError, ChainError: it can never be committed.
        CheckpointCancelled: the trainer wants it dropped.
        ObjectNotFound: chunks that were uploaded are not there any more. The spool is empty now, so
            that the next try writes all of them again.
        StoreError: not now.
    """
    staged = open_job(job_file)
    target = open_target(job_file, store)
    if staged.job.ranks > 1:
        return _commit_rank(target, staged)
    groups = plan_groups(staged)
    entries = [entry for group in groups for entry in encoded_entries(staged, group)]
    try:
        manifest = _manifest(staged, entries, quantization_of(staged, groups))
    except ValidationError as error:
        raise MalformedObject(
            str(job_file),
            found=str(error.errors(include_url=False, include_input=False)[0]["msg"])[:200],
            expected="a job whose manifest keeps to the format",
            next_step="nothing: the job is rejected, and the trainer stages its rows again",
        ) from error
    raise_if_cancelled(job_file)
    _require_uploaded(target, staged, entries)
    commit(target, manifest)
    return committed(target, manifest, staged.job.rank)


def _commit_rank(target: Run, staged: StagedJob) -> Committed:
    raise_if_cancelled(staged.path)
    if own_part(target, staged.job) is None:
        # Removed after a commit, or never written: then nobody has committed without it.
        there = already_committed(target, staged.path)
        if there is not None:
            return there
        groups = plan_groups(staged)
        try:
            entries = [entry for group in groups for entry in encoded_entries(staged, group)]
        except ValueError:
            # A sweep has removed it since: all of it is written again.
            raise ranks_missing(staged.job, (staged.job.rank,)) from None
        _require_uploaded(target, staged, entries)
        write_part(target, staged, entries, quantization_of(staged, groups))
    manifest = commit_parts(target, staged.job, staged.path)
    return committed(target, manifest, staged.job.rank)


def _require_uploaded(target: Run, staged: StagedJob, entries: list[ChunkEntry]) -> None:
    """That the store still has what the spool says was uploaded, maybe long ago (format W4)."""
    prefix = attempt_prefix(staged.job.step, staged.job.generation, staged.job.attempt)
    missing = not_there(target.store, prefix, entries)
    if missing:
        empty_spool(staged)
        raise chunks_missing(staged.job.ref, missing)


def _manifest(staged: StagedJob, entries: list[ChunkEntry], quantization: Quantization) -> Manifest:
    job = staged.job
    return Manifest(
        run=job.run,
        step=job.step,
        generation=job.generation,
        attempt=job.attempt,
        kind=job.kind,
        base=job.base,
        parent=job.parent,
        chain_length=job.chain_length,
        policy=job.policy,
        stands_for=None,
        ranks=job.ranks,
        tables=tuple(table.spec for table in job.tables),
        chunks=tuple(sorted(entries, key=lambda entry: entry.key)),
        quantizers=quantization.quantizers,
        quantized_by=quantization.implementation,
        state_bits=16 if any(table.rounds_states for table in job.tables) else None,
        snapshot_ms=job.snapshot_ms,
        staged_ms=job.staged_ms,
        committed_ms=now_ms(),
        stall_us=job.stall_us,
        dirty_rows=job.dirty_rows,
        full_bytes=job.full_bytes,
        history=job.history,
        writer=f"recpoint {version('recpoint')}",
    )


def _persist_groups(store: Store, job_file: Path) -> None:
    groups = groups_of(job_file)
    with ThreadPoolExecutor(_GROUPS_IN_FLIGHT + 1, thread_name_prefix="persist") as pool:
        # Beside the groups: reading everything once more first would delay the first upload.
        verified = pool.submit(verify_step, job_file)
        uploads: list[Future[int]] = []
        for group in groups:
            if len(uploads) >= _GROUPS_IN_FLIGHT:
                uploads[-_GROUPS_IN_FLIGHT].result()
            if group.quantized:
                quantize_step(job_file, group.index)
            encode_step(job_file, group.index)
            uploads.append(pool.submit(upload_step, job_file, group.index, store=store))
        for upload in uploads:
            upload.result()
        verified.result()


def _group(job_file: Path | str, index: int) -> tuple[StagedJob, Group]:
    raise_if_cancelled(job_file)  # each step looks first: nothing is quantized, encoded or sent
    staged = open_job(job_file)
    return staged, plan_groups(staged)[index]
