"""Merges a chain into fewer manifests by moving stored rows; avoids damaged objects.

Moves the rows of some tables, newest source first (format §6.8, consolidation order, rule 3).

Merges a checkpoint's chain into fewer manifests by moving stored rows (format §6.8). The steps are
functions of a run and plain values, so that a workflow engine can run each as a task:
`plan_consolidation`, then `merge_part` for each part of the plan, one after another because each
needs its share of memory, then `commit_consolidation`. Meanwhile the caller holds a lease
(`leases`). `consolidate` does all of this by itself. A step, or the whole, may be killed and called
again: keys and bytes follow from the sources.

Consolidates around damaged objects, as a restore does (format §6.8, consolidation order, rule 3).
Plans are made from manifests alone, so a damaged chunk is found only when it is read; by then half
of the plan may be done. If another chain of the checkpoint does not need the manifest that names
the chunk, a new plan uses that chain. The chunks written for the old plan become orphans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import crc32c
import torch
from torch import Tensor

from recpoint.catalog.consolidate.moves import ChunkBuilder, MovedRows, read_moved
from recpoint.catalog.consolidate.plan import ConsolidationPlan, TablesPart, read_sources, writer
from recpoint.catalog.restore.chunks import StoreChunks, check_entry, check_stored, read_chunk
from recpoint.catalog.restore.rows import RowCoverage, SeenIds, SeenRows, sections_of
from recpoint.catalog.run.chain import DAMAGE, PassedOver, has_chunk_of
from recpoint.catalog.run.commit import manifest_bytes
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.stored_chunks import not_there, stored_sizes
from recpoint.catalog.store.contract import Store, host_seconds, now_ms
from recpoint.catalog.store.scheduler import ReadScheduler, WriteBudget, WriteScheduler
from recpoint.closing import Closing
from recpoint.errors import (
    CommitConflict,
    FormatError,
    MalformedObject,
    MissingLink,
    ObjectNotFound,
    RecpointError,
    StoreUnavailable,
)
from recpoint.format.chunk import Chunk, build_chunk
from recpoint.format.manifest import CheckedStripes, ChunkEntry, Manifest, Quantizer, StandsFor
from recpoint.format.naming import (
    ManifestName,
    attempt_prefix,
    parse_chunk_key,
    parse_chunk_name,
    sample_chunk_key,
    state_chunk_key,
)
from recpoint.format.record_kinds import CONSOLIDATED

__all__ = [
    "Consolidated",
    "NOTHING_DONE",
    "blamed_source",
    "commit_consolidation",
    "consolidate",
    "consolidate_around_damage",
    "merge_part",
    "passed_over_words",
]


#: Concurrent uploads. Each holds a chunk in memory, and the store's client one or two more copies.
_MERGE_UPLOADS: Final = 2


class Uploads(Closing):
    """Writes chunks in threads; leaving the context waits for those in flight.

    The first chunk is always written. It makes the attempt young, so that no sweep that begins
    after that removes the attempt's other chunks (format §6.8, consolidation order, rule 4). Other
    chunks that are already stored byte for byte are not written again.

    Args:
        store: the store to write to.
        prefix: the prefix of all keys.
        trust: whether chunks that are already stored may count as written.
    """

    def __init__(self, store: Store, prefix: str, *, trust: bool = True) -> None:
        self._store = store
        self._prefix = prefix
        self._trust = trust
        self._stored_sizes: dict[str, int] | None = None
        self._writes = WriteScheduler(WriteBudget(_MERGE_UPLOADS))
        self._entries: list[ChunkEntry] = []

    def close(self) -> None:
        """Wait for the chunks in flight."""
        self._writes.close()

    def put(self, entry: ChunkEntry, data: bytes) -> None:
        """Begin to write a chunk; raise the error of an earlier chunk, if there was one."""
        self._entries.append(entry)
        if self._stored_sizes is None:
            self._store.put(entry.key, data)
            self._stored_sizes = {}
            if self._trust:
                infos = self._store.list(self._prefix)
                self._stored_sizes = {info.key: info.size_bytes for info in infos}
            return
        room = self._writes.reserve(len(data))
        self._writes.begin(room, partial(self._write, entry, data))

    def finish(self) -> tuple[ChunkEntry, ...]:
        """Wait until all chunks are durable; return their entries in the order of `put`."""
        self._writes.finish()
        return tuple(self._entries)

    def _write(self, entry: ChunkEntry, data: bytes) -> None:
        assert self._stored_sizes is not None
        if self._stored_sizes.get(entry.key) == len(data) and self._is_good(entry, len(data)):
            return
        self._store.put(entry.key, data)

    def _is_good(self, entry: ChunkEntry, size_bytes: int) -> bool:
        try:
            stored = self._store.get(entry.key, max_bytes=size_bytes)
        except (ObjectNotFound, MalformedObject, StoreUnavailable):
            return False
        return len(stored) == size_bytes and crc32c.crc32c(stored) == entry.crc32c


def moved_chunk(chunk: Chunk, entry: ChunkEntry, attempt: str) -> tuple[ChunkEntry, bytes]:
    """Return a state or sample chunk for another attempt: same arrays, another key and header."""
    meta = chunk.meta.model_copy(update={"attempt": attempt})
    data = build_chunk(meta, list(chunk.sections.values()))
    named = parse_chunk_name(entry.key)
    assert named is not None  # ChunkEntry accepts only keys of chunks
    name = state_chunk_key if entry.content == "state" else sample_chunk_key
    key = name(meta.step, meta.generation, attempt, rank=entry.rank, number=named.number)
    changes = {"key": key, "bytes": len(data), "crc32c": crc32c.crc32c(data)}
    return ChunkEntry.model_validate(entry.model_dump() | changes), data


#: Chunks read at once, and chunks that may wait besides; each is in memory whole.
_READERS: Final = 2
_READ_AHEAD: Final = 1


def merge_part(
    run: Run,
    plan: ConsolidationPlan,
    part: TablesPart,
    *,
    on_read: Callable[[int], None] | None = None,
) -> tuple[ChunkEntry, ...]:
    """Move the rows of some tables, as one step of several; their chunks are durable on return.

    Args:
        run: the run.
        plan: from `plan_consolidation`.
        part: one of the plan's parts.
        on_read: called with the bytes of each chunk that was read, in this thread.

    Returns:
        The manifest entries of the new chunks.

    Raises:
        ObjectNotFound, ChainError, FormatError: a source is damaged or gone.
        StoreError: the store cannot be reached or refuses.
    """
    sources = read_sources(run, plan, tables=part.tables)
    prefix = attempt_prefix(*plan.target.name, plan.attempt)
    with (
        ReadScheduler(_READERS, read_ahead=_READ_AHEAD) as reads,
        Uploads(run.store, prefix) as uploads,
    ):
        for table in part.tables:
            merging = _TableMerge(run, plan, sources, table, reads, uploads, on_read)
            merging.run()
        return uploads.finish()


class _TableMerge:
    """Moves one table's rows, from the newest source to the oldest; each row once."""

    def __init__(
        self,
        run: Run,
        plan: ConsolidationPlan,
        sources: list[Manifest],
        table: int,
        reads: ReadScheduler,
        uploads: Uploads,
        on_read: Callable[[int], None] | None,
    ) -> None:
        self._chunks = StoreChunks(run.store)
        self._spec = sources[-1].tables[table]
        self._target = plan.target
        self._links = [
            (manifest, sorted(entries, key=lambda entry: entry.key))
            for manifest in reversed(sources)
            if (entries := [entry for entry in manifest.chunks if entry.table == table])
        ]
        self._reads = reads
        self._builder = ChunkBuilder(sources[-1], plan.attempt, table, uploads.put)
        self._on_read = on_read

    def run(self) -> None:
        stored = [entry.row_count or 0 for _, entries in self._links for entry in entries]
        for manifest, entries in self._links:
            for entry in entries:
                check_entry(manifest, entry)
        for section, section_seen in sections_of(self._spec.rows, sum(stored)):
            self._section(section, section_seen or SeenRows(len(section)))
        self._builder.finish()

    def _section(self, section: range, seen_rows: SeenRows | SeenIds) -> None:
        for manifest, entries in self._links:
            if seen_rows.all:
                break  # older links hold no row that is still needed (format §6.3)
            entries_here = [entry for entry in entries if _may_be_in(entry, section)]
            counts = [min(entry.row_count or 0, len(section)) for entry in entries_here]
            coverage = RowCoverage(rows=len(section), row_counts=counts)
            read = partial(read_moved, self._chunks, manifest)
            for entry, outcome in self._reads.in_order(entries_here, read):
                moved = outcome.result()
                if self._on_read is not None:
                    self._on_read(entry.bytes)
                self._take(moved, section, seen_rows, coverage)
            coverage.finish(key=Representation.of(manifest).key, table=self._spec.name)
        if self._target.form == "full" and not seen_rows.all:
            raise MalformedObject(
                Representation.of(self._links[-1][0]).key,
                found=f"a full that lacks rows of table {self._spec.name!r:.80}",
                expected="each row",
                next_step="restore an older checkpoint: recpoint list URL",
            )

    def _take(
        self,
        moved: MovedRows,
        section: range,
        seen_rows: SeenRows | SeenIds,
        coverage: RowCoverage,
    ) -> None:
        rows, first = _within(moved, section)
        if not len(rows):
            return
        coverage.add(rows)
        positions = seen_rows.claim(rows)
        self._builder.add(moved, first, first + len(rows), positions)


