"""Moving the rows of a consolidation: some tables, newest source first (format §6.8 C3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.chunks.chunk_reader import check_entry
from recpoint.catalog.chunks.chunk_source import StoreChunks
from recpoint.catalog.chunks.row_coverage import RowCoverage
from recpoint.catalog.chunks.seen_rows import SeenIds, SeenRows, sections_of
from recpoint.catalog.consolidation.consolidate_plan import (
    ConsolidationPlan,
    TablesPart,
    read_sources,
)
from recpoint.catalog.consolidation.consolidate_upload import Uploads
from recpoint.catalog.consolidation.row_moves import ChunkBuilder, MovedRows, read_moved
from recpoint.catalog.runs.lineage import Representation
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.io_scheduler import ReadScheduler
from recpoint.errors import MalformedObject
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.format.naming import attempt_prefix

__all__ = ["merge_part"]

#: Chunks that are read at once, and those that may wait besides: each is in memory whole.
_READERS: Final = 2
_READ_AHEAD: Final = 1


def merge_part(
    run: Run,
    plan: ConsolidationPlan,
    part: TablesPart,
    *,
    on_read: Callable[[int], None] | None = None,
) -> tuple[ChunkEntry, ...]:
    """Move the rows of some tables; their chunks are durable when it returns. A step of many.

    Args:
        run: the run.
        plan: of `plan_consolidation`.
        part: one of the plan's.
        on_read: called with the bytes of each chunk that was read, from this thread.

    Returns:
        What the manifest will say of the chunks.

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
    """One table, from the newest source to the oldest; each row comes along once."""

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
        for section, seen in sections_of(self._spec.rows, sum(stored)):
            self._section(section, seen or SeenRows(len(section)))
        self._builder.finish()

    def _section(self, section: range, seen: SeenRows | SeenIds) -> None:
        for manifest, entries in self._links:
            if seen.all:
                break  # what is older holds nothing that counts (format §6.3)
            wanted = [entry for entry in entries if _may_be_in(entry, section)]
            counts = [min(entry.row_count or 0, len(section)) for entry in wanted]
            coverage = RowCoverage(rows=len(section), row_counts=counts)
            read = partial(read_moved, self._chunks, manifest)
            for entry, outcome in self._reads.in_order(wanted, read):
                moved = outcome.result()
                if self._on_read is not None:
                    self._on_read(entry.bytes)
                self._take(moved, section, seen, coverage)
            coverage.finish(key=Representation.of(manifest).key, table=self._spec.name)
        if self._target.form == "full" and not seen.all:
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
        seen: SeenRows | SeenIds,
        coverage: RowCoverage,
    ) -> None:
        rows, first = _within(moved, section)
        if not len(rows):
            return
        coverage.add(rows)
        positions = seen.claim(rows)
        self._builder.add(moved, first, first + len(rows), positions)


def _may_be_in(entry: ChunkEntry, section: range) -> bool:
    """By the ends that the manifest says, which a chunk has when it is read (format §6.3 R5)."""
    first, last = entry.first_row, entry.last_row
    assert first is not None and last is not None  # of a chunk of rows
    return first < section.stop and last >= section.start


def _within(moved: MovedRows, section: range) -> tuple[range | Tensor, int]:
    """The ids of a chunk's rows in a section, less the section's start; where they begin."""
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
