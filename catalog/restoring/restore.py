"""Restoring a checkpoint: the newest whose chain is good (format §6.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from recpoint.catalog.chunks.chunk_source import ChunkSource, StoreChunks
from recpoint.catalog.records.going import Going
from recpoint.catalog.records.validations import Doubts, Verdict, verdict_of
from recpoint.catalog.restoring.chain_reading import ChainReading
from recpoint.catalog.restoring.memory_target import MemoryTarget
from recpoint.catalog.restoring.reshard import TablePart
from recpoint.catalog.restoring.restore_order import RestoreOrder, Skipped
from recpoint.catalog.restoring.restore_target import (
    RestoreTarget,
    StateCheckingTarget,
    TableTarget,
)
from recpoint.catalog.restoring.selection import NEWEST, Selection, candidates
from recpoint.catalog.runs.chain import Chain, PassedOver, read_with_chain
from recpoint.catalog.runs.run import Run
from recpoint.catalog.runs.superseded import manifests_gone, superseded_alone, superseded_text
from recpoint.catalog.stores.run_url import naming_errors, naming_run
from recpoint.errors import (
    ChainError,
    FormatError,
    NothingToRestore,
    ObjectNotFound,
    RecpointError,
    RetentionRefused,
    SettingsError,
    UnsupportedVersion,
)
from recpoint.format.naming import ManifestName
from recpoint.format.records import CheckpointRef

__all__ = [
    "MemoryTarget",
    "RestoreReport",
    "RestoreTarget",
    "Skipped",
    "StateCheckingTarget",
    "TablePart",
    "TableTarget",
    "restore",
]


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What was restored, and what that took.

    Attributes:
        restored: the checkpoint.
        full: the checkpoint whose full the chain starts with; `restored` itself, if it is one.
        full_stored_bytes: of that full's chunks.
        validation: what validations of `restored` said when the restore began; None: it was never
            validated. Its digests were compared in either case.
        skipped: newer ones that were not restored, and why, newest first.
        passed_over: damaged manifests that a shorter chain would have used.
        chain_length: how many manifests were read.
        quantized: whether any rows of the chain had been quantized.
        chunks_read, bytes_read, seconds: of the chain that was restored.
    """

    restored: CheckpointRef
    full: CheckpointRef
    full_stored_bytes: int
    validation: Verdict | None
    skipped: tuple[Skipped, ...]
    passed_over: tuple[PassedOver, ...]
    chain_length: int
    quantized: bool
    chunks_read: int
    bytes_read: int
    seconds: float


