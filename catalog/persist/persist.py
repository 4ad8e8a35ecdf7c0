"""Runs the steps that turn a staged job into a committed checkpoint.

`PersistJob` holds a job file that was opened once; its methods are the steps. `drive` runs them,
overlapped, until the job is answered. It calls them through `PersistSteps`: either the job itself,
or a workflow engine that runs each step of the job as a task.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, Self

from pydantic import ValidationError

from recpoint.catalog.persist.base_cache import BaseCache
from recpoint.catalog.persist.encode import encode_group, encoded_entries
from recpoint.catalog.persist.plan import GROUP_BYTES, ChunkGroup, plan_groups
from recpoint.catalog.persist.quantize import quantization_of, quantize_group
from recpoint.catalog.persist.quantizer_choice import Choice
from recpoint.catalog.persist.ranks import (
    commit_parts,
    missing_ranks,
    own_part,
    ranks_missing,
    remove_parts,
    stored_fields,
    write_part,
)
from recpoint.catalog.persist.record_sizes import part_sizes
from recpoint.catalog.persist.residuals import ResidualRows
from recpoint.catalog.persist.spool import empty_spool
from recpoint.catalog.persist.upload import upload_group
from recpoint.catalog.run.commit import check_fence, commit
from recpoint.catalog.run.committed import Committed, committed
from recpoint.catalog.run.rejections import leave_rejection
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.stored_chunks import chunks_missing, not_there
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.cancels import raise_if_cancelled
from recpoint.catalog.staging.job import StagedJob, open_slot
from recpoint.catalog.staging.job_files import finish, read_job
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.run_url import naming_run
from recpoint.catalog.store.scheduler import ReadScheduler, WriteBudget, WriteScheduler
from recpoint.catalog.store.store import S3Timeouts, Store, open_store
from recpoint.errors import (
    CheckpointCancelled,
    ForeignObject,
    GenerationRecordLost,
    MalformedObject,
    MissingLink,
    NothingToRestore,
    ObjectNotFound,
    RanksMissing,
    RecordTooLarge,
    RecpointError,
    RunRecordLost,
    StagingFull,
    StagingRefused,
    StaleWriter,
    StoreError,
)
from recpoint.format import paging, records
from recpoint.format.job import Job, Outcome
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import MANIFEST_KEY, attempt_prefix, parse_job_stem, rank_prefix
from recpoint.format.rejections import Rejection

__all__ = [
    "JobAnswer",
    "Committed",
    "StoredJob",
    "PersistJob",
    "PersistSteps",
    "classify",
    "drive",
    "persist_job",
    "reject_job",
]

#: Groups in work at once: one is prepared while the previous one is uploaded.
_GROUPS_IN_FLIGHT: Final = 2

#: Few attempts, because the caller retries a failed job with pauses that follow the interval.
_TIMEOUTS: Final = S3Timeouts(attempts=3)

#: The sizes in the answer to a rejected job.
_NOTHING: Final = Committed(0, 0, 0, 0, 0, ())

_REJECTED: Final = "nothing: the job is rejected, and the trainer stages its rows again"


class StoredJob(NamedTuple):
    """What the store already holds of a job.

    Attributes:
        stored: the part of this job is written, so that no chunk may be written again; always
            false if the checkpoint has no parts.
        committed: the checkpoint, if an earlier agent committed it before it was killed; else None.
    """

    stored: bool
    committed: Committed | None


class JobAnswer(NamedTuple):
    """The answer to a job; `committed` is None if the job was rejected."""

    outcome: Outcome
    committed: Committed | None = None


class PersistJob:
    """A staged job to be persisted: its file is opened once, and what follows from it is kept.

    The store is opened, the slot checked and the chunks planned at first use. After a failure,
    create a new object: the slot and the credentials may have changed. A step may be called again,
    also by another process after a kill: it finds its earlier work and continues from there.
    Different groups may be at different steps at once.

    Attributes:
        path: the job file.
        job: its content.
        waits_for_commit: the last `ranks_awaited` found all parts and no manifest.
    """

    def __init__(self, path: Path, job: Job, store: Store | None = None) -> None:
        self.path = path
        self.job = job
        self.waits_for_commit = False
        self._given_store = store
        self._chosen: dict[int, Choice] = {}
        has_residuals = any(table.residual for table in job.tables)
        # Increments after a full stand on it; those after an increment stand on its base.
        base = job.base or job.ref
        self._base_cache = BaseCache(StagedRun.of_job(path), job.rank, base.attempt)
        self._residuals = (
            ResidualRows(job, self.open_run, self._base_cache) if has_residuals else None
        )

    @classmethod
    def open(cls, job_file: Path | str, *, store: Store | None = None) -> Self:
        """Read a job file.

        Args:
            job_file: path of the job; nothing else is needed.
            store: the store to write to; None opens the store of the job's run URL.

        Raises:
            FileNotFoundError: there is no such job (any more).
            FormatError: the file is not a job, or is a job of another run.
            StagingRefused: this user does not own the file or a directory above it.
        """
        path = Path(job_file)
        return cls(path, read_job(path), store)

    @cached_property
    def store(self) -> Store:
        """The store of the run; kept, because a new client of an object store takes 0.2 s."""
        if self._given_store is not None:
            return self._given_store
        return open_store(self.job.run_url, timeouts=_TIMEOUTS)

    @cached_property
    def staged(self) -> StagedJob:
        """The job with its slot.

        Raises:
            FormatError: the segments do not match what the tables need.
            StagingError: the slot is missing, not a plain file, too short, or another user's.
        """
        return open_slot(self.path, self.job)

    @cached_property
    def groups(self) -> tuple[ChunkGroup, ...]:
        """The groups of the job: each is quantized if `group.quantized`, encoded and uploaded.

        Raises:
            FormatError, StagingError: the job cannot be persisted.
        """
        return tuple(plan_groups(self.staged))

    def raise_if_cancelled(self) -> None:
        """Raise if the trainer has cancelled the job, or if its file is gone.

        Raises:
            CheckpointCancelled: the trainer has cancelled the job.
            FileNotFoundError: somebody has answered or removed the job.
        """
        raise_if_cancelled(self.path, self.job)

    def open_run(self) -> Run:
        """Open the job's run, and check that it is still the same run.

        Raises:
            NothingToRestore: there is no run at its URL: a mount may be missing.
            ForeignObject: another run is at its URL.
        """
        try:
            run = Run.open(self.store)
        except RunRecordLost:
            raise
        except NothingToRestore as error:
            error.expected = "the run that the job is for"
            error.next_step = naming_run(
                "mount it or put it back; if it is gone for good, "
                "recpoint sweep URL --discard-staged",
                error.subject,
            )
            raise
        if run.id != self.job.run:
            raise ForeignObject(
                str(self.path),
                found=f"a job of run {self.job.run}",
                expected=f"a job of run {run.id}, which is at {run.url}",
                next_step="nothing: the job is rejected; another run took the place of its run",
            )
        return run

    def find_done(self) -> StoredJob:
        """Find what is already done of the job; this is the first step.

        Raises:
            CheckpointCancelled: the trainer has cancelled the job.
            StaleWriter, MissingLink: the job is not committed and can never be.
            GenerationRecordLost: the job cannot be committed until the record of its generation is
                restored.
            CommitConflict: the store has this rank's part of another snapshot of this step.
            FormatError: the part is damaged.
            ForeignObject, NothingToRestore: as `open_run`.
            StoreError: the store cannot be read; try again later.
        """
        self.raise_if_cancelled()
        run = self.open_run()
        # The part is looked for before the manifest: if a commit has just removed the part, the
        # manifest is found next.
        stored = self.job.parts > 1 and own_part(run, self.job) is not None
        return StoredJob(stored, self._committed(run))

    def ranks_awaited(self) -> tuple[int, ...]:
        """Numbers of the parts that a job still waits for after its own; if none, it can proceed.

        Raises:
            StoreError: the store cannot be read.
        """
        run = self.open_run()
        missing = missing_ranks(run, self.job)
        self.waits_for_commit = not missing
        if not missing or self.job.rank in missing:
            return ()  # all parts are there, or a commit has removed them
        try:
            is_committed = self._committed(run) is not None
        except (StaleWriter, MissingLink):
            return ()
        return () if is_committed else missing

    def _committed(self, run: Run) -> Committed | None:
        """Return the committed checkpoint, if any; remove a part of this rank that was left."""
        job = self.job
        try:
            manifest = run.manifest(job.step, job.generation)
        except ObjectNotFound:
            check_fence(run, job.generation, job.step)
            return None
        if manifest.attempt != job.attempt:
            return None
        if job.parts > 1:
            # A part is left if an agent was killed between commit and removal, or if this agent
            # retried the write of its part after another agent had committed and removed it.
            with suppress(StoreError):  # a sweep removes it later
                remove_parts(run, job.ref, rank=job.rank)
        return committed(run, manifest, job.rank)

    def refuse_too_large(self) -> None:
        """Refuse a job whose part alone would exceed the limit of a manifest, before an upload.

        A trainer of this release does not stage such a job.

        Raises:
            RecordTooLarge: the manifest would be larger than readers accept.
        """
        state = [
            segment_bytes.bytes
            for segment_bytes in self.job.segments
            if segment_bytes.name.startswith(("tree", "tensor."))
        ]
        sizes = part_sizes(self.job.tables, part=self.job.rank, state_bytes=state)
        if not sizes.fits:
            raise RecordTooLarge(
                str(self.path),
                found=f"{sizes.chunks:,} chunks or more, whose manifest would take about "
                f"{sizes.manifest_bytes:,} bytes",
                expected=f"records of at most {records.MAX_RECORD_BYTES:,} bytes, and "
                f"{paging.MAX_MANIFEST_BYTES:,} of a manifest with its pages",
                next_step="store fewer bits, or train fewer tables",
            )

    def verify(self) -> None:
        """Check the digests of everything staged; MUST have succeeded before the commit.

        Raises:
            DigestMismatch: the slot does not hold what the trainer wrote.
            StagingError: the slot cannot be read.
        """
        self.staged.verify()

    def quantize(self, group: ChunkGroup) -> str:
        """Call `quantize_group` unless the job is cancelled; return the path of the result."""
        self.raise_if_cancelled()
        return quantize_group(self.staged, group, self._chosen, self._residuals)

    def encode(self, group: ChunkGroup) -> str:
        """Call `encode_group` unless the job is cancelled; return the path of the result."""
        self.raise_if_cancelled()
        return encode_group(self.staged, group)

    def upload(self, group: ChunkGroup) -> int:
        """Call `upload_group` unless the job is cancelled; return the bytes of its chunks."""
        self.raise_if_cancelled()
        return upload_group(self.store, self.staged, group)

    def advanced(self, done_bytes: int, total_bytes: int) -> None:
        """Ignore the progress; nobody is told."""

    def commit(self) -> Committed:
        """Create the manifest of the job after all its groups are uploaded.

        If there are several parts, write this one, and the manifest if all others are there.

        Raises:
            RanksMissing: other parts are not there yet.
            CommitError, ChainError: the job can never be committed.
            CheckpointCancelled: the trainer has cancelled the job.
            ObjectNotFound: chunks that were uploaded are gone. The spool has been emptied, so that
                the next try writes all of them again.
            StoreError: the store cannot be read or written; try again later.
        """
        run = self.open_run()
        if self.job.parts > 1:
            return self._commit_part(run)
        entries = self._entries()
        try:
            manifest = self._manifest(entries)
        except ValidationError as error:
            raise MalformedObject(
                str(self.path),
                found=str(error.errors(include_url=False, include_input=False)[0]["msg"])[:200],
                expected="a job whose manifest keeps to the format",
                next_step=_REJECTED,
            ) from error
        self.raise_if_cancelled()
        self._require_uploaded(run, entries)
        commit(run, manifest)
        self._base_cache.remove_others()
        return committed(run, manifest, self.job.rank)

    def _commit_part(self, run: Run) -> Committed:
        job = self.job
        self.raise_if_cancelled()
        if own_part(run, job) is None:
            # Either a commit has removed the part, or it was never written; then nothing is
            # committed, because a commit needs it.
            committed_manifest = self._committed(run)
            if committed_manifest is not None:
                return committed_manifest
            try:
                entries = self._entries()
            except ValueError:
                # Nothing was encoded, because the part was there when the job began; a sweep has
                # removed the part meanwhile. The next try writes everything again.
                raise ranks_missing(job, (job.rank,)) from None
            self._require_uploaded(run, entries)
            write_part(run, self.staged, entries, quantization_of(self.staged, self.groups))
        manifest = commit_parts(run, job, self.path)
        self._base_cache.remove_others()
        return committed(run, manifest, job.rank)

    def _entries(self) -> list[ChunkEntry]:
        return [entry for group in self.groups for entry in encoded_entries(self.staged, group)]

    def _require_uploaded(self, run: Run, entries: list[ChunkEntry]) -> None:
        """Check that the store still has the chunks that the spool says were uploaded.

        Rule 5 of the write order requires this, because the upload may be long ago (format §6.1).
        """
        job = self.job
        prefix = rank_prefix(job.step, job.generation, job.attempt, rank=job.rank)
        missing = not_there(run.store, prefix, entries)
        if missing:
            empty_spool(self.staged)
            raise chunks_missing(self.job.ref, missing)

    def _manifest(self, entries: list[ChunkEntry]) -> Manifest:
        quantization = quantization_of(self.staged, self.groups)
        return Manifest(
            **stored_fields(self.job, entries, quantization),
            stands_for=None,
            copied_ahead=self.job.copied_ahead,
            loss=self.job.loss,
            keyed=self.job.keyed,
            tables=tuple(table.spec for table in self.job.tables),
            committed_ms=now_ms(),
        )

    def finish(self, committed: Committed) -> Outcome:
        """Tell the trainer that the checkpoint is there, and remove the job.

        This is rule 7 of the staging order (format §7).

        Raises:
            StagingRefused, OSError: as `job_files.finish`.
        """
        outcome = _outcome(
            self.job.step, self.job.generation, self.job.attempt, committed=committed
        )
        finish(self.path, outcome)
        return outcome

    def reject(self, error: RecpointError) -> Outcome:
        """Tell the trainer that the checkpoint will never exist, and why; remove the job.

        Then record the rejection in the store, if the store can be reached.

        Raises:
            StagingRefused, OSError: as `job_files.finish`.
        """
        job = self.job
        outcome = _outcome(job.step, job.generation, job.attempt, error=error)
        finish(self.path, outcome)
        # After the answer, so that an unreachable store does not keep the trainer waiting.
        with suppress(RecpointError):
            run = Run.open(self.store)
            if run.id == job.run:
                _tell_others(run, job, outcome, error)
        return outcome


class PersistSteps(Protocol):
    """Runs the steps of a job for `drive`, and is told the progress.

    Each method returns when its step is over, and returns or raises what the `PersistJob` method of
    the same name does. `drive` calls `verify` and `upload` from threads of their own.
    """

    def find_done(self) -> StoredJob:
        """Run the first step."""

    def verify(self) -> object:
        """Verify the slot, in parallel with the groups."""

    def quantize(self, group: ChunkGroup) -> object:
        """Quantize a group; called only for groups that have something to quantize."""

    def encode(self, group: ChunkGroup) -> object:
        """Encode a group, after its `quantize`."""

    def upload(self, group: ChunkGroup) -> object:
        """Upload a group, after its `encode`."""

    def commit(self) -> Committed:
        """Commit the job, after all groups and `verify`."""

    def advanced(self, done_bytes: int, total_bytes: int) -> object:
        """Note that `done_bytes` of the staged bytes are stored; called in `drive`'s thread."""


