"""Estimates what each merge of the newest manifests of a chain would read, write and leave.

The estimate uses manifests alone and goes through each once, so that weighing all merges of a long
chain is cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from recpoint.catalog.consolidate.merged_manifest import MergedManifest
from recpoint.catalog.restore.rows import Live, LiveRows, kept_by_ids, sections_touched
from recpoint.format.manifest import ChunkEntry, Manifest, TableSpec
from recpoint.format.paging import manifest_fits

__all__ = [
    "MergeSizes",
    "merge_sizes",
]


@dataclass(frozen=True, kw_only=True)
class MergeSizes:
    """One of the merges that a chain allows: of its newest manifests, or of all.

    Attributes:
        merged: number of manifests that become one.
        links_before, links_after: number of manifests that a restore reads.
        read_bytes: bytes of the sources' rows and of the newest state. A chunk counts once for each
            section of a large table (`rows.SECTION_ROWS`) that it may hold rows of; less is read if
            newer links turn out to hold every row.
        write_bytes: bytes to write. For a full, an estimate: its rows at the mean size of the
            stored rows. For an increment, an upper bound: manifests tell only roughly which rows
            two links share (`LiveRows`).
        write_rows: rows to write; for an increment, an upper bound.
        merged_rows: rows stored in the sources.
        restore_bytes_before, restore_bytes_after: bytes that a restore reads; after the merge as
            exact as `write_bytes`.
        restore_rows_after: stored rows that a restore reads after the merge, as exact as
            `write_rows`.
        most_manifest_bytes: the most bytes of the merge's manifest (`merged_manifest`).
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
    most_manifest_bytes: int

    @property
    def into_full(self) -> bool:
        """Whether it merges the whole chain."""
        return self.links_after == 1

    @property
    def may_be_too_large(self) -> bool:
        """Whether its manifest may be larger than readers accept (format §4)."""
        return not manifest_fits(self.most_manifest_bytes, 0)

    @property
    def dead_rows(self) -> int | None:
        """Number of source rows that newer rows replace; None if only reading chunks can tell."""
        return self.merged_rows - self.write_rows if self.into_full else None


def merge_sizes(manifests: Sequence[Manifest]) -> tuple[MergeSizes, ...]:
    """Return all merges of a chain: of its two newest manifests, the three newest, … all of them.

    Residuals are not merged into a full (format §6.8, consolidation order, rule 1): if there are
    any, the last merge is of all increments.

    Args:
        manifests: the manifests of the chain, oldest first; a full alone allows no merge.
    """
    has_residuals = any(manifest.needed_base is not None for manifest in manifests)
    specs = manifests[-1].tables
    state = sum(entry.bytes for entry in manifests[-1].chunks if entry.table is None)
    sizes = [_stored(manifest) for manifest in manifests]
    bytes_before = sum(table_sizes.size_bytes for table_sizes in sizes) + state
    left_rows = sum(table_sizes.rows for table_sizes in sizes)
    left_bytes, merged_rows = bytes_before - state, 0
    reading, live, record = _RowReads(specs), LiveRows(), MergedManifest(specs)
    sizes_of_merges = []
    for merged, (manifest, size) in enumerate(
        zip(reversed(manifests), reversed(sizes), strict=True), 1
    ):
        left_bytes -= size.size_bytes
        left_rows -= size.rows
        merged_rows += size.rows
        reading.add(manifest.chunks)
        record.add(manifest)
        if merged < len(manifests):
            live.add(manifest.chunks)
            written = live.most
        else:
            written = _as_a_full(manifests, specs)
        if merged > 1 and not (has_residuals and merged == len(manifests)):
            sizes_of_merges.append(
                MergeSizes(
                    merged=merged,
                    links_before=len(manifests),
                    links_after=len(manifests) - merged + 1,
                    read_bytes=reading.bytes + state,
                    write_bytes=written.size_bytes + state,
                    write_rows=written.rows,
                    merged_rows=merged_rows,
                    restore_bytes_before=bytes_before,
                    restore_bytes_after=left_bytes + written.size_bytes + state,
                    restore_rows_after=left_rows + written.rows,
                    most_manifest_bytes=record.most_bytes,
                )
            )
    return tuple(sizes_of_merges)


class _RowReads:
    """Counts the bytes of rows that a merge reads; it reads some chunks of large tables again."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._specs = specs
        self._once = 0
        self._stored: dict[int, int] = {}
        self._repeated_bytes: dict[int, int] = {}  # bytes read again, of chunks in several sections

    def add(self, entries: Iterable[ChunkEntry]) -> None:
        for entry in entries:
            table, first, last = entry.table, entry.first_row, entry.last_row
            if table is None or first is None or last is None:
                continue
            self._once += entry.bytes
            self._stored[table] = self._stored.get(table, 0) + (entry.row_count or 0)
            if (touched := sections_touched(first, last)) > 1:
                self._repeated_bytes[table] = self._repeated_bytes.get(table, 0) + entry.bytes * (
                    touched - 1
                )

    @property
    def bytes(self) -> int:
        return self._once + sum(
            repeated_bytes
            for table, repeated_bytes in self._repeated_bytes.items()
            if not kept_by_ids(self._specs[table].rows, self._stored[table])
        )


def _stored(manifest: Manifest) -> Live:
    """Return the rows in a manifest's chunks, and their bytes."""
    of_rows = [entry for entry in manifest.chunks if entry.table is not None]
    return Live(
        sum(entry.row_count or 0 for entry in of_rows), sum(entry.bytes for entry in of_rows)
    )


def _as_a_full(manifests: Sequence[Manifest], specs: Sequence[TableSpec]) -> Live:
    """Return every row of every table, at the mean size of the stored rows."""
    sizes = [0] * len(specs)
    stored = [0] * len(specs)
    for manifest in manifests:
        for entry in manifest.chunks:
            if entry.table is not None:
                sizes[entry.table] += entry.bytes
                stored[entry.table] += entry.row_count or 0
    rows = [spec.rows for spec in specs]
    size_bytes = sum(
        size * of_table // max(1, stored_rows)
        for size, of_table, stored_rows in zip(sizes, rows, stored, strict=True)
    )
    return Live(sum(rows), size_bytes)
