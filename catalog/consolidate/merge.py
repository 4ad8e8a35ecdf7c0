"""Moves the rows of some tables into new chunks (format §6.8, consolidation order, rule 3).

The newest source goes first, so each row is taken once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import crc32c
import torch
from torch import Tensor

from recpoint.catalog.consolidate.moves import ChunkBuilder, MovedRows, read_moved
from recpoint.catalog.consolidate.plan import ConsolidationPlan, TablesPart, read_sources
from recpoint.catalog.restore.chunks import StoreChunks, check_entry
from recpoint.catalog.restore.rows import RowCoverage, SeenIds, SeenRows, sections_of
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.scheduler import ReadScheduler, WriteBudget, WriteScheduler
from recpoint.closing import Closing
from recpoint.errors import MalformedObject, ObjectNotFound, StoreUnavailable
from recpoint.format.chunk import Chunk, build_chunk
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import (
    attempt_prefix,
    parse_chunk_name,
    sample_chunk_key,
    state_chunk_key,
)

__all__ = [
    "Uploads",
    "merge_part",
    "moved_chunk",
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
