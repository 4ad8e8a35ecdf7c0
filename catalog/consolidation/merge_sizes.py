"""What merging the newest manifests of a chain would read, write and leave, for any number of them.

By manifests alone, each looked at once, so that all merges of a long chain are weighed for little.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recpoint.catalog.chunks.live_rows import Live, LiveRows
from recpoint.catalog.chunks.seen_rows import kept_by_ids, sections_touched
from recpoint.format.manifest import ChunkEntry, Manifest, TableSpec

__all__ = ["MergeSizes", "merge_sizes"]


@dataclass(frozen=True, kw_only=True)
class MergeSizes:
    """One of the merges that a chain allows: of its newest manifests, or of all.

    Attributes:
        merged: manifests that become one.
        links_before, links_after: manifests that a restore reads.
        read_bytes: of the sources' rows and of the newest state. A chunk counts once for each
            section of a large table (`seen_rows.SECTION_ROWS`) that it may hold rows of; less is
            read where newer links turn out to hold every row.
        write_bytes: into a full: its rows at the mean size of those stored; into an increment: at
            most, since which rows two links share follows from their ends only (`live_rows`).
        write_rows: rows in the chunks to be written; of an increment, too, at most.
        merged_rows: stored in the sources.
        restore_bytes_before, restore_bytes_after: that a restore reads; after as for
            `write_bytes`.
        restore_rows_after: stored in what a restore then reads; as for `write_rows`.
    """

    merged: int
    links_before: int
    links_after: int
    read_bytes: int
    write_bytes: int
    write_rows: int
    merged_rows: int
    restore_bytes_before: int
    restore_bytes_after: int
    restore_rows_after: int

    @property
    def into_full(self) -> bool:
        """Whether it merges the whole chain."""
        return self.links_after == 1

    @property
    def dead_rows(self) -> int | None:
        """Of the sources' rows, those that newer ones have replaced; None: only reading tells."""
        return self.merged_rows - self.write_rows if self.into_full else None


def merge_sizes(manifests: Sequence[Manifest]) -> tuple[MergeSizes, ...]:
    """All merges of a chain: of its two newest manifests, of the three newest, … of all of them.

    Args:
        manifests: of the chain, oldest first; of a full alone there is nothing to merge.
    """
    specs = manifests[-1].tables
    state = sum(entry.bytes for entry in manifests[-1].chunks if entry.table is None)
    sizes = [_stored(manifest) for manifest in manifests]
    before = sum(one.size_bytes for one in sizes) + state
    left_rows = sum(one.rows for one in sizes)
    left_bytes, merged_rows = before - state, 0
    reading, live = _Reading(specs), LiveRows()
    found = []
    for merged, (manifest, size) in enumerate(
        zip(reversed(manifests), reversed(sizes), strict=True), 1
    ):
        left_bytes -= size.size_bytes
        left_rows -= size.rows
        merged_rows += size.rows
        reading.add(manifest.chunks)
        if merged < len(manifests):
            live.add(manifest.chunks)
            written = live.most
        else:
            written = _as_a_full(manifests, specs)
        if merged > 1:
            found.append(
                MergeSizes(
                    merged=merged,
                    links_before=len(manifests),
                    links_after=len(manifests) - merged + 1,
                    read_bytes=reading.bytes + state,
                    write_bytes=written.size_bytes + state,
                    write_rows=written.rows,
                    merged_rows=merged_rows,
                    restore_bytes_before=before,
                    restore_bytes_after=left_bytes + written.size_bytes + state,
                    restore_rows_after=left_rows + written.rows,
                )
            )
    return tuple(found)


class _Reading:
    """Bytes of rows that a merge reads: some chunks of the largest tables more than once."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._specs = specs
        self._once = 0
        self._stored: dict[int, int] = {}
        self._again: dict[int, int] = {}  # of tables with chunks that lie in several sections

    def add(self, entries: Iterable[ChunkEntry]) -> None:
        for entry in entries:
            table, first, last = entry.table, entry.first_row, entry.last_row
            if table is None or first is None or last is None:
                continue
            self._once += entry.bytes
            self._stored[table] = self._stored.get(table, 0) + (entry.row_count or 0)
            if (touched := sections_touched(first, last)) > 1:
                self._again[table] = self._again.get(table, 0) + entry.bytes * (touched - 1)

    @property
    def bytes(self) -> int:
        return self._once + sum(
            again
            for table, again in self._again.items()
            if not kept_by_ids(self._specs[table].rows, self._stored[table])
        )


def _stored(manifest: Manifest) -> Live:
    """Rows in its chunks, and their bytes."""
    of_rows = [entry for entry in manifest.chunks if entry.table is not None]
    return Live(
        sum(entry.row_count or 0 for entry in of_rows), sum(entry.bytes for entry in of_rows)
    )


def _as_a_full(manifests: Sequence[Manifest], specs: Sequence[TableSpec]) -> Live:
    """Every row of every table, at the mean size of those stored."""
    sizes = [0] * len(specs)
    stored = [0] * len(specs)
    for manifest in manifests:
        for entry in manifest.chunks:
            if entry.table is not None:
                sizes[entry.table] += entry.bytes
                stored[entry.table] += entry.row_count or 0
    rows = [spec.rows for spec in specs]
    size_bytes = sum(
        size * of_table // max(1, there)
        for size, of_table, there in zip(sizes, rows, stored, strict=True)
    )
    return Live(sum(rows), size_bytes)
