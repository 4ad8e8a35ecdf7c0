"""Streams the rows of a chain into a sink as they are read; a `RestoreTarget`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.restore.base_rows import decoded_values
from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.restore import dense_tensors
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.target import RowSink
from recpoint.embeddings.tables.managed_collisions import has_raw_ids
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import item_bytes, torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.serving.sinks.records import SinkTable

__all__ = ["RowStream", "TakesRows", "streamed_tables"]

#: Bytes of rows that a sink is given at once.
_PASS_BYTES: Final = 4 << 20

#: Takes the name of a table, ids int64 [n], and rows [n, dim] of the table's dtype.
TakesRows = Callable[[str, Tensor, Tensor], None]

#: Returns rows of a table as a sink holds them now, [n, dim], and which there are, bool [n].
ReadsRows = Callable[[str, Tensor], tuple[Tensor, Tensor]]


def streamed_tables(
    manifest: Manifest, names: Collection[str] | None
) -> tuple[tuple[SinkTable, ...], list[LogicalTable]]:
    """Return the tables of a checkpoint that a sink is to hold.

    Args:
        manifest: of the checkpoint.
        names: of the tables; None: all.

    Raises:
        IncompatibleModel: there is no such table, or its rows cannot be looked up by number.
    """
    tables = logical_tables(manifest.tables)
    for name in sorted(set(names or ()) - tables.keys()):
        raise IncompatibleModel(
            f"table {name!r:.200}",
            found=f"no such table in {manifest.ref}",
            expected=f"one of {', '.join(sorted(tables)):.500}",
            next_step="name tables of the checkpoint",
        )
    chosen = [table for name, table in tables.items() if names is None or name in names]
    for table in chosen:
        if has_raw_ids(table):
            raise IncompatibleModel(
                f"table {table.name!r:.200} of {manifest.ref}",
                found="raw ids (managed collisions), which change their rows",
                expected="a table whose ids are the numbers of its rows",
                next_step="follow the run with recpoint.Follower, or leave the table out",
            )
    sink_tables = tuple(
        SinkTable(name=t.name, rows=t.rows, dim=t.dim, dtype=t.pieces[0].spec.dtype) for t in chosen
    )
    return sink_tables, chosen


class RowStream:
    """Passes on each row of a chain once, the newest.

    Args:
        tables: the tables to read.
        take: takes rows.
        read: reads rows that are held already, to complete rows of tables that were sharded by
            columns, of which an increment may have some columns only.

    Attributes:
        dense: the dense layers, once all rows have been taken.
    """

    def __init__(self, tables: Sequence[LogicalTable], take: TakesRows, read: ReadsRows) -> None:
        self._tables = tables
        self._take = take
        self._joined = [_JoinedRows(t, take, read) for t in tables if len(t.pieces) > 1]
        self.dense: dict[str, Tensor] = {}

    def begin(self, manifest: Manifest) -> Sequence[RowSink | None]:
        """See `RestoreTarget.begin`."""
        sinks: list[RowSink | None] = [None] * len(manifest.tables)
        joined = iter(self._joined)
        for table in self._tables:
            if len(table.pieces) == 1:
                sinks[table.pieces[0].index] = _WholeRows(table, self._take)
                continue
            rows = next(joined)
            for number, piece in enumerate(table.pieces):
                sinks[piece.index] = rows.of_piece(number)
        return sinks

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        for rows in self._joined:
            rows.finish()
        self.dense = dense_tensors(state)


class _WholeRows:
    """Decodes the rows of a table and passes them on."""

    wanted = None

    def __init__(self, table: LogicalTable, take: TakesRows) -> None:
        self._table, self._take = table, take

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        for ids, rows in _decoded(stored, positions, self._table, piece=0):
            self._take(self._table.name, ids, rows)

    def mark(self, rows: range | Tensor) -> None:
        pass


class _JoinedRows:
    """Puts the pieces of a table that was sharded by columns together, in memory."""

    def __init__(self, table: LogicalTable, take: TakesRows, read: ReadsRows) -> None:
        self._table, self._take, self._read = table, take, read
        self._pieces: list[list[tuple[Tensor, Tensor]]] = [[] for _ in table.pieces]

    def of_piece(self, number: int) -> RowSink:
        return _PieceRows(self._table, number, self._pieces[number])

    def finish(self) -> None:
        parts = [ids for piece in self._pieces for ids, _ in piece]
        if not parts:
            return
        all_ids = torch.cat(parts).unique()
        most = max(1, _PASS_BYTES // (self._table.dim * item_bytes(self._table.dtype)))
        for ids in all_ids.split(most):
            rows, is_written = self._empty(ids)
            if not bool(is_written.all()):
                held, _ = self._read(self._table.name, ids)
                rows = torch.where(is_written, rows, held)
            self._take(self._table.name, ids, rows.contiguous())

    def _empty(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows with the columns that have come, and which these are, bool [n, dim]."""
        shape = (len(ids), self._table.dim)
        rows = torch.zeros(shape, dtype=torch_dtype(self._table.dtype), device="cpu")
        is_written = torch.zeros(shape, dtype=torch.bool, device="cpu")
        for piece, parts in zip(self._table.pieces, self._pieces, strict=True):
            columns = slice(piece.columns.start, piece.columns.stop)
            for part_ids, values in parts:
                places = torch.searchsorted(ids, part_ids).clamp(max=len(ids) - 1)
                is_here = ids[places] == part_ids
                rows[places[is_here], columns] = values[is_here]
                is_written[places[is_here], columns] = True
        return rows, is_written


class _PieceRows:
    wanted = None

    def __init__(
        self, table: LogicalTable, number: int, parts: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._table, self._number, self._parts = table, number, parts
        parts.clear()

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        self._parts.extend(_decoded(stored, positions, self._table, piece=self._number))

    def mark(self, rows: range | Tensor) -> None:
        pass


def _decoded(
    stored: StoredRows, positions: Tensor | None, table: LogicalTable, *, piece: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and decoded rows, a few MiB at a time, in memory of their own."""
    spec = table.pieces[piece].spec
    count = len(stored.rows) if positions is None else positions.numel()
    rows_each = max(1, _PASS_BYTES // (spec.dim * item_bytes(spec.dtype)))
    for first in range(0, count, rows_each):
        stop = min(first + rows_each, count)
        some = (
            torch.arange(first, stop, dtype=torch.int64, device="cpu")
            if positions is None
            else positions[first:stop]
        )
        rows = stored.chosen(some)
        assert isinstance(rows.rows, Tensor)  # chosen by positions
        yield rows.rows, decoded_values(rows, spec).contiguous()