def persist_job(job_file: Path | str, *, store: Store | None = None) -> Outcome:
    """Commit a staged job, or reject it for good; then remove it.

    It may be killed at any point and called again: it continues with the same keys.

    Args:
        job_file: path of the job; nothing else is needed.
        store: the store to write to; None opens the store of the job's run URL.

    Raises:
        FileNotFoundError: there is no such job (any more).
        RanksMissing, StoreError, StagingFull, StagingRefused, OSError: as `drive`.
    """
    try:
        job = PersistJob.open(job_file, store=store)
    except RecpointError as error:
        if classify(error) == "deferred":
            raise
        return reject_job(job_file, error)
    return drive(job).outcome


def drive(job: PersistJob, steps: PersistSteps | None = None) -> JobAnswer:
    """Run the steps of a job until it is answered; then remove it.

    No step is running any more when this returns or raises.

    Args:
        job: the job.
        steps: runs the steps; None calls the job's own methods.

    Raises:
        FileNotFoundError: the job is not there any more.
        RanksMissing: this rank's part is stored, other ranks' parts are not; the job stays staged.
        StoreError, StagingFull, StagingRefused, OSError: the job cannot be persisted now. It stays
            staged and nothing is lost; open it again later.
    """
    steps = job if steps is None else steps
    try:
        stored, outcome = steps.find_done()
        if outcome is None:
            if not stored:
                _store_groups(job, steps)
            outcome = steps.commit()
    except RecpointError as error:
        if classify(error) == "deferred":
            raise
        return JobAnswer(job.reject(error))
    return JobAnswer(job.finish(outcome), outcome)


