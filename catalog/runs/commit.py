"""Making a checkpoint exist: fence, parent, create-only, read back (format §6.1 W4-W5, §6.2)."""

from __future__ import annotations

from typing import Literal

from recpoint.catalog.runs.chain import check_link
from recpoint.catalog.runs.lineage import Representation, next_step_of_lost
from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.run_record import read_run_record
from recpoint.errors import (
    CommitConflict,
    ForeignObject,
    GenerationRecordLost,
    MalformedObject,
    MissingLink,
    ObjectNotFound,
    StaleWriter,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    CONSOLIDATED_KEY,
    END_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    ManifestName,
    generation_in_key,
)
from recpoint.format.record_kinds import MANIFEST
from recpoint.format.records import MAX_RECORD_BYTES, pack_record

__all__ = ["check_fence", "commit", "manifest_bytes"]


def commit(
    run: Run, manifest: Manifest, *, expect_generation_newest: bool = True
) -> Literal["created", "already"]:
    """Create the manifest. Every chunk it names MUST be durable by now (format §6.1 W3).

    May be called again with the same attempt as often as one likes, by any process, also after
    the trainer has been replaced: what has been committed stays committed.

    Args:
        run: the run it belongs to.
        manifest: the checkpoint.
        expect_generation_newest: check the fence; off for work that no trainer owns.

    Returns:
        `"created"` when this call made it exist, `"already"` when an earlier one had.

    Raises:
        StaleWriter: a newer trainer owns the run.
        MissingLink: the checkpoint that this increment was taken after is not there; or there is
            no trace of this generation.
        GenerationRecordLost: it has no record. Once that is back, try again.
        ChainError: it is there, and the two contradict each other.
        CommitConflict: another attempt has this step and generation.
        ForeignObject: the manifest is of another run.
        FormatError: the manifest is too large; or its parent's is damaged, or what is there is.
        StoreError: the store refuses, or it is unknown after several tries whether it wrote.
    """
    key = MANIFEST_KEY.of(manifest.step, manifest.generation)
    if manifest.run != run.id:
        raise ForeignObject(
            key,
            found=f"a manifest of run {manifest.run}",
            expected=f"run {run.id} of {run.url}",
            next_step="commit it to the run its trainer was started on",
        )
    try:
        if expect_generation_newest:
            check_fence(run, manifest.generation, manifest.step)
        if manifest.parent is not None:
            _check_parent(run, manifest)
    except (StaleWriter, MissingLink):
        # Both also come up when an earlier call of ours committed and its answer got lost.
        if _is_there(run, manifest):
            return "already"
        raise
    if run.consolidated(of=ManifestName(manifest.step, manifest.generation)):
        # It exists; its own manifest, if it had one, may have been let go of (format §6.6).
        _check_ours(manifest, run.manifest(manifest.step, manifest.generation))
        return "already"
    data = manifest_bytes(
        manifest, next_step="fewer tables or ranks: each rank stores a chunk or more of each table"
    )
    name = ManifestName(manifest.step, manifest.generation)
    if run.records(MANIFEST).create_packed(data, *name) == "created":
        return "created"
    _check_ours(manifest, run.manifest(manifest.step, manifest.generation))
    return "already"


def manifest_bytes(manifest: Manifest, *, next_step: str) -> bytes:
    """What is stored of a manifest.

    Args:
        manifest: it.
        next_step: what a person can do about one that is too large.

    Raises:
        MalformedObject: it is larger than any reader takes (format §4).
    """
    try:
        return pack_record(manifest)
    except ValueError as error:
        raise MalformedObject(
            Representation.of(manifest).key,
            found=f"a manifest of {len(manifest.chunks):,} chunks: {error!s:.200}",
            expected=f"at most {MAX_RECORD_BYTES} bytes: about 250,000 chunks",
            next_step=next_step,
        ) from error


def check_fence(run: Run, generation: int, step: int) -> None:
    """Whether a generation may still commit (format §6.1 W4).

    Args:
        run: the run.
        generation: whose checkpoint it is.
        step: of that checkpoint, for errors.

    Raises:
        StaleWriter: a newer trainer owns the run.
        GenerationRecordLost: none does, but the record of this generation, which has checkpoints
            or an end record, or comes right after the newest, is lost. More can be committed once
            it is back.
        MissingLink: it is none of these: the store is that of an earlier time.
        NothingToRestore: there is no run any more.
        StoreError: the store cannot be read.
    """
    newest = max(run.generation_numbers(), default=0)
    if newest > generation:
        raise StaleWriter(
            GENERATION_KEY.of(generation),
            found=f"generation {newest} as the newest of the run",
            expected=f"generation {generation}, which took step {step}",
            next_step="nothing, if the trainer was restarted; else stop the second trainer",
        )
    if newest < generation:
        # The next one may have lost its record before its first checkpoint: `relink` takes it too.
        named = any(
            generation_in_key(info.key) == generation
            for prefix in (MANIFEST_KEY.prefix, CONSOLIDATED_KEY.prefix, END_KEY.of(generation))
            for info in run.store.list(prefix)
        )
        known = named or generation == newest + 1
        if not known and newest == 0:
            read_run_record(run.store)  # of a store that is away all is gone, this too
        raise (GenerationRecordLost if known else MissingLink)(
            GENERATION_KEY.of(generation),
            found=f"no generation record; generation {newest} is the newest that has one",
            expected=f"that of the trainer which took step {step}",
            next_step=next_step_of_lost(generation, never_committed=not named)
            if known
            else "put it back from a backup; or start the trainer again, which goes on from what "
            "is there",
        )


def _check_parent(run: Run, manifest: Manifest) -> None:
    parent = manifest.parent
    if parent is None:
        return
    try:
        found = run.manifest(parent.step, parent.generation)
    except ObjectNotFound as error:
        raise MissingLink(
            MANIFEST_KEY.of(parent.step, parent.generation),
            found="no manifest",
            expected=f"{parent}, after which {manifest.ref} was taken",
            next_step="let the trainer write a full checkpoint",
        ) from error
    check_link(manifest, found)


def _is_there(run: Run, manifest: Manifest) -> bool:
    try:
        there = run.manifest(manifest.step, manifest.generation)
    except ObjectNotFound:
        return False
    return there.ref == manifest.ref


def _check_ours(manifest: Manifest, there: Manifest) -> None:
    if there.attempt != manifest.attempt:
        raise CommitConflict(
            MANIFEST_KEY.of(manifest.step, manifest.generation),
            found=f"attempt {there.attempt}",
            expected=f"attempt {manifest.attempt}",
            next_step="keep what is there: another writer has committed this step first",
        )