def _may_be_in(entry: ChunkEntry, section: range) -> bool:
    """Tell whether a chunk may hold rows of a section, by its first and last row in the manifest.

    Reading the chunk checks these (format §6.3, rule 5).
    """
    first, last = entry.first_row, entry.last_row
    assert first is not None and last is not None  # every row chunk has both
    return first < section.stop and last >= section.start


def _within(moved: MovedRows, section: range) -> tuple[range | Tensor, int]:
    """Return a chunk's row ids in a section, counted from its start; and their first position."""
    rows = moved.rows
    if isinstance(rows, range):
        first = max(rows.start, section.start)
        stop = max(first, min(rows.stop, section.stop))
        return range(first - section.start, stop - section.start), first - rows.start
    if rows[0] >= section.start and rows[-1] < section.stop:
        return (rows - section.start if section.start else rows), 0
    ends = torch.tensor([section.start, section.stop], device="cpu")
    first, stop = torch.searchsorted(rows, ends).tolist()
    return rows[first:stop] - section.start, first


#: If the checks before the commit took longer than this, they are made again, because the process
#: may have stood still in between, also while the host slept.
_LOOK_AGAIN_SECONDS: Final = 60.0
_LOOKS: Final = 3

#: A chunk that was this old when the manifest was created may have been too old for a sweep that
#: began before. Such a sweep stops removing at half of the second time after its own look.
_OLD_MS: Final = 30 * 60 * 1000
_SWEEPS_END_SECONDS: Final = 20.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """The outcome of a consolidation.

    Attributes:
        outcome: `"created"`: this call created the manifest; `"already"`: an earlier call did;
            `"not_needed"`: a full already restores the checkpoint.
        key: key of the consolidated manifest; empty if there is none.
        read_bytes: bytes read from the sources' chunks.
        written_bytes, chunks: bytes and number of the chunks that the manifest names.
        seconds: time that it took.
    """

    outcome: Literal["created", "already", "not_needed"]
    key: str
    read_bytes: int
    written_bytes: int
    chunks: int
    seconds: float