def _store_groups(job: PersistJob, steps: PersistSteps) -> None:
    job.refuse_too_large()
    total = sum(group.staged_bytes for group in job.groups)
    done_bytes = 0

    def advance(staged_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += staged_bytes
        steps.advanced(done_bytes, total)

    budget = WriteBudget(_GROUPS_IN_FLIGHT, budget_bytes=_GROUPS_IN_FLIGHT * GROUP_BYTES)
    with (
        ReadScheduler(1, name="persist") as reads,
        WriteScheduler(budget, on_written=advance, name="persist") as writes,
    ):
        # In parallel with the groups: reading everything first would delay the first upload.
        verified = reads.begin(steps.verify)
        for group in job.groups:
            room = writes.reserve(group.staged_bytes)
            if verified.done():
                verified.result()  # raises if the slot is damaged, before more is stored
            if group.quantized:
                steps.quantize(group)
            steps.encode(group)
            writes.begin(room, partial(steps.upload, group))
        writes.finish()
        verified.result()


def classify(error: BaseException) -> Literal["rejected", "deferred"]:
    """Tell whether a job that failed with `error` can never succeed, or may succeed later.

    Faults of the store or of this host, refused access included, may be repaired, and a lost record
    may be restored: the job is deferred and stays staged. A job or slot of another user is deferred
    too, and is not answered. A fault of the job itself, or a decision of another writer, is final:
    the job is rejected.
    """
    retried = (
        StoreError,
        StagingFull,
        StagingRefused,
        NothingToRestore,
        RanksMissing,
        GenerationRecordLost,
    )
    if isinstance(error, RecpointError) and not isinstance(error, retried):
        return "rejected"
    return "deferred"


def reject_job(job_file: Path | str, error: RecpointError) -> Outcome:
    """Reject a job as `PersistJob.reject` does, even if its file cannot be read.

    The answer to an unreadable job takes step and generation from the file's name.

    Raises:
        FileNotFoundError: there is no such job (any more).
        RecpointError: the file cannot be read, and its name is not that of a job.
        StagingRefused, OSError: as `job_files.finish`.
    """
    try:
        job = PersistJob.open(job_file)
    except RecpointError:
        named = parse_job_stem(Path(job_file).stem)
        if named is None:
            raise
        outcome = _outcome(named[1], named[0], "0" * 32, error=error)
        finish(job_file, outcome)
        return outcome
    return job.reject(error)


def _outcome(
    step: int,
    generation: int,
    attempt: str,
    *,
    committed: Committed = _NOTHING,
    error: RecpointError | None = None,
) -> Outcome:
    return Outcome(
        step=step,
        generation=generation,
        attempt=attempt,
        result="committed" if error is None else "rejected",
        error_type="" if error is None else type(error).__name__,
        error="" if error is None else str(error)[:4000],
        stored_bytes=committed.stored_bytes,
        rank_bytes=committed.rank_bytes,
        links_to_read=committed.links_to_read,
        quantizers=committed.quantizers,
        finished_ms=now_ms(),
    )


def _tell_others(run: Run, job: Job, outcome: Outcome, error: RecpointError) -> None:
    if job.parts > 1:
        # Otherwise the other jobs could still commit the checkpoint: it would be sound, but nobody
        # expects it. If the removal fails, a sweep removes the part later.
        with suppress(RecpointError):
            remove_parts(run, job.ref, rank=job.rank)
    if isinstance(error, CheckpointCancelled) and not _looks_committed(run, job):
        return  # the trainer wanted this: a newer checkpoint replaces it
    rejection = Rejection(
        checkpoint=job.ref,
        error_type=outcome.error_type[:80],
        error=outcome.error[:1024],
        rejected_ms=outcome.finished_ms,
    )
    leave_rejection(run, job.rank, rejection)


def _looks_committed(run: Run, job: Job) -> bool:
    """Tell whether the stored chunks look like a checkpoint whose manifest was lost (§6.5)."""
    prefix = attempt_prefix(job.step, job.generation, job.attempt)
    return not any(run.store.list(MANIFEST_KEY.prefix)) and any(run.store.list(prefix))
