"""Reads a chain into a target: the state, then each row of each table once, newest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.restore.base_rows import BaseRows, base_entries
from recpoint.catalog.restore.chunks import (
    ChunkSource,
    ReadBuffers,
    StoredRows,
    look_at_stored,
    read_rows,
)
from recpoint.catalog.restore.placement import place
from recpoint.catalog.restore.rows import RowCoverage, SeenRows
from recpoint.catalog.restore.state import StateReading
from recpoint.catalog.restore.target import (
    RestoreTarget,
    RowSink,
    StateCheckingTarget,
    TableTarget,
    check_targets,
)
from recpoint.catalog.run.chain import Chain
from recpoint.catalog.run.lineage import Representation
from recpoint.catalog.store.scheduler import READ_SMALL_BYTES, WHOLE_CHUNK_BYTES, ReadScheduler
from recpoint.errors import FormatError, MalformedObject, ObjectNotFound, RecpointError
from recpoint.format.manifest import ChunkEntry, Manifest

__all__ = ["ChainReading"]


class WantedChunk(NamedTuple):
    """A chunk to read, and its place in the chain; `link` 0 is the newest checkpoint.

    Chunks of the base, whose rows are read for the residuals of the chain, have the link `BASE`.
    """

    manifest: Manifest
    entry: ChunkEntry
    table: ChainRows
    link: int
    is_last: bool  # the last chunk of its link
    is_needed: bool  # will be needed no matter which rows the chunks before it hold

    @property
    def memory_bytes(self) -> int:
        """Memory of the chunk after it is read, row ids included."""
        return self.entry.bytes + 8 * (self.entry.row_count or 0)


#: The link of chunks that are read for the residuals of newer links; these come first.
BASE: Final = -1


class ChainRows:
    """Goes through the chunks of a table from the newest checkpoint of a chain to its full.

    A row that a newer checkpoint has brought is not decoded again. After every row has been
    brought, older checkpoints are not read: none of their bytes is used (format §6.3). Only rows
    that the target wants are counted and remembered.

    Args:
        chain: the chain to restore.
        table: index into the tables of its newest manifest.
        sink: where the rows go.
    """

    def __init__(self, chain: Chain, table: int, sink: TableTarget | RowSink) -> None:
        self._spec = chain.newest.tables[table]
        self._sink = sink
        self._wanted_rows = range(self._spec.rows) if sink.wanted is None else sink.wanted
        self._links = _links(chain, table, self._spec.rows, self._wanted_rows)
        self._residual_chunks = sum(
            entry.scheme == "residual" for _, entries in self._links for entry in entries
        )
        self._base_manifest = chain.base
        self._base: BaseRows | None = None
        self._base_entries: list[ChunkEntry] = []
        if self._residual_chunks:
            self._base = BaseRows(chain.base, table, self._wanted_rows)
            self._base_entries = base_entries(chain.base, table, self._wanted_rows)
        self._full = chain.manifests[0]
        self._from_full = self._full.kind == "full"
        self._brought = 0
        self._seen_rows: SeenRows | None = None
        self._coverage: RowCoverage | None = None
        self._complete_at: int | None = None  # the link that brought the last missing row
        self.left_out_bytes = 0

    @property
    def bytes(self) -> int:
        """Most bytes to read, according to the manifests."""
        of_links = sum(entry.bytes for _, entries in self._links for entry in entries)
        return of_links + sum(entry.bytes for entry in self._base_entries)

    def chunks(self) -> Iterator[WantedChunk]:
        """Yield the chunks to read, in order; leaves out chunks that `take` found not needed."""
        for entry in self._base_entries:
            yield WantedChunk(self._base_manifest, entry, self, BASE, False, True)
        newer = 0  # rows in the newer checkpoints; a row in several of them counts several times
        for link, (manifest, entries) in enumerate(self._links):
            needed = newer < len(self._wanted_rows)
            for entry in entries:
                chunk = WantedChunk(manifest, entry, self, link, entry is entries[-1], needed)
                if not self.leaves_out(chunk):
                    yield chunk
            newer += sum(entry.row_count or 0 for entry in entries)

    def leaves_out(self, chunk: WantedChunk) -> bool:
        """Tell if newer checkpoints have brought every row; then count the chunk as left out."""
        if self._complete_at is None or self._complete_at >= chunk.link:
            return False
        self.left_out_bytes += chunk.entry.bytes
        return True

    def take(self, chunk: WantedChunk, stored: StoredRows) -> None:
        """Put the rows of a chunk in their places; call it in the order of `chunks`.

        Raises:
            MalformedObject: a row is in two chunks of one checkpoint.
        """
        if chunk.link == BASE:
            if self._base is not None:
                self._base.add(stored)
            return
        manifest, entries = self._links[chunk.link]
        if self._coverage is None:
            counts = [entry.row_count or 0 for entry in entries]
            self._coverage = RowCoverage(rows=len(self._wanted_rows), row_counts=counts)
        stored = stored.within(self._wanted_rows)
        if len(stored.rows):
            self._coverage.add(stored.rows)
        positions = None
        if len(self._links) > 1:
            if (
                self._seen_rows is None
            ):  # created late, so that only one or two tables have one at once
                self._seen_rows = SeenRows(len(self._wanted_rows))
            positions = self._seen_rows.claim(stored.rows)
            if self._seen_rows.all and self._complete_at is None:
                self._complete_at = chunk.link
        self._brought += len(stored.rows) if positions is None else positions.numel()
        if chunk.is_last:
            self._coverage.finish(key=Representation.of(manifest).key, table=self._spec.name)
            self._coverage = None
        if stored.scheme == "residual":
            self._put_residuals(stored, positions)
        else:
            self._put(stored, positions)
        if manifest.kind == "increment":
            self._sink.mark(stored.rows)
        if not self._residual_chunks or (chunk.is_last and chunk.link == self._complete_at):
            self._base = None  # frees its memory

    def _put(self, stored: StoredRows, positions: Tensor | None) -> None:
        if isinstance(self._sink, TableTarget):
            place(stored, positions, self._sink)
        else:
            self._sink.take(stored, positions)

    def _put_residuals(self, stored: StoredRows, positions: Tensor | None) -> None:
        assert self._base is not None  # a chunk of residuals was counted
        for rows in self._base.restored(stored, positions):
            self._put(rows, None)
        self._residual_chunks -= 1

    def finish(self) -> None:
        """Check, after the last chunk, that every row has come.

        For a whole table this follows from the manifest's row counts; for a part of a table it does
        not.

        Raises:
            MalformedObject: the full of the chain lacks a wanted row.
        """
        if self._from_full and self._brought != len(self._wanted_rows):
            raise MalformedObject(
                Representation.of(self._full).key,
                found=f"{self._brought} rows of table {self._spec.name!r} from row "
                f"{self._wanted_rows.start} on",
                expected=f"all {len(self._wanted_rows)} to row {self._wanted_rows.stop - 1}",
                next_step="restore an older checkpoint: recpoint list URL",
            )


def _links(
    chain: Chain, table: int, rows: int, wanted_rows: range
) -> list[tuple[Manifest, list[ChunkEntry]]]:
    """Return the chunks of a table that may hold wanted rows, by checkpoint, newest first.

    The list ends with the first checkpoint that holds every row. It relies on the first and last
    row that the manifest states for a chunk: these are compared when the chunk is read, and
    `ChainRows.finish` counts whether all wanted rows have come.
    """
    links: list[tuple[Manifest, list[ChunkEntry]]] = []
    for manifest in reversed(chain.manifests):
        of_table = [entry for entry in manifest.chunks if entry.table == table]
        entries = [entry for entry in of_table if _may_hold(entry, wanted_rows)]
        if entries:
            links.append((manifest, entries))
        # The chunks are disjoint, which is checked when they are read, so this many rows are all.
        if sum(entry.row_count or 0 for entry in of_table) >= rows:
            break
    return links


def _may_hold(entry: ChunkEntry, wanted_rows: range) -> bool:
    assert entry.first_row is not None and entry.last_row is not None  # every row chunk has both
    return (
        entry.first_row < wanted_rows.stop
        and wanted_rows.start <= entry.last_row
        and bool(wanted_rows)
    )


class ChainReading:
    """Restores one chain into a target: the whole chain, or what follows a version that it holds.

    Args:
        source: where the chunks are read from.
        chain: the chain to read. Its first manifest is a full, or an increment whose parent the
            target already holds in every row. If there are residuals, it names their base.
        damaged: errors of chunks by key, known from other chains of the run; new ones are added.
        on_progress: called with bytes read so far and bytes to read, in the thread of `run`.

    Attributes:
        chunks_read: number of chunks read so far.
        bytes_read: their bytes.
    """

    def __init__(
        self,
        source: ChunkSource,
        chain: Chain,
        damaged: dict[str, RecpointError],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._chain = chain
        self._damaged = damaged
        self._on_progress = on_progress
        self._tables: list[ChainRows] = []
        self._bytes_to_read = 0
        self.bytes_read = 0
        self.chunks_read = 0

    def run(self, target: RestoreTarget, threads: int) -> None:
        """Read the chain with `threads` threads.

        Raises:
            FormatError, ObjectNotFound: a chunk is damaged or missing; its key is the subject.
            IncompatibleModel: the checkpoint does not fit the target; nothing has been written.
            StoreError: the source cannot be read.
        """
        with ReadScheduler(threads) as reads:
            self._restore(target, reads)

    def _restore(self, target: RestoreTarget, reads: ReadScheduler) -> None:
        newest = self._chain.newest
        self._check_stored()
        targets = tuple(target.begin(newest))
        check_targets(newest, targets)
        self._tables = [
            ChainRows(self._chain, table, target)
            for table, target in enumerate(targets)
            if target is not None
        ]
        self._bytes_to_read = sum(table.bytes for table in self._tables)
        # The state comes first: if it is damaged, no table has been touched yet.
        states = StateReading(self._source, newest, reads, self._account, self._expect)
        state = states.for_target(target)
        if isinstance(target, StateCheckingTarget):
            target.check_state(newest, state)
        with torch.no_grad():
            self._write_rows(reads, self._tables)
        target.finish(newest, state)

    def _check_stored(self) -> None:
        """Find missing and truncated objects before anything is read or written."""
        for missing in look_at_stored(self._source, self._chain):
            if missing.entry.content != "sample":  # a restore does not need samples
                raise missing.error
        for manifest in self._chain.all_manifests:
            for entry in manifest.chunks:
                if entry.key in self._damaged:
                    raise self._damaged[entry.key]

    def _write_rows(self, reads: ReadScheduler, tables: Sequence[ChainRows]) -> None:
        """Read and check chunks in threads, decode them in this one; newest checkpoint first."""
        chunks = (chunk for table in tables for chunk in table.chunks())
        buffers = ReadBuffers()
        for chunk, outcome in reads.in_order(
            chunks,
            lambda chunk: read_rows(
                self._source,
                chunk.manifest,
                chunk.entry,
                buffers=buffers if chunk.entry.bytes > READ_SMALL_BYTES else None,
            ),
            size_bytes=_budgeted_bytes,
        ):
            if chunk.table.leaves_out(chunk):  # the table was completed after this read began
                self._show_progress()
                continue
            try:
                chunk.table.take(chunk, outcome.result())
            except (FormatError, ObjectNotFound) as error:
                self._damaged[chunk.entry.key] = error
                raise
            self._account(chunk.entry)
        for table in tables:
            table.finish()

    def _expect(self, size_bytes: int) -> None:
        self._bytes_to_read += size_bytes

    def _account(self, entry: ChunkEntry) -> None:
        self.chunks_read += 1
        self.bytes_read += entry.bytes
        self._show_progress()

    def _show_progress(self) -> None:
        if self._on_progress is not None:
            left_out = sum(table.left_out_bytes for table in self._tables)
            self._on_progress(self.bytes_read, self._bytes_to_read - left_out)


def _budgeted_bytes(chunk: WantedChunk) -> int:
    """Return the bytes that a chunk counts in the read budget.

    A chunk that may prove unneeded counts as a large one, so that few of them are read ahead.
    """
    size_bytes = chunk.memory_bytes
    if chunk.is_needed and size_bytes <= READ_SMALL_BYTES:
        return size_bytes
    return max(chunk.entry.bytes, WHOLE_CHUNK_BYTES)