def consolidate(
    run: Run, plan: ConsolidationPlan, *, on_progress: Progress | None = None
) -> Consolidated:
    """Run all steps of a plan.

    Memory: less than 512 MB, whatever the size of the tables and the number of ranks; beside that,
    one whole manifest, and for each source the entries of its chunks of one part's tables.
    Persists, restores, sweeps and other consolidations may run at the same time. After a kill, a
    call with the same plan, or with a new plan of the same sources, continues with the same keys.

    Args:
        run: the run.
        plan: from `plan_consolidation`.
        on_progress: called with bytes read so far and bytes to read, in this thread.

    Raises:
        ObjectNotFound, ChainError, FormatError: a source is damaged, or was deleted after the plan
            was made; nothing is committed.
        CommitConflict: the key has another manifest.
        StoreError: the store cannot be reached or refuses.
    """
    started = time.monotonic()
    if not plan.needed:
        return Consolidated(
            outcome="not_needed", key="", read_bytes=0, written_bytes=0, chunks=0, seconds=0.0
        )
    manifest = _already(run, plan)
    if manifest is None or _has_gap(run, plan, manifest):
        entries: list[ChunkEntry] = []
        read = 0

        def account(bytes_read: int) -> None:
            nonlocal read
            read += bytes_read
            if on_progress is not None:
                on_progress(read, plan.read_bytes)

        # The lease protects the sources from a retention that may have begun (format §6.6).
        with reading(run, purpose="consolidate", covers=[run.manifest(*plan.target.name).ref]):
            for part in plan.parts:
                entries += merge_part(run, plan, part, on_read=account)
            outcome, manifest = commit_consolidation(run, plan, entries)
    else:
        outcome, read = "already", 0
    return Consolidated(
        outcome=outcome,
        key=plan.target.key,
        read_bytes=read + plan.state_bytes if read else 0,
        written_bytes=manifest.stored_bytes,
        chunks=len(manifest.chunks),
        seconds=time.monotonic() - started,
    )


