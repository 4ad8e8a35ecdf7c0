"""Restoring a checkpoint: the newest whose chain is good (format §6.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.chain import Chain, resolve_chain
from recpoint.catalog.chunk_pool import ChunkPool
from recpoint.catalog.chunk_reader import (
    DecodedRows,
    check_entry,
    check_stored,
    read_rows,
    read_state,
)
from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.restore_target import (
    MemoryTarget,
    RestoreTarget,
    StateCheckingTarget,
    TableTarget,
    check_targets,
)
from recpoint.catalog.row_coverage import RowCoverage
from recpoint.catalog.run import Run
from recpoint.errors import (
    ChainError,
    FormatError,
    NothingToRestore,
    ObjectNotFound,
    RecpointError,
    SettingsError,
    UnsupportedVersion,
)
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import attempt_prefix, manifest_key, parse_chunk_key
from recpoint.format.records import CheckpointRef
from recpoint.kernels import row_gather

__all__ = [
    "MemoryTarget",
    "RestoreReport",
    "RestoreTarget",
    "Skipped",
    "StateCheckingTarget",
    "TableTarget",
    "restore",
]


class Skipped(NamedTuple):
    """A newer checkpoint that could not be restored, and why."""

    name: ManifestName
    error: str


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """What was restored, and what that took; `skipped` is newest first."""

    restored: CheckpointRef
    skipped: tuple[Skipped, ...]
    chain_length: int
    chunks_read: int
    bytes_read: int
    seconds: float


def restore(
    run: Run,
    target: RestoreTarget,
    *,
    step: int | None = None,
    generation: int | None = None,
    before: int | None = None,
    threads: int = 4,
    on_progress: Callable[[int, int], None] | None = None,
) -> RestoreReport:
    """Restore the newest good checkpoint of the live line, or the one that is named.

    Memory beyond the target's: `threads` + 2 chunks, one rank's state, and at most one bit a row
    of a table that is stored in several sets of rows.

    Args:
        run: the run.
        target: where everything goes. After an error its tables may hold anything.
        step: this checkpoint and no other.
        generation: with `step`: also one that is not on the live line.
        before: leave out this generation and later ones (`Run.claim_from_newest`).
        threads: chunks read at once.
        on_progress: called with bytes read so far and bytes to read, from this thread.

    Raises:
        NothingToRestore: no checkpoint, or none that is good; it says what was wrong with each.
        IncompatibleModel: the newest good one does not fit the target. Older ones are not tried.
        UnsupportedVersion: the newest was written by a later release. Older ones are not tried.
        FormatError, ChainError, ObjectNotFound: the named checkpoint is damaged.
        StoreError: the store cannot be read. That is no reason to go back in time either.
    """
    if threads < 1:
        raise SettingsError("threads", found=str(threads), expected="1 or more", next_step="set it")
    names = _candidates(run, step, generation, before)
    started = time.monotonic()
    skipped: list[Skipped] = []
    damaged: dict[str, RecpointError] = {}
    for name in names:
        try:
            chain = resolve_chain(run, name)
            reading = _Reading(run, chain, damaged, on_progress)
            reading.run(target, threads)
        except (FormatError, ChainError, ObjectNotFound) as error:
            if step is not None or isinstance(error, UnsupportedVersion):
                raise
            skipped.append(Skipped(name, f"{type(error).__name__}: {error}"))
            continue
        return RestoreReport(
            restored=chain.newest.ref,
            skipped=tuple(skipped),
            chain_length=len(chain.manifests),
            chunks_read=reading.chunks_read,
            bytes_read=reading.bytes_read,
            seconds=time.monotonic() - started,
        )
    if skipped:
        raise NothingToRestore(
            run.url,
            found="; ".join(f"{name}: {error}" for name, error in skipped),
            expected="one checkpoint whose chain is good",
            next_step=f"recpoint check {run.url} --level full",
        )
    raise NothingToRestore(
        run.url,
        found="no checkpoint on the live line",
        expected="at least one",
        next_step=f"recpoint list {run.url}; superseded ones are restored by step and generation",
    )


def _candidates(
    run: Run, step: int | None, generation: int | None, before: int | None
) -> list[ManifestName]:
    """What to try, in this order."""
    if step is None:
        if generation is not None:
            raise SettingsError(
                "generation", found="no step with it", expected="both", next_step="name the step"
            )
        return run.live_line(before=before)
    if generation is not None:
        # A person names it: whether it is on the live line does not matter (format §5), nor
        # whether the lineage can be followed at all.
        return [ManifestName(step, generation)]
    live = [name for name in run.live_line(before=before) if name.step == step]
    if live:
        return live
    others = [name for name in run.manifest_names() if name.step == step]
    raise NothingToRestore(
        f"{run.url}, step {step}",
        found=f"superseded only: {', '.join(map(str, others))}" if others else "no checkpoint",
        expected="a checkpoint of this step on the live line",
        next_step="name its generation too" if others else f"recpoint list {run.url}",
    )


class _Reading:
    """One chain on its way into a target."""

    def __init__(
        self,
        run: Run,
        chain: Chain,
        damaged: dict[str, RecpointError],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._store = run.store
        self._chain = chain
        self._damaged = damaged  # what is known of chunks that other chains of the run share
        self._on_progress = on_progress
        self._bytes_to_read = 0
        self.bytes_read = 0
        self.chunks_read = 0

    def run(self, target: RestoreTarget, threads: int) -> None:
        newest = self._chain.newest
        self._check_stored()
        targets = tuple(target.begin(newest))
        check_targets(newest, targets)
        wanted = [
            (manifest, entry)
            for manifest in self._chain.manifests
            for entry in manifest.chunks
            if entry.table is not None and targets[entry.table] is not None
        ]
        states = [entry for entry in newest.chunks if entry.content == "state"]
        self._bytes_to_read = sum(entry.bytes for _, entry in wanted)
        self._bytes_to_read += sum(entry.bytes for entry in states)
        with ChunkPool(threads) as pool:
            # The state first: when it is damaged, no table has been touched yet.
            state = read_state(self._store, newest, pool, self._account)
            if isinstance(target, StateCheckingTarget):
                target.check_state(newest, state)
            with torch.no_grad():
                self._write_rows(pool, wanted, targets)
        target.finish(newest, state)

    def _check_stored(self) -> None:
        """Find missing and truncated objects before anything is read or written."""
        needed = [
            (manifest, entry)
            for manifest in self._chain.manifests
            for entry in manifest.chunks
            if entry.content == "rows" or manifest is self._chain.newest
        ]
        prefixes = {
            attempt_prefix(*attempt)
            for _, entry in needed
            if (attempt := parse_chunk_key(entry.key)) is not None
        }
        sizes: dict[str, int] = {}
        for prefix in sorted(prefixes):
            sizes.update((info.key, info.size_bytes) for info in self._store.list(prefix))
        for manifest, entry in needed:
            if entry.key in self._damaged:
                raise self._damaged[entry.key]
            check_entry(manifest, entry)
            check_stored(manifest, entry, sizes)

    def _write_rows(
        self,
        pool: ChunkPool,
        wanted: Iterable[tuple[Manifest, ChunkEntry]],
        targets: Sequence[TableTarget | None],
    ) -> None:
        """Decode in threads, write here: in the order of the chain, so that the last one wins."""
        by_table = _by_table(wanted)
        jobs = (job for jobs in by_table.values() for job in jobs)
        last = {id(jobs[-1][1]) for jobs in by_table.values()}
        coverage: RowCoverage | None = None
        for (manifest, entry), outcome in pool.in_order(
            jobs, lambda job: read_rows(self._store, *job)
        ):
            if entry.table is None:
                continue
            spec, into = manifest.tables[entry.table], targets[entry.table]
            try:
                rows = outcome.result()
                if coverage is None:
                    entries = [other for _, other in by_table[manifest.step, entry.table]]
                    counts = [other.row_count or 0 for other in entries]
                    coverage = RowCoverage(rows=spec.rows, row_counts=counts)
                coverage.add(rows.rows)
                if id(entry) in last:
                    key = manifest_key(manifest.step, manifest.generation)
                    coverage.finish(key=key, table=spec.name)
                    coverage = None
            except (FormatError, ObjectNotFound) as error:
                self._damaged[entry.key] = error
                raise
            if into is not None:
                _write(rows, into)
            self._account(entry)

    def _account(self, entry: ChunkEntry) -> None:
        self.chunks_read += 1
        self.bytes_read += entry.bytes
        if self._on_progress is not None:
            self._on_progress(self.bytes_read, self._bytes_to_read)


def _by_table(
    wanted: Iterable[tuple[Manifest, ChunkEntry]],
) -> Mapping[tuple[int, int], list[tuple[Manifest, ChunkEntry]]]:
    """Chunks by step and table, in the order of the chain (steps ascend in it)."""
    by_table: dict[tuple[int, int], list[tuple[Manifest, ChunkEntry]]] = {}
    for manifest, entry in wanted:
        if entry.table is not None:
            by_table.setdefault((manifest.step, entry.table), []).append((manifest, entry))
    return by_table


def _write(rows: DecodedRows, into: TableTarget) -> None:
    """Put decoded rows in their places; ids and shapes have been checked against the table."""
    pairs = zip((rows.values, *rows.row_states), (into.values, *into.row_states), strict=True)
    ids: Tensor | None = None
    for part, dest in pairs:
        if dest is None:
            continue
        if isinstance(rows.rows, range):
            dest[rows.rows.start : rows.rows.stop].copy_(part)
            continue
        if ids is None or ids.device != dest.device:
            ids = rows.rows.to(dest.device)
        row_gather.scatter(part.to(dest.device), ids, dest)
