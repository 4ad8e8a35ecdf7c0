"""Commits a checkpoint: looks for its chunks once more, then creates its manifest, last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from recpoint.catalog.run.chain import check_link, resolve_chain
from recpoint.catalog.run.lineage import Representation, next_step_of_lost
from recpoint.catalog.run.run import Run, read_run_record
from recpoint.catalog.store.contract import Store
from recpoint.errors import (
    ChainError,
    CommitConflict,
    ForeignObject,
    FormatError,
    GenerationRecordLost,
    MalformedObject,
    MissingLink,
    ObjectNotFound,
    StaleWriter,
)
from recpoint.format.manifest import ChunkEntry, Manifest, Quantizer
from recpoint.format.naming import (
    CONSOLIDATED_KEY,
    END_KEY,
    GENERATION_KEY,
    MANIFEST_KEY,
    ManifestName,
    generation_in_key,
)
from recpoint.format.record_kinds import MANIFEST
from recpoint.format.records import MAX_RECORD_BYTES, CheckpointRef, pack_record

__all__ = [
    "Committed",
    "check_fence",
    "chunks_missing",
    "commit",
    "committed",
    "manifest_bytes",
    "not_there",
    "stored_sizes",
]


# Whether all chunks that a record is about to name are stored: the last look before it is written.
#
# A sweep on another host, or somebody by hand, may have removed what this host knows it has
# uploaded.


def stored_sizes(store: Store, prefix: str) -> dict[str, int]:
    """Length in bytes of each object whose key starts with `prefix`: one listing.

    Raises:
        StoreError: the store cannot be read.
    """
    return {info.key: info.size_bytes for info in store.list(prefix)}


def not_there(store: Store, prefix: str, entries: Iterable[ChunkEntry]) -> list[ChunkEntry]:
    """Those of `entries`, chunks under `prefix`, that are not stored in their length.

    Raises:
        StoreError: the store cannot be read.
    """
    sizes = stored_sizes(store, prefix)
    return [entry for entry in entries if sizes.get(entry.key) != entry.bytes]


def chunks_missing(ref: CheckpointRef, missing: list[ChunkEntry]) -> ObjectNotFound:
    """The error that says so of a staged job: it stays staged, and is written anew."""
    return ObjectNotFound(
        missing[0].key,
        found=f"{len(missing)} chunks missing, or of another length, that were uploaded for {ref}",
        expected="all that its manifest will name",
        next_step="nothing: the next try writes them again; a sweep on another host with a grace "
        "shorter than the store was away may have removed them",
    )


# What a committed checkpoint is, for the trainer and for who reports it.


class Committed(NamedTuple):
    """What a commit did: bytes of all chunks, their number, and when it was, for the lag.

    `rank_bytes`: of the chunks of one rank. `links_to_read`: manifests that a restore of it reads.
    `quantizers`: what its tables were quantized with, by that rank.
    """

    stored_bytes: int
    rank_bytes: int
    chunks: int
    committed_ms: int
    links_to_read: int
    quantizers: tuple[Quantizer, ...]


def committed(run: Run, manifest: Manifest, rank: int) -> Committed:
    """What is told of a checkpoint that is there, to the rank `rank` of its trainer."""
    return Committed(
        manifest.stored_bytes,
        sum(entry.bytes for entry in manifest.chunks if entry.rank == rank),
        len(manifest.chunks),
        manifest.committed_ms,
        _links_to_read(run, manifest),
        tuple(quantizer for quantizer in manifest.quantizers if quantizer.rank == rank),
    )


def _links_to_read(run: Run, manifest: Manifest) -> int:
    """Manifests that a restore of this checkpoint would read now."""
    as_taken = manifest.links.chain_length
    if as_taken == 1 or not run.consolidated():
        return as_taken
    try:
        chain = resolve_chain(run, ManifestName(manifest.step, manifest.generation))
    except (ChainError, FormatError, ObjectNotFound):
        return as_taken  # it is committed all the same, and a check says what is wrong before it
    return len(chain.manifests)


# Making a checkpoint exist: fence, parent, create-only, read back (format §6.1, write order, rules
# 4 to 6; §6.2).


def commit(
    run: Run, manifest: Manifest, *, expect_generation_newest: bool = True
) -> Literal["created", "already"]:
    """Create the manifest. Every chunk it names MUST be durable by now.

    The write order says so in rule 3 (format §6.1).

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
    """Whether a generation may still commit (format §6.1, write order, rule 4).

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