def commit_consolidation(
    run: Run, plan: ConsolidationPlan, entries: Iterable[ChunkEntry]
) -> tuple[Literal["created", "already"], Manifest]:
    """Copy the checkpoint's state and create the consolidated manifest, as the last step.

    Args:
        run: the run.
        plan: from `plan_consolidation`.
        entries: the entries that `merge_part` returned for every part of the plan.

    Returns:
        `"created"` if this call created the manifest, `"already"` if another had; and the manifest.

    Raises:
        MissingLink: the checkpoint or its parent has been deleted.
        CommitConflict: the key has a manifest of another checkpoint or another attempt.
        ObjectNotFound, ChainError, FormatError: a source or one of the new chunks is damaged.
        MalformedObject: the manifest would be too large.
        StoreError: the store cannot be reached or refuses.
    """
    there = _already(run, plan)
    if there is not None and not _has_gap(run, plan, there):
        return "already", there
    sources = read_sources(run, plan, tables=())
    manifest = _manifest(plan, sources, [*entries, *_copy_state(run, plan, sources[-1])])
    data = manifest_bytes(
        manifest, next_step="nothing: the chain that the checkpoint has restores it"
    )
    _look_last(run, manifest, attempt_prefix(*plan.target.name, plan.attempt))
    key, target = plan.target.key, plan.target
    if run.records(CONSOLIDATED).create_packed(data, *target.name, target.after) == "created":
        _make_sure(run, plan, manifest)
        return "created", manifest
    there = _already(run, plan)
    if there is None:
        raise MissingLink(
            key,
            found="no manifest",
            expected="the manifest that another consolidation has just created",
            next_step="run the consolidation again",
        )
    _make_sure(run, plan, there)
    return "already", there


def _copy_state(run: Run, plan: ConsolidationPlan, newest: Manifest) -> tuple[ChunkEntry, ...]:
    # Always written, after everything else: on a local disk this makes the directory durable with
    # all chunks that an earlier call has put into it (format §6.8, consolidation order, rule 4).
    prefix = attempt_prefix(*plan.target.name, plan.attempt)
    with Uploads(run.store, prefix, trust=False) as uploads:
        for entry in newest.chunks:
            if entry.content == "rows":
                continue
            try:
                chunk = read_chunk(StoreChunks(run.store), newest, entry)
            except (FormatError, ObjectNotFound):
                if entry.content == "sample":
                    continue  # no restore needs samples (format §3.6)
                raise
            uploads.put(*moved_chunk(chunk, entry, plan.attempt))
        return uploads.finish()


