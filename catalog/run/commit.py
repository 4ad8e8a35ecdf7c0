"""Commits a manifest: fence, parent, create-only, read back (format §6.1, rules 4 to 6; §6.2)."""

from __future__ import annotations

from typing import Literal

from recpoint.catalog.run.chain import check_link, needed_beside
from recpoint.catalog.run.lineage import next_step_of_lost
from recpoint.catalog.run.manifest_pages import packed_manifest, write_pages
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.run_record import read_run_record
from recpoint.errors import (
    CommitConflict,
    ForeignObject,
    GenerationRecordLost,
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

__all__ = [
    "check_fence",
    "commit",
]


def commit(
    run: Run, manifest: Manifest, *, expect_generation_newest: bool = True
) -> Literal["created", "already"]:
    """Create the manifest. Every chunk that it names MUST be durable (§6.1, write order, rule 3).

    Any process may call this again with the same attempt, as often as it likes, even after the
    trainer was replaced: a committed checkpoint stays committed.

    Args:
        run: the run of the checkpoint.
        manifest: the checkpoint.
        expect_generation_newest: check the fence; off for work that no trainer owns.

    Returns:
        `"created"` if this call created the manifest, `"already"` if an earlier call did.

    Raises:
        StaleWriter: a newer trainer owns the run.
        MissingLink: the parent of this increment does not exist, or nothing in the store names this
            generation.
        GenerationRecordLost: the generation's record is lost. Once it is back, try again.
        ChainError: the parent exists, and the two contradict each other.
        CommitConflict: another attempt has this step and generation.
        ForeignObject: the manifest is of another run.
        RecordTooLarge: the manifest is larger than readers accept.
        FormatError: the manifest of its parent, or of this checkpoint in the store, is damaged.
        StoreError: the store refuses, or after several tries it is unknown whether it wrote.
    """
    key = MANIFEST_KEY.of(manifest.step, manifest.generation)
    if manifest.run != run.id:
        raise ForeignObject(
            key,
            found=f"a manifest of run {manifest.run}",
            expected=f"run {run.id} of {run.url}",
            next_step="commit it to the run on which its trainer was started",
        )
    try:
        if expect_generation_newest:
            check_fence(run, manifest.generation, manifest.step)
        if manifest.parent is not None:
            _check_parent(run, manifest)
    except (StaleWriter, MissingLink):
        # Both errors also occur after an earlier call committed and its answer was lost.
        if _is_there(run, manifest):
            return "already"
        raise
    if run.consolidated(of=ManifestName(manifest.step, manifest.generation)):
        # The checkpoint exists; retention may have deleted its own manifest (format §6.6).
        _check_ours(manifest, run.manifest(manifest.step, manifest.generation))
        return "already"
    packed = packed_manifest(
        manifest, next_step="fewer tables or ranks: each rank stores a chunk or more of each table"
    )
    name = ManifestName(manifest.step, manifest.generation)
    write_pages(run.store, packed)
    if run.records(MANIFEST).create_packed(packed.record, *name) == "created":
        return "created"
    _check_ours(manifest, run.manifest(manifest.step, manifest.generation))
    return "already"


def check_fence(run: Run, generation: int, step: int) -> None:
    """Check that a generation may still commit (format §6.1, write order, rule 4).

    Args:
        run: the run.
        generation: the generation of the checkpoint.
        step: the step of the checkpoint, for errors.

    Raises:
        StaleWriter: a newer trainer owns the run.
        GenerationRecordLost: this generation's record is lost: the generation has checkpoints or
            an end record, or comes right after the newest. It can commit once the record is back.
        MissingLink: nothing in the store names this generation, so the store is of an earlier time.
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
        # The next generation may have lost its record before its first checkpoint; `relink` takes
        # it too.
        named = any(
            generation_in_key(info.key) == generation
            for prefix in (MANIFEST_KEY.prefix, CONSOLIDATED_KEY.prefix, END_KEY.of(generation))
            for info in run.store.list(prefix)
        )
        known = named or generation == newest + 1
        if not known and newest == 0:
            read_run_record(run.store)  # raises if the whole run is gone, as with a lost mount
        raise (GenerationRecordLost if known else MissingLink)(
            GENERATION_KEY.of(generation),
            found=f"no generation record; generation {newest} is the newest that has one",
            expected=f"the record of the trainer that took step {step}",
            next_step=next_step_of_lost(generation, never_committed=not named)
            if known
            else "put it back from a backup; or start the trainer again, which goes on from the "
            "newest checkpoint there is",
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
            expected=f"{parent}, the parent of {manifest.ref}",
            next_step="let the trainer write a full checkpoint",
        ) from error
    check_link(manifest, found)
    needed_beside([manifest], run.read_manifest)  # raises if the base of residuals is gone


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
            next_step="nothing: another writer committed this step first, and its manifest stays",
        )
