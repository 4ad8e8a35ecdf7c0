"""From a staged job to a committed checkpoint: the job as one object, and the order of its steps.

`PersistJob` is a job file that was opened once. `drive` runs its steps, overlapped, up to the
answer. It runs them through `Steps`: the object's own, or those of a workflow engine, which calls
each step of the object as a task.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, Self

from pydantic import ValidationError

from recpoint.catalog.persist.encode import encode_group, encoded_entries, upload_group
from recpoint.catalog.persist.plan import GROUP_BYTES, Group, plan_groups
from recpoint.catalog.persist.quantize import Choice, quantization_of, quantize_group
from recpoint.catalog.persist.ranks import (
    commit_parts,
    missing_ranks,
    own_part,
    ranks_missing,
    remove_parts,
    stored_fields,
    write_part,
)
from recpoint.catalog.persist.spool import empty_spool
from recpoint.catalog.run.commit import (
    Committed,
    check_fence,
    chunks_missing,
    commit,
    committed,
    not_there,
)
from recpoint.catalog.run.run import Run, leave_rejection
from recpoint.catalog.staging.area import finish, raise_if_cancelled, read_job
from recpoint.catalog.staging.job import StagedJob, open_slot
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
    RecpointError,
    RunRecordLost,
    StagingFull,
    StagingRefused,
    StaleWriter,
    StoreError,
)
from recpoint.format.job import Job, Outcome
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import MANIFEST_KEY, attempt_prefix, parse_job_stem
from recpoint.format.rejections import Rejection

__all__ = [
    "Answer",
    "Committed",
    "Found",
    "PersistJob",
    "Steps",
    "classify",
    "drive",
    "persist_job",
    "reject_job",
]

#: Groups that are worked on at once: one is prepared while the one before it is uploaded.
_GROUPS_IN_FLIGHT: Final = 2

#: Few attempts: whoever persists tries again by pauses of its own, which follow the interval.
_TIMEOUTS: Final = S3Timeouts(attempts=3)

#: What is told of a checkpoint that is not there.
_NOTHING: Final = Committed(0, 0, 0, 0, 0, ())

_REJECTED: Final = "nothing: the job is rejected, and the trainer stages its rows again"


class Found(NamedTuple):
    """What the store has of a job.

    Attributes:
        stored: the part of this rank, one of several, is written: no chunk may be written again.
        committed: the checkpoint, if an agent that was killed had committed it; else None.
    """

    stored: bool
    committed: Committed | None


class Answer(NamedTuple):
    """What a job was answered; `committed` is None if it was rejected."""

    outcome: Outcome
    committed: Committed | None = None


class PersistJob:
    """A staged job that is persisted: its file is opened once, and what follows from it is kept.

    The slot is checked and the chunks are planned at the first use; so is the store opened, which
    goes with the object. After a failure a new object opens all of it anew, since a slot may have
    changed, and credentials too. Steps may be called again, and after a kill by another process:
    each finds what it has done. Different groups may be at different steps at once.

    Attributes:
        path: the job file.
        job: what it says.
    """

    def __init__(self, path: Path, job: Job, store: Store | None = None) -> None:
        self.path = path
        self.job = job
        self._given = store
        self._chosen: dict[int, Choice] = {}

    @classmethod
    def open(cls, job_file: Path | str, *, store: Store | None = None) -> Self:
        """Read a job file.

        Args:
            job_file: the job; nothing else is needed.
            store: the store to write to; that of the job's run URL if None.

        Raises:
            FileNotFoundError: there is no such job (any more).
            FormatError: it is not a job, or not this run's.
            StagingRefused: it, or a directory above it, is not this user's own.
        """
        path = Path(job_file)
        return cls(path, read_job(path), store)

    @cached_property
    def store(self) -> Store:
        """The store of the run. A new client of an object store takes a fifth of a second."""
        if self._given is not None:
            return self._given
        return open_store(self.job.run_url, timeouts=_TIMEOUTS)

    @cached_property
    def staged(self) -> StagedJob:
        """The job with its slot.

        Raises:
            FormatError: its segments are not what its tables need.
            StagingError: its slot is missing, not a plain file, too short, or another user's.
        """
        return open_slot(self.path, self.job)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups of the job, each to be quantized if it says so, encoded and uploaded.

        Raises:
            FormatError, StagingError: the job cannot be persisted.
        """
        return tuple(plan_groups(self.staged))

    def raise_if_cancelled(self) -> None:
        """Stop where the trainer wants the job dropped, or its file is gone.

        Raises:
            CheckpointCancelled: the trainer does.
            FileNotFoundError: somebody has answered or removed the job.
        """
        raise_if_cancelled(self.path, self.job)

    # --- what the store has -----------------------------------------------------------------------

    def open_run(self) -> Run:
        """The run that the job is for, as it is there now.

        Raises:
            NothingToRestore: there is no run: a mount may be missing.
            ForeignObject: another run is there.
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

    def find_done(self) -> Found:
        """What is done of the job; the first step.

        Raises:
            CheckpointCancelled: the trainer wants it dropped.
            StaleWriter, MissingLink: it is not committed and never will be.
            GenerationRecordLost: nor will it be before the record of its generation is back.
            CommitConflict: a part of another snapshot of this step is there.
            FormatError: that part is damaged.
            ForeignObject, NothingToRestore, StoreError: as `open_run`, or not now.
        """
        self.raise_if_cancelled()
        run = self.open_run()
        # The part first: one that is gone by then may have been removed after the commit, which
        # the other look then finds.
        stored = self.job.ranks > 1 and own_part(run, self.job) is not None
        return Found(stored, self._committed(run))

    def ranks_awaited(self) -> tuple[int, ...]:
        """Ranks that a job whose part is stored still waits for; none: it can be gone on with.

        Raises:
            StoreError: the store cannot be read.
        """
        run = self.open_run()
        missing = missing_ranks(run, self.job)
        if not missing or self.job.rank in missing:
            return ()  # all are there; or parts were removed, as they are after a commit
        try:
            there = self._committed(run) is not None
        except (StaleWriter, MissingLink):
            return ()
        return () if there else missing

    def _committed(self, run: Run) -> Committed | None:
        """What was committed; of several ranks, this one's part is removed if it is there still."""
        job = self.job
        try:
            manifest = run.manifest(job.step, job.generation)
        except ObjectNotFound:
            check_fence(run, job.generation, job.step)
            return None
        if manifest.attempt != job.attempt:
            return None
        if job.ranks > 1:
            # One that was killed between commit and removal left it; and who commits may remove it
            # while its own agent is not yet told that it was written, which then writes it once
            # more.
            with suppress(StoreError):  # a sweep removes what is left
                remove_parts(run, job.ref, rank=job.rank)
        return committed(run, manifest, job.rank)

    # --- the steps of a group ---------------------------------------------------------------------

    def verify(self) -> None:
        """Check the digests of everything staged; MUST have succeeded before the commit.

        Raises:
            DigestMismatch: the slot is not what the trainer wrote.
            StagingError: it cannot be read.
        """
        self.staged.verify()

    def quantize(self, group: Group) -> str:
        """`quantize_group`, unless the job is to be dropped; path of the result."""
        self.raise_if_cancelled()
        return quantize_group(self.staged, group, self._chosen)

    def encode(self, group: Group) -> str:
        """`encode_group`, unless the job is to be dropped; path of the result."""
        self.raise_if_cancelled()
        return encode_group(self.staged, group)

    def upload(self, group: Group) -> int:
        """`upload_group`, unless the job is to be dropped; bytes of the group's chunks."""
        self.raise_if_cancelled()
        return upload_group(self.store, self.staged, group)

    def advanced(self, done_bytes: int, total_bytes: int) -> None:
        """Nobody is told."""

    # --- commit and answer ------------------------------------------------------------------------

    def commit(self) -> Committed:
        """Create the manifest of the job, all of whose groups are uploaded.

        With several ranks: write its part, and the manifest if all others are there.

        Raises:
            RanksMissing: others are not.
            CommitError, ChainError: it can never be committed.
            CheckpointCancelled: the trainer wants it dropped.
            ObjectNotFound: chunks that were uploaded are not there any more. The spool is empty
                now, so that the next try writes all of them again.
            StoreError: not now.
        """
        run = self.open_run()
        if self.job.ranks > 1:
            return self._commit_rank(run)
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
        return committed(run, manifest, self.job.rank)

    def _commit_rank(self, run: Run) -> Committed:
        job = self.job
        self.raise_if_cancelled()
        if own_part(run, job) is None:
            # Removed after a commit, or never written: then nobody has committed without it.
            there = self._committed(run)
            if there is not None:
                return there
            try:
                entries = self._entries()
            except ValueError:
                # A sweep has removed it since: all of it is written again.
                raise ranks_missing(job, (job.rank,)) from None
            self._require_uploaded(run, entries)
            write_part(run, self.staged, entries, quantization_of(self.staged, self.groups))
        manifest = commit_parts(run, job, self.path)
        return committed(run, manifest, job.rank)

    def _entries(self) -> list[ChunkEntry]:
        return [entry for group in self.groups for entry in encoded_entries(self.staged, group)]

    def _require_uploaded(self, run: Run, entries: list[ChunkEntry]) -> None:
        """That the store still has what the spool says was uploaded, maybe long ago.

        Rule 5 of the write order asks for it (format §6.1).
        """
        prefix = attempt_prefix(self.job.step, self.job.generation, self.job.attempt)
        missing = not_there(run.store, prefix, entries)
        if missing:
            empty_spool(self.staged)
            raise chunks_missing(self.job.ref, missing)

    def _manifest(self, entries: list[ChunkEntry]) -> Manifest:
        quantization = quantization_of(self.staged, self.groups)
        return Manifest(
            **stored_fields(self.job, entries, quantization),
            stands_for=None,
            tables=tuple(table.spec for table in self.job.tables),
            committed_ms=now_ms(),
        )

    def finish(self, there: Committed) -> Outcome:
        """Tell the trainer that the checkpoint is there, and remove the job.

        This is rule 7 of the staging order (format §7).

        Raises:
            StagingRefused, OSError: as `area.finish`.
        """
        outcome = _outcome(self.job.step, self.job.generation, self.job.attempt, there=there)
        finish(self.path, outcome)
        return outcome

    def reject(self, error: RecpointError) -> Outcome:
        """Tell the trainer that the checkpoint will never be there, and why; remove the job.

        Then leave word of it in the store, where that can be reached.

        Raises:
            StagingRefused, OSError: as `area.finish`.
        """
        job = self.job
        outcome = _outcome(job.step, job.generation, job.attempt, error=error)
        finish(self.path, outcome)
        # After the answer, since a store that is away must not keep the trainer waiting for it.
        with suppress(RecpointError):
            run = Run.open(self.store)
            if run.id == job.run:
                _tell_others(run, job, outcome, error)
        return outcome


