"""Bounds the manifest of a merge before anything is moved, from the manifests of its sources.

A merge whose manifest is larger than readers accept would be found out after all its rows were
written. Nothing is lost, but the next try would move them all again.

A chunk of a merge has rows of one kind (`moves.RowKind`). It is written when it is full, when too
many rows wait, or at the end of its table. So a merge has at most this many chunks of a table:

- full chunks: the bytes of its rows, divided by those of a chunk;
- chunks written because too many rows waited: each has more than its share of the buffer, which all
  kinds of the table have together; and each was added to since the last one of its kind;
- one of each kind at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from recpoint.catalog.consolidate import moves
from recpoint.catalog.persist import plan
from recpoint.catalog.persist.record_sizes import row_entry_bytes
from recpoint.catalog.restore.rows import sections_touched
from recpoint.format.first_values import most_first_rows
from recpoint.format.manifest import Manifest, TableSpec
from recpoint.format.records import body_bytes

__all__ = ["MergedManifest"]

#: Most bytes of one row id in a row set, as in `moves`.
_ID_BYTES: Final = 9
#: Rows with parameters of 16 bits and rows with parameters of 32 bits are of two kinds.
_PARAMETER_DTYPES: Final = 2


@dataclass
class _SourceTable:
    """What the sources have of one table.

    Attributes:
        kinds: what tells kinds apart in an entry of a manifest.
        reads: how often rows of a chunk are added.
        size_bytes: bytes of all rows with ids.
        row_bytes: the most bytes of a row with its id.
    """

    kinds: set[tuple[object, ...]] = field(default_factory=set)
    reads: int = 0
    size_bytes: int = 0
    row_bytes: int = 0

    def most_chunks(self, rows: int) -> int:
        """Return the most chunks of a table of so many rows in the merge."""
        kinds = sum(1 if "exact" in kind else _PARAMETER_DTYPES for kind in self.kinds)
        size_bytes = min(self.size_bytes, rows * self.row_bytes)
        # A chunk that is full has room for less than one row.
        full = size_bytes // max(1, plan.CHUNK_BYTES - self.row_bytes)
        waited = min(_PARAMETER_DTYPES * self.reads, size_bytes * kinds // moves.BUFFERED_BYTES)
        return full + waited + kinds


class MergedManifest:
    """The most bytes of the manifest that merges the manifests added so far.

    Args:
        specs: the tables of the newest manifest.
    """

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._specs = specs
        self._tables = [_SourceTable() for _ in specs]
        self._quantizers: dict[tuple[int, int], int] = {}
        # Everything of the newest manifest but its rows' chunks, which the merge copies.
        self._rest_bytes = 0

    def add(self, manifest: Manifest) -> None:
        """Add the next older manifest; the newest comes first."""
        if not self._rest_bytes:
            entries_left = [entry for entry in manifest.chunks if entry.table is None]
            self._rest_bytes = body_bytes(
                manifest.model_copy(update={"chunks": tuple(entries_left), "quantizers": ()})
            )
        for quantizer in manifest.quantizers:
            place = quantizer.table, quantizer.rank
            if place not in self._quantizers:
                self._quantizers[place] = body_bytes(quantizer) + 1
        for entry in manifest.chunks:
            index, rows, first, last = entry.table, entry.row_count, entry.first_row, entry.last_row
            if index is None or rows is None or first is None or last is None:
                continue
            table = self._tables[index]
            # A chunk may store a state as it is where another of the table has codes (format §3.5).
            states = self._specs[index].row_states if manifest.state_bits == 8 else ()
            for form in range(2 ** sum(state.may_be_narrower for state in states)):
                kind = entry.rank, entry.bits, entry.scheme, manifest.state_bits, form
                table.kinds.add(kind)
            table.reads += sections_touched(first, last)
            size_bytes = entry.bytes
            if entry.scheme == "first":
                # Chunks of these rows are full when the rows that a reader computes are so many.
                size_bytes = -(-rows * plan.CHUNK_BYTES // most_first_rows(self._specs[index]))
            table.size_bytes += size_bytes + rows * _ID_BYTES
            table.row_bytes = max(table.row_bytes, -(-size_bytes // rows) + _ID_BYTES)

    @property
    def most_bytes(self) -> int:
        """The most bytes of the manifest; a merge may turn out to have fewer chunks."""
        total = self._rest_bytes + sum(self._quantizers.values())
        for index, (table, spec) in enumerate(zip(self._tables, self._specs, strict=True)):
            ranks = [rank for rank, *_ in table.kinds]
            if not ranks:
                continue
            total += table.most_chunks(spec.rows) * row_entry_bytes(
                index,
                max(rank for rank in ranks if isinstance(rank, int)),
                size_bytes=plan.CHUNK_BYTES,
                rows=spec.rows,
                last_row=2 * spec.rows,
            )
        return total