def restore(
    run: Run,
    target: RestoreTarget,
    selection: Selection = NEWEST,
    *,
    before: int | None = None,
    damaged: Mapping[ManifestName, str] | None = None,
    leased: bool = False,
    threads: int = 4,
    on_progress: Callable[[int, int], None] | None = None,
    source: ChunkSource | None = None,
) -> RestoreReport:
    """Restore the newest good checkpoint of the live line, or the one that is named.

    One whose validation has failed, or that needs one whose validation has, counts as damaged: it
    is restored if it is named. One that was never validated is as good as one that was: all bytes
    that are read are compared with their digests anyway, and training that was committed would be
    lost, unless `selection` says how much of it may be. The report says which of the two was
    restored, and what was left for it.

    Rows are decoded once: a row that a newer checkpoint of the chain has brought is passed over in
    the older ones.

    Memory beyond the target's: `threads` + 3 chunks with their row ids, the state of the ranks that
    the target asks for, 8 MiB of rows a few times over, and two bits a row of the table that is
    being read, or of the rows of it that are wanted.

    Args:
        run: the run.
        target: where everything goes. After an error its tables may hold anything.
        selection: which one. What its `validated_within` costs is up to so many batches of each
            start, so it must be less than a life between two failures brings: where each is
            shorter, and nothing newer is validated meanwhile, all go on from the same checkpoint.
        before: leave out this generation and later ones (`Run.claim_from_newest`).
        damaged: without a step: checkpoints to skip, which the caller has found so, and how.
        leased: the caller holds a lease of everything: what a retention is deleting just as it
            comes is waited for, and passed over or refused, so that what is restored stays. Costs
            the read of one small record.
        threads: chunks read at once, not counting those of up to 2 MiB.
        on_progress: called with bytes read so far and bytes to read, from this thread.
        source: where chunks are read from; None: the run's store, from which records come always.

    Raises:
        SettingsError: `threads` cannot be.
        NothingToRestore: no checkpoint, or none that is good; it says what was wrong with each.
        IncompatibleModel: the newest good one does not fit the target. Older ones are not tried.
        UnsupportedVersion: the newest was written by a later release. Older ones are not tried.
        FormatError, ChainError, ObjectNotFound: the named checkpoint is damaged.
        RetentionRefused: with `leased`: the named checkpoint is being deleted.
        StoreError: the store cannot be read. That is no reason to go back in time either.
    """
    if threads < 1:
        raise SettingsError("threads", found=str(threads), expected="1 or more", next_step="set it")
    with naming_errors(run.url):
        going = Going.read(run, leased=leased)  # before a manifest is read
        names = candidates(run, selection, before=before)
        ask = not selection.named and names
        doubts = Doubts(run, validated_only=selection.validated_only) if ask else None
        order = RestoreOrder(names, doubts, selection, damaged=None if selection.named else damaged)
        source = StoreChunks(run.store) if source is None else source
        return _restore_first(
            run, source, target, order, names, doubts, going, threads, on_progress
        )


def _restore_first(
    run: Run,
    source: ChunkSource,
    target: RestoreTarget,
    order: RestoreOrder,
    names: Sequence[ManifestName],
    doubts: Doubts | None,
    going: Going,
    threads: int,
    on_progress: Callable[[int, int], None] | None,
) -> RestoreReport:
    """The first that is good; without `doubts` it is named, and has to be."""
    started = time.monotonic()
    damaged_chunks: dict[str, RecpointError] = {}

    def read(chain: Chain) -> ChainReading:
        going.require_staying(chain)
        reading = ChainReading(source, chain, damaged_chunks, on_progress)
        reading.run(target, threads)
        return reading

    for name in order:
        # Before anything is read: what was restored is not given up for a listing that fails.
        known = verdict_of(run, name) if doubts is None else doubts.known(name)
        try:
            reading, chain = read_with_chain(run, name, read, line=names)
        except (FormatError, ChainError, ObjectNotFound, RetentionRefused) as error:
            if doubts is None or isinstance(error, UnsupportedVersion):
                raise
            order.damaged(name, naming_run(f"{type(error).__name__}: {error}", run.url))
            continue
        return RestoreReport(
            restored=chain.newest.ref,
            full=chain.full.ref,
            full_stored_bytes=chain.full.stored_bytes,
            validation=known,
            skipped=tuple(order.skipped),
            passed_over=tuple(
                PassedOver(key, naming_run(error, run.url)) for key, error in chain.passed_over
            ),
            chain_length=len(chain.manifests),
            quantized=_quantized(chain),
            chunks_read=reading.chunks_read,
            bytes_read=reading.bytes_read,
            seconds=time.monotonic() - started,
        )
    if order.skipped:
        raise order.nothing_good(run, good="with a chain that is good")
    superseded = superseded_alone(run)
    if not superseded and (gone := manifests_gone(run)):
        raise gone
    others = f"; {superseded_text(superseded)}" if superseded else ""
    raise NothingToRestore(
        run.url,
        found=f"no checkpoint on the live line{others}",
        expected="at least one",
        next_step=f"recpoint list {run.url} --all; a superseded one is restored by step and "
        "generation",
    )


def _quantized(chain: Chain) -> bool:
    return any(c.scheme == "asymmetric" for m in chain.manifests for c in m.chunks)
