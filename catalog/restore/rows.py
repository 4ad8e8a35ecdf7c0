"""Tracks rows: pieces of whole tables, rows that chunks cover, rows seen, rows still live.

Checks that the chunks of a table hold each row at most once (format §4, invariants 2 and 3).

Bounds the number of live rows in chunks, from their manifests alone. A row that several links hold
is live in the newest of them, and dead in the others. Only the chunks tell which rows they share.
But all ids of a chunk lie between its first and last row, so a span of ids that many chunks cover
has at most as many live rows as ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.errors import IncompatibleModel, MalformedObject
from recpoint.format.dtypes import Dtype
from recpoint.format.manifest import ChunkEntry, TableSpec
from recpoint.kernels import dirty_bitmap

__all__ = [
    "Live",
    "LiveRows",
    "LogicalState",
    "LogicalTable",
    "Piece",
    "RowCoverage",
    "SECTION_ROWS",
    "SeenIds",
    "SeenRows",
    "kept_by_ids",
    "logical_tables",
    "sections_of",
    "sections_touched",
]


@dataclass(frozen=True)
class Piece:
    """An entry of a manifest's tables: its index, spec, and the columns of the table it holds."""

    index: int
    spec: TableSpec
    columns: range


class LogicalState(NamedTuple):
    """A row state of a whole table.

    Attributes:
        name: its name.
        dtype: its dtype.
        shape: shape of one row's entry.
        by_column: whether it has one value for each column of the table, and is divided into pieces
            as the columns are; if not, each piece has an entry of its own for the whole row.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    by_column: bool


@dataclass(frozen=True)
class LogicalTable:
    """A whole table of a checkpoint.

    Attributes:
        name: its name in the model.
        rows: number of rows of each piece.
        dim: number of columns of all pieces together.
        dtype: dtype of its values.
        pieces: its pieces in the manifest's order; one, unless it was sharded by columns.
    """

    name: str
    rows: int
    dim: int
    dtype: Dtype
    pieces: tuple[Piece, ...]

    @cached_property
    def row_states(self) -> tuple[LogicalState, ...]:
        """The row states of the table; all pieces have the same.

        Raises:
            IncompatibleModel: the row states of the pieces differ.
        """
        specs = [piece.spec for piece in self.pieces]
        forms = [[(s.name, s.dtype) for s in spec.row_states] for spec in specs]
        if any(form != forms[0] for form in forms):
            raise self._differ(f"{forms!r:.200}")
        states = []
        for number, state in enumerate(specs[0].row_states):
            shapes = [spec.row_states[number].shape for spec in specs]
            by_column = shapes == [(spec.dim,) for spec in specs]
            if not by_column and any(shape != shapes[0] for shape in shapes):
                raise self._differ(f"{state.name!r} of {shapes!r:.200} a row")
            shape = (self.dim,) if by_column else shapes[0]
            states.append(LogicalState(state.name, state.dtype, shape, by_column))
        return tuple(states)

    def _differ(self, found: str) -> IncompatibleModel:
        return IncompatibleModel(
            f"table {self.name!r}",
            found=f"row states that differ between its pieces: {found}",
            expected="the same row states in each piece, or one value for each column",
            next_step="restore the model without optimizer states",
        )


def logical_tables(tables: Sequence[TableSpec]) -> dict[str, LogicalTable]:
    """Return the tables of a manifest by name, in the order of their first pieces.

    Args:
        tables: a manifest's tables; the manifest has checked that pieces of one name fit together.
    """
    pieces: dict[str, list[Piece]] = {}
    for index, spec in enumerate(tables):
        first = 0 if spec.columns is None else spec.columns.first
        columns = range(first, first + spec.dim)
        pieces.setdefault(spec.name, []).append(Piece(index, spec, columns))
    return {
        name: LogicalTable(
            name=name,
            rows=of_table[0].spec.rows,
            dim=sum(piece.spec.dim for piece in of_table),
            dtype=of_table[0].spec.dtype,
            pieces=tuple(of_table),
        )
        for name, of_table in pieces.items()
    }


class RowCoverage:
    """The rows that the chunks of one table of one checkpoint have brought so far.

    Ranges, of which a full mostly consists, are kept as ranges. Sets of ids cost one bit for each
    row of the table or eight bytes for each stored row, whichever is less: a manifest may state any
    number of table rows, but the stored rows are known to exist.

    Args:
        rows: number of rows of the table.
        row_counts: number of rows of each of the table's chunks in this checkpoint.
    """

    def __init__(self, *, rows: int, row_counts: Sequence[int]) -> None:
        self._rows = rows
        self._single = len(row_counts) == 1
        self._with_bitmap = rows // 8 <= 8 * sum(row_counts)
        self._ranges: list[range] = []
        self._sets: list[Tensor] = []
        self._bitmap: Tensor | None = None
        self._set_rows = 0

    def add(self, rows: range | Tensor) -> None:
        """Add a chunk's rows, which are already checked to ascend and to lie in the table."""
        if self._single:
            return  # ids of one chunk ascend strictly, so they cannot overlap
        if isinstance(rows, range):
            self._ranges.append(rows)
            return
        if not self._with_bitmap:
            self._sets.append(rows)
            return
        if self._bitmap is None:
            self._bitmap = dirty_bitmap.new(self._rows)
        dirty_bitmap.mark(self._bitmap, rows, rows=self._rows)
        self._set_rows += rows.numel()

    def finish(self, *, key: str, table: str) -> None:
        """Check, after the last chunk, that no row was added twice.

        For a full this also proves that every row is stored, because its manifest's row counts sum
        to the table's rows.

        Args:
            key: key of the manifest, for the error.
            table: name of the table, for the error.

        Raises:
            MalformedObject: some row is in two chunks.
        """
        ranges = sorted(self._ranges, key=lambda rows: rows.start)
        overlap = any(
            later.start < earlier.stop for earlier, later in zip(ranges, ranges[1:], strict=False)
        )
        if overlap or self._sets_overlap(ranges):
            raise MalformedObject(
                key,
                found=f"a row of table {table!r} in two chunks",
                expected="each row at most once in a checkpoint",
                next_step="restore an older checkpoint: recpoint list URL",
            )

    def _sets_overlap(self, ranges: Sequence[range]) -> bool:
        """Tell whether the sets of ids overlap each other or the disjoint `ranges`."""
        if self._sets:
            ids = torch.cat(self._sets).sort().values
            edges = torch.tensor(
                [(rows.start, rows.stop) for rows in ranges], dtype=torch.int64, device="cpu"
            )
            ids_before = torch.searchsorted(ids, edges.reshape(-1, 2))
            return bool((ids[1:] == ids[:-1]).any() or (ids_before[:, 0] != ids_before[:, 1]).any())
        if self._bitmap is None:
            return False
        for rows in ranges:
            dirty_bitmap.mark(
                self._bitmap, torch.arange(rows.start, rows.stop, device="cpu"), rows=self._rows
            )
        added = self._set_rows + sum(len(rows) for rows in ranges)
        return dirty_bitmap.count(self._bitmap) != added


