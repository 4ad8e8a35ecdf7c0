"""One table of a chain on its way into a target: newest rows first, and each row once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from recpoint.catalog.chunks.chunk_reader import StoredRows
from recpoint.catalog.chunks.row_coverage import RowCoverage
from recpoint.catalog.chunks.seen_rows import SeenRows
from recpoint.catalog.restoring.restore_target import RowSink, TableTarget
from recpoint.catalog.restoring.row_placement import place
from recpoint.catalog.runs.chain import Chain
from recpoint.catalog.runs.lineage import Representation
from recpoint.errors import MalformedObject
from recpoint.format.manifest import ChunkEntry, Manifest

__all__ = ["TableRows", "WantedChunk"]


class WantedChunk(NamedTuple):
    """A chunk to read, and where it stands: `link` 0 is the newest checkpoint of the chain."""

    manifest: Manifest
    entry: ChunkEntry
    table: TableRows
    link: int
    is_last: bool  # of its link
    is_needed: bool  # whatever the chunks before it hold

    @property
    def memory_bytes(self) -> int:
        """What it takes once it is read, row ids included."""
        return self.entry.bytes + 8 * (self.entry.row_count or 0)


class TableRows:
    """Goes through the chunks of a table from the newest checkpoint of a chain to its full.

    A row that a newer checkpoint has brought is not decoded again. Checkpoints older than the one
    with which every row has been brought are not read: none of their bytes is used (format §6.3).
    Rows that the target does not want count for nothing; what is kept in mind is of wanted ones.

    Args:
        chain: what is restored.
        table: index into its tables.
        into: where the rows go.
    """

    def __init__(self, chain: Chain, table: int, into: TableTarget | RowSink) -> None:
        self._spec = chain.newest.tables[table]
        self._into = into
        self._wanted = range(self._spec.rows) if into.wanted is None else into.wanted
        self._links = _links(chain, table, self._spec.rows, self._wanted)
        self._full = chain.manifests[0]
        self._from_full = self._full.kind == "full"
        self._brought = 0
        self._seen: SeenRows | None = None
        self._coverage: RowCoverage | None = None
        self._complete_at: int | None = None  # the link with which the last row came
        self.left_out_bytes = 0

    @property
    def bytes(self) -> int:
        """What has to be read as far as the manifests tell."""
        return sum(entry.bytes for _, entries in self._links for entry in entries)

    def chunks(self) -> Iterator[WantedChunk]:
        """What to read, in this order; what `take` has shown not to be needed is left out."""
        newer = 0  # rows that the checkpoints before this one hold, counting some several times
        for link, (manifest, entries) in enumerate(self._links):
            needed = newer < len(self._wanted)
            for entry in entries:
                chunk = WantedChunk(manifest, entry, self, link, entry is entries[-1], needed)
                if not self.leaves_out(chunk):
                    yield chunk
            newer += sum(entry.row_count or 0 for entry in entries)

    def leaves_out(self, chunk: WantedChunk) -> bool:
        """Whether newer checkpoints have brought every row; counts the chunk as left out then."""
        if self._complete_at is None or self._complete_at >= chunk.link:
            return False
        self.left_out_bytes += chunk.entry.bytes
        return True

    def take(self, chunk: WantedChunk, stored: StoredRows) -> None:
        """Put the rows of a chunk in their places; in the order of `chunks`.

        Raises:
            MalformedObject: a row is in two chunks of one checkpoint.
        """
        manifest, entries = self._links[chunk.link]
        if self._coverage is None:
            counts = [entry.row_count or 0 for entry in entries]
            self._coverage = RowCoverage(rows=len(self._wanted), row_counts=counts)
        stored = stored.within(self._wanted)
        if len(stored.rows):
            self._coverage.add(stored.rows)
        positions = None
        if len(self._links) > 1:
            if self._seen is None:  # here, so that there are bits of one or two tables at a time
                self._seen = SeenRows(len(self._wanted))
            positions = self._seen.claim(stored.rows)
            if self._seen.all and self._complete_at is None:
                self._complete_at = chunk.link
        self._brought += len(stored.rows) if positions is None else positions.numel()
        if chunk.is_last:
            self._coverage.finish(key=Representation.of(manifest).key, table=self._spec.name)
            self._coverage = None
        if isinstance(self._into, TableTarget):
            place(stored, positions, self._into)
        else:
            self._into.take(stored, positions)
        if manifest.kind == "increment":
            self._into.mark(stored.rows)

    def finish(self) -> None:
        """Check that every row has come, after the last chunk.

        Of a whole table that follows from the manifest's row counts, of a part of it it does not.

        Raises:
            MalformedObject: the full of the chain does not hold a row that is wanted.
        """
        if self._from_full and self._brought != len(self._wanted):
            raise MalformedObject(
                Representation.of(self._full).key,
                found=f"{self._brought} rows of table {self._spec.name!r} from row "
                f"{self._wanted.start} on",
                expected=f"all {len(self._wanted)} to row {self._wanted.stop - 1}",
                next_step="restore an older checkpoint: recpoint list URL",
            )


def _links(
    chain: Chain, table: int, rows: int, wanted: range
) -> list[tuple[Manifest, list[ChunkEntry]]]:
    """The chunks of a table that may hold wanted rows, by checkpoint, newest first.

    Until a checkpoint that holds every row. What a manifest says of a chunk's first and last row is
    held against the chunk when that is read; that a full's chunks hold all that is wanted is
    counted at the end.
    """
    links: list[tuple[Manifest, list[ChunkEntry]]] = []
    for manifest in reversed(chain.manifests):
        of_table = [entry for entry in manifest.chunks if entry.table == table]
        entries = [entry for entry in of_table if _may_hold(entry, wanted)]
        if entries:
            links.append((manifest, entries))
        # They are disjoint, which is checked when they are read: so many rows are all rows.
        if sum(entry.row_count or 0 for entry in of_table) >= rows:
            break
    return links


def _may_hold(entry: ChunkEntry, wanted: range) -> bool:
    assert entry.first_row is not None and entry.last_row is not None  # as of all chunks of rows
    return entry.first_row < wanted.stop and wanted.start <= entry.last_row and bool(wanted)