def _make_sure(run: Run, plan: ConsolidationPlan, manifest: Manifest) -> None:
    """Write again what a sweep has removed since the checks (consolidation order, rule 6, §6.8).

    After this no sweep removes any of these chunks.
    """
    if _may_be_swept(run, plan, manifest):
        time.sleep(_SWEEPS_END_SECONDS)
    if not _has_gap(run, plan, manifest):
        return
    for part in plan.parts:
        merge_part(run, plan, part)
    _copy_state(run, plan, read_sources(run, plan, tables=())[-1])
    _check_all_there(run, manifest, attempt_prefix(*plan.target.name, plan.attempt))


def _may_be_swept(run: Run, plan: ConsolidationPlan, manifest: Manifest) -> bool:
    """Tell whether a sweep that looked before the manifest existed may have removed old chunks."""
    prefix, _, _ = manifest.chunks[0].key.rpartition("/")
    created = [info.modified_ms for info in run.store.list(plan.target.key)]
    chunks = [info.modified_ms for info in run.store.list(f"{prefix}/")]
    return bool(created and chunks) and max(created) - min(chunks) >= _OLD_MS


def _has_gap(run: Run, plan: ConsolidationPlan, manifest: Manifest) -> bool:
    """Tell whether chunks of the existing manifest are missing; the plan can write them again.

    Raises:
        CommitConflict: chunks are missing, but the manifest is of other sources than the plan's.
    """
    attempt = parse_chunk_key(manifest.chunks[0].key)
    assert attempt is not None  # ChunkEntry accepts only keys of chunks
    missing = not_there(run.store, attempt_prefix(*attempt), manifest.chunks)
    if missing and attempt.attempt != plan.attempt:
        raise CommitConflict(
            plan.target.key,
            found=f"a manifest of other sources, whose chunk {missing[0].key} is missing",
            expected="no manifest, or one whose chunks are all there",
            next_step="remove it, or consolidate another checkpoint",
        )
    return bool(missing)


def _already(run: Run, plan: ConsolidationPlan) -> Manifest | None:
    """Return the manifest under the plan's key; None if there is none.

    Raises:
        CommitConflict: the manifest is of another attempt.
    """
    try:
        manifest = run.read_manifest(plan.target)
    except ObjectNotFound:
        return None
    expected = run.manifest(*plan.target.name).attempt
    if manifest.attempt != expected:
        raise CommitConflict(
            plan.target.key,
            found=f"attempt {manifest.attempt}",
            expected=f"attempt {expected}",
            next_step="recpoint check URL; the two manifests contradict each other",
        )
    return manifest


def _manifest(
    plan: ConsolidationPlan, sources: list[Manifest], entries: list[ChunkEntry]
) -> Manifest:
    newest, oldest = sources[-1], sources[0]
    links = newest.links
    if links.base is None or links.parent is None:
        raise ValueError(f"{newest.ref} is a full")
    quantizers: dict[tuple[int, int], Quantizer] = {}
    for source in sources:
        quantizers.update(
            {(quantizer.table, quantizer.rank): quantizer for quantizer in source.quantizers}
        )
    quantized_by = [source.quantized_by for source in sources if source.quantized_by]
    changes = {
        "kind": oldest.kind,
        "base": oldest.base,
        "parent": oldest.parent,
        "chain_length": oldest.chain_length,
        # Chunks and quantizers keep the number of the part that they came with.
        "servers": max(source.servers or 0 for source in sources) or None,
        "stands_for": StandsFor(
            base=links.base, parent=links.parent, chain_length=links.chain_length
        ),
        "chunks": tuple(sorted(entries, key=lambda entry: entry.key)),
        "quantizers": tuple(quantizers[table_and_rank] for table_and_rank in sorted(quantizers)),
        "quantized_by": quantized_by[-1] if quantized_by else "",
        "state_bits": 16 if any(source.state_bits for source in sources) else None,
        "committed_ms": now_ms(),
        "stripes": CheckedStripes.joined(source.stripes for source in sources),
        "dirty_rows": sum(entry.row_count or 0 for entry in entries),
        "writer": writer(),
    }
    fields = {name: getattr(newest, name) for name in Manifest.model_fields}
    return Manifest.model_validate(fields | changes)