#: Rows of a table whose bits are in memory at once if memory is bounded: 64 MiB of bits.
SECTION_ROWS: Final = 1 << 29


class SeenRows:
    """Remembers the rows seen so far, newest checkpoint first, as one bit for each row of a table.

    Args:
        rows: number of rows of the table.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._bitmap = dirty_bitmap.new(rows)
        self._seen = 0

    @property
    def all(self) -> bool:
        """Whether every row has been seen, so that older checkpoints need not be read."""
        return self._seen == self._rows

    def claim(self, rows: range | Tensor) -> Tensor | None:
        """Add a chunk's rows, which are already checked to ascend and to lie in the table.

        Returns:
            Positions in the chunk of the rows not seen before: int64 [m], ascending; None: all.
        """
        if self.all:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        positions = dirty_bitmap.mark_new(self._bitmap, rows, rows=self._rows)
        self._seen += positions.numel()
        return None if positions.numel() == len(rows) else positions


class SeenIds:
    """Remembers the rows seen so far as sorted ids, for few rows of a large table."""

    all = False

    def __init__(self) -> None:
        self._seen = torch.empty(0, dtype=torch.int64, device="cpu")

    def claim(self, rows: range | Tensor) -> Tensor | None:
        """Remember rows; return the positions of those not seen before, None if that is all."""
        ids = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
        places = torch.searchsorted(self._seen, ids)
        is_claimed = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
        is_seen_place = places < self._seen.numel()
        is_claimed[is_seen_place] = self._seen[places[is_seen_place]] == ids[is_seen_place]
        positions = (~is_claimed).nonzero().flatten()
        self._seen = torch.cat([self._seen, ids[positions]]).sort().values
        return None if positions.numel() == ids.numel() else positions


def sections_of(rows: int, stored_rows: int) -> list[tuple[range, SeenRows | SeenIds | None]]:
    """Divide a table into sections to go through one after another, so that memory is bounded.

    Args:
        rows: number of rows of the table.
        stored_rows: number of row ids in all chunks of the chain.

    Returns:
        Each section's rows, and what remembers them; None stands for a `SeenRows` that the caller
        creates when it reaches the section.
    """
    if kept_by_ids(rows, stored_rows):
        return [(range(rows), SeenIds())]
    return [
        (range(first, min(first + SECTION_ROWS, rows)), None)
        for first in range(0, rows, SECTION_ROWS)
    ]


def sections_touched(first_row: int, last_row: int) -> int:
    """Return the most sections for which a chunk with these first and last rows is read.

    Applies to a table that is not `kept_by_ids`; otherwise each chunk is read once.
    """
    return last_row // SECTION_ROWS - first_row // SECTION_ROWS + 1


def kept_by_ids(rows: int, stored_rows: int) -> bool:
    """Tell whether a table is one section whose few stored rows are remembered as ids.

    Args:
        rows, stored_rows: as for `sections_of`.
    """
    return 64 * stored_rows < min(rows, SECTION_ROWS)


class Live(NamedTuple):
    """A number of rows, and their stored bytes."""

    rows: int
    size_bytes: int


class _Span(NamedTuple):
    """Chunks whose ids overlap.

    `first` and `last` are the ends of their ids, `rows` and `size_bytes` what they store, `widest`
    the bytes per row of the chunk with the widest rows.
    """

    first: int
    last: int
    rows: int
    size_bytes: int
    widest: float

    def joined(self, further: _Span) -> _Span:
        return _Span(
            self.first,
            max(self.last, further.last),
            self.rows + further.rows,
            self.size_bytes + further.size_bytes,
            max(self.widest, further.widest),
        )

    @property
    def live(self) -> Live:
        rows = min(self.rows, self.last - self.first + 1)
        return Live(rows, min(self.size_bytes, math.ceil(rows * self.widest)))


class LiveRows:
    """Upper bounds of the live rows, and of their bytes, in the chunks added so far.

    A span of overlapping ids has at most as many live rows as ids, and at most as many as stored;
    each takes at most the bytes per row of the widest of those chunks. New chunks add at most the
    rows and bytes that they store.
    """

    def __init__(self) -> None:
        self._spans: dict[int, list[_Span]] = {}
        self._of_table: dict[int, Live] = {}
        self._most = Live(0, 0)

    @property
    def most(self) -> Live:
        """The bounds for all chunks added so far."""
        return self._most

    def add(self, entries: Iterable[ChunkEntry]) -> None:
        """Add row chunks of any tables and links; other chunks are ignored."""
        added: dict[int, list[_Span]] = {}
        for entry in entries:
            table, rows, first, last = entry.table, entry.row_count, entry.first_row, entry.last_row
            if table is None or rows is None or first is None or last is None:
                continue
            span = _Span(first, last, rows, entry.bytes, entry.bytes / rows)
            added.setdefault(table, []).append(span)
        most_rows, most_bytes = self._most
        for table, spans in added.items():
            joined = _joined([*self._spans.get(table, ()), *spans])
            live_before = self._of_table.get(table, Live(0, 0))
            lives = [span.live for span in joined]
            live = Live(
                min(
                    sum(live.rows for live in lives),
                    live_before.rows + sum(span.rows for span in spans),
                ),
                min(
                    sum(live.size_bytes for live in lives),
                    live_before.size_bytes + sum(span.size_bytes for span in spans),
                ),
            )
            most_rows += live.rows - live_before.rows
            most_bytes += live.size_bytes - live_before.size_bytes
            self._spans[table], self._of_table[table] = joined, live
        self._most = Live(most_rows, most_bytes)


def _joined(spans: list[_Span]) -> list[_Span]:
    """Join the spans that overlap; return the spans in the order of their ids."""
    joined: list[_Span] = []
    for span in sorted(spans):
        if joined and span.first <= joined[-1].last:
            joined[-1] = joined[-1].joined(span)
        else:
            joined.append(span)
    return joined