class Steps(Protocol):
    """Who runs the steps of a job for `drive`, and so sees how far it is.

    Each returns, or raises, what the method of the same name of `PersistJob` does, when the step is
    over. `verify` and the `upload` of groups are called from threads of their own.
    """

    def find_done(self) -> Found:
        """The first step."""

    def verify(self) -> object:
        """Beside the groups."""

    def quantize(self, group: Group) -> object:
        """Of each group that has something to quantize."""

    def encode(self, group: Group) -> object:
        """Of each group, then."""

    def upload(self, group: Group) -> object:
        """Of each group, then."""

    def commit(self) -> Committed:
        """After all groups."""

    def advanced(self, done_bytes: int, total_bytes: int) -> object:
        """So many of the staged bytes are stored; called from the thread of `drive`."""


def persist_job(job_file: Path | str, *, store: Store | None = None) -> Outcome:
    """Take a staged job to its end: committed, or rejected for good; then the job is removed.

    May be killed anywhere and called again: it goes on under the same keys.

    Args:
        job_file: the job; nothing else is needed.
        store: the store to write to; that of the job's run URL if None.

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


def drive(job: PersistJob, steps: Steps | None = None) -> Answer:
    """Run the steps of a job up to its answer; then the job is removed.

    No step is at work any more when it returns or raises.

    Args:
        job: the job.
        steps: runs them; the job's own if None.

    Raises:
        FileNotFoundError: the job is not there any more.
        RanksMissing: its part is stored, those of other ranks are not; the job stays staged.
        StoreError, StagingFull, StagingRefused, OSError: not now; the job stays staged and nothing
            is lost. Open it again later.
    """
    steps = job if steps is None else steps
    try:
        stored, there = steps.find_done()
        if there is None:
            if not stored:
                _store_groups(job, steps)
            there = steps.commit()
    except RecpointError as error:
        if classify(error) == "deferred":
            raise
        return Answer(job.reject(error))
    return Answer(job.finish(there), there)


def _store_groups(job: PersistJob, steps: Steps) -> None:
    total = sum(group.staged_bytes for group in job.groups)
    done = 0

    def advance(staged_bytes: int) -> None:
        nonlocal done
        done += staged_bytes
        steps.advanced(done, total)

    budget = WriteBudget(_GROUPS_IN_FLIGHT, budget_bytes=_GROUPS_IN_FLIGHT * GROUP_BYTES)
    with (
        ReadScheduler(1, name="persist") as reads,
        WriteScheduler(budget, on_written=advance, name="persist") as writes,
    ):
        # Beside the groups: reading everything once more first would delay the first upload.
        verified = reads.begin(steps.verify)
        for group in job.groups:
            room = writes.reserve(group.staged_bytes)
            if verified.done():
                verified.result()  # of what is damaged nothing more need be stored
            if group.quantized:
                steps.quantize(group)
            steps.encode(group)
            writes.begin(room, partial(steps.upload, group))
        writes.finish()
        verified.result()


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


def reject_job(job_file: Path | str, error: RecpointError) -> Outcome:
    """`PersistJob.reject`, also of a job file that cannot be read: the answer goes by its name.

    Raises:
        FileNotFoundError: there is no such job (any more).
        RecpointError: it cannot be read, and has no name of a job.
        StagingRefused, OSError: as `area.finish`.
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
    there: Committed = _NOTHING,
    error: RecpointError | None = None,
) -> Outcome:
    return Outcome(
        step=step,
        generation=generation,
        attempt=attempt,
        result="committed" if error is None else "rejected",
        error_type="" if error is None else type(error).__name__,
        error="" if error is None else str(error)[:4000],
        stored_bytes=there.stored_bytes,
        rank_bytes=there.rank_bytes,
        links_to_read=there.links_to_read,
        quantizers=there.quantizers,
        finished_ms=now_ms(),
    )


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