def _look_last(run: Run, manifest: Manifest, prefix: str) -> None:
    """Make the checks of consolidation order, rule 5 (format §6.8), right before the commit."""
    for _ in range(_LOOKS):
        began_seconds = host_seconds()
        _check_all_there(run, manifest, prefix)
        _check_still_wanted(run, manifest)
        if host_seconds() - began_seconds < _LOOK_AGAIN_SECONDS:
            return


def _check_all_there(run: Run, manifest: Manifest, prefix: str) -> None:
    sizes = stored_sizes(run.store, prefix)
    for entry in manifest.chunks:
        check_stored(manifest, entry, sizes)


def _check_still_wanted(run: Run, manifest: Manifest) -> None:
    """Check that the checkpoint, and the parent that the manifest will need, still exist.

    Rule 5 of the consolidation order requires this (format §6.8).
    """
    for ref in (manifest.ref, manifest.parent):
        if ref is None:
            continue
        name = ManifestName(ref.step, ref.generation)
        try:
            current = run.manifest(*name)
        except ObjectNotFound as error:
            raise MissingLink(
                Representation(name).key,
                found="no manifest any more",
                expected=f"{ref}, which is being consolidated or is the parent",
                next_step="nothing: a checkpoint that was deleted is not consolidated",
            ) from error
        if current.ref != ref:
            raise CommitConflict(
                Representation(name).key,
                found=f"attempt {current.attempt}",
                expected=f"attempt {ref.attempt}",
                next_step="make a new plan",
            )


#: The beginning of a report if there was nothing to merge.
NOTHING_DONE = "nothing done"


def consolidate_around_damage(
    run: Run,
    make_plan: Callable[[Sequence[PassedOver]], ConsolidationPlan],
    *,
    only_if_it_pays: bool = False,
    on_plan: Callable[[ConsolidationPlan], None] | None = None,
    on_progress: Progress | None = None,
) -> tuple[ConsolidationPlan, Consolidated | None]:
    """Consolidate a checkpoint by the cheapest of its chains that turns out to be good.

    Args:
        run: the run.
        make_plan: makes a plan that avoids the given manifests; called with none at first.
        only_if_it_pays: do nothing before a trigger is reached.
        on_plan: called with each plan that is begun.
        on_progress: see `consolidate`.

    Returns:
        The last plan, whose `passed_over` says what is damaged; and the outcome, None if nothing
        was done.

    Raises:
        ObjectNotFound, ChainError, FormatError: the first plan failed, and no other plan avoids the
            damaged manifest or chunk; nothing is committed.
        RecpointError: other errors of `make_plan` and `consolidate`.
    """
    avoid: tuple[PassedOver, ...] = ()
    first: RecpointError | None = None
    while True:
        try:
            plan = make_plan(avoid)
        except DAMAGE as error:
            raise first or error from None
        if only_if_it_pays and not plan.pays:
            return plan, None
        if on_plan is not None:
            on_plan(plan)
        try:
            return plan, consolidate(run, plan, on_progress=on_progress)
        except DAMAGE as error:
            first = first or error
            damaged_source = blamed_source(run, plan, error)
            if damaged_source is None:
                raise first from None
            avoid = (*avoid, damaged_source)


def blamed_source(run: Run, plan: ConsolidationPlan, error: RecpointError) -> PassedOver | None:
    """Return the plan's source that is damaged or names the damaged chunk; None if none of them.

    Raises:
        StoreError: the store cannot be reached.
    """
    for source in plan.sources:
        if source.key in error.subject:
            return PassedOver.of(source.key, error)
    for source in plan.sources:
        try:
            is_of_it = has_chunk_of(run.read_manifest(source), error)
        except DAMAGE:
            continue  # deleted meanwhile, or damaged in another way; the next plan finds out
        if is_of_it:
            return PassedOver.of(source.key, error)
    return None


def passed_over_words(plan: ConsolidationPlan) -> str:
    """Return what a plan passed over, as text to append to the outcome; empty if nothing."""
    return "".join(f"; passed over {key}: {error}" for key, error in plan.passed_over)
