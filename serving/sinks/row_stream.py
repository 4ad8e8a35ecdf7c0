"""Streams the rows of a chain into a sink as they are read; a `RestoreTarget`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from recpoint.catalog.restore.base_rows import decoded_values
from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.coded_state import state_values
from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, has_keys, require_own_keys
from recpoint.catalog.restore.restore import dense_tensors
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.target import RowSink
from recpoint.embeddings.tables.managed_collisions import has_raw_ids
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import item_bytes, torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.format.squared_states import squared_states
from recpoint.serving.sinks.records import SinkTable

__all__ = ["RowStream", "TakesRows", "streamed_tables"]

#: Bytes of rows that a sink is given at once.
_PASS_BYTES: Final = 4 << 20


class TakesRows(Protocol):
    """Takes the rows that make the next version out of the one that is held."""

    def put(self, table: str, ids: Tensor, rows: Tensor, importance: Tensor | None) -> None:
        """Take rows.

        Args:
            table: name of the table.
            ids: int64 [n], without duplicates.
            rows: [n, dim] of the table's dtype, contiguous.
            importance: f32 [n]: fourth root of the mean of each row's second moment; None: the
                stream was not asked for it, or the checkpoint has none.
        """

    def delete(self, table: str, ids: Tensor) -> None:
        """Take note that rows are no more; ids as for `put`."""

    def held_rows(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows as they are held now, [n, dim], and which there are, bool [n]."""


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
    sink_tables: list[SinkTable] = []
    for table in chosen:
        if has_raw_ids(table):
            raise IncompatibleModel(
                f"table {table.name!r:.200} of {manifest.ref}",
                found="raw ids (managed collisions), which change their rows",
                expected="a table whose ids are the numbers of its rows, or a keyed table",
                next_step="follow the run with recpoint.Follower, or leave the table out",
            )
        is_keyed = has_keys([state.name for state in table.row_states])
        sink_tables.append(
            SinkTable(
                name=table.name,
                rows=table.rows,
                dim=table.dim,
                dtype=table.pieces[0].spec.dtype,
                ids="keys" if is_keyed else "rows",
            )
        )
        if is_keyed:
            name = _slots_name(table)
            sink_tables.append(
                SinkTable(name=name, rows=table.rows, dim=1, dtype="I64", ids="slots")
            )
    return tuple(sink_tables), chosen


def _slots_name(table: LogicalTable) -> str:
    """Return the name of the table that says which key each slot of a keyed table has."""
    return f"{table.name}:slots"


class RowStream:
    """Passes on each row of a chain once, the newest.

    Args:
        tables: the tables to read.
        taker: takes rows.
        is_anew: whether nothing is held that the rows are changes of.
        with_importance: whether rows come with their importance. Those of tables that were sharded
            by columns come without.

    Attributes:
        dense: the dense layers, once all rows have been taken.
    """

    def __init__(
        self,
        tables: Sequence[LogicalTable],
        taker: TakesRows,
        *,
        is_anew: bool,
        with_importance: bool = False,
    ) -> None:
        self._tables = tables
        self._taker = taker
        self._is_anew = is_anew
        self._with_importance = with_importance
        self._late: list[_JoinedRows | _KeyedRows] = []
        self.dense: dict[str, Tensor] = {}

    def begin(self, manifest: Manifest) -> Sequence[RowSink | None]:
        """See `RestoreTarget.begin`."""
        self._late.clear()
        sinks: list[RowSink | None] = [None] * len(manifest.tables)
        for table in self._tables:
            states = [state.name for state in table.row_states]
            moment = self._second_moment(table)
            if has_keys(states):
                keyed = _KeyedRows(table, states, moment, self._taker, is_anew=self._is_anew)
                self._late.append(keyed)
                sinks[table.pieces[0].index] = keyed
            elif len(table.pieces) == 1:
                sinks[table.pieces[0].index] = _WholeRows(table, moment, self._taker)
            else:
                joined = _JoinedRows(table, self._taker)
                self._late.append(joined)
                for number, piece in enumerate(table.pieces):
                    sinks[piece.index] = joined.of_piece(number)
        return sinks

    def _second_moment(self, table: LogicalTable) -> int | None:
        """Return the number of the row state that gives the importance; None: not wanted."""
        if not self._with_importance:
            return None
        moments = squared_states(table.pieces[0].spec)
        return None if moments is None else moments[0]

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        for rows in self._late:
            rows.finish()
        self.dense = dense_tensors(state)


class _WholeRows:
    """Decodes the rows of a table and passes them on."""

    wanted = None

    def __init__(self, table: LogicalTable, moment: int | None, taker: TakesRows) -> None:
        self._table, self._moment, self._taker = table, moment, taker

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        for part, values in _decoded(stored, positions, self._table, piece=0):
            importance = _importance(part, self._moment)
            self._taker.put(self._table.name, _ids(part), values, importance)

    def mark(self, rows: range | Tensor) -> None:
        pass


class _KeyedRows:
    """Passes on the rows of a keyed table by key, and the keys that have lost theirs."""

    wanted = None

    def __init__(
        self,
        table: LogicalTable,
        states: Sequence[str],
        moment: int | None,
        taker: TakesRows,
        *,
        is_anew: bool,
    ) -> None:
        self._table, self._moment, self._taker = table, moment, taker
        self._is_anew = is_anew
        self._key, self._last_use = states.index(KEY), states.index(LAST_USE)
        self._slots: list[Tensor] = []
        self._free: list[Tensor] = []
        self._used: list[Tensor] = []
        self._keys: list[Tensor] = []

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        slots_name = _slots_name(self._table)
        for part, values in _decoded(stored, positions, self._table, piece=0):
            keys, last_use = part.row_states[self._key], part.row_states[self._last_use]
            assert isinstance(keys, Tensor) and isinstance(last_use, Tensor)  # exact: integers
            slots, is_used = _ids(part), last_use >= 0
            if bool(is_used.any()):
                importance = _importance(part, self._moment)
                self._taker.put(
                    self._table.name,
                    keys[is_used],
                    values[is_used],
                    None if importance is None else importance[is_used],
                )
                self._taker.put(slots_name, slots[is_used], keys[is_used].view(-1, 1), None)
            self._slots.append(slots)
            self._free.append(slots[~is_used])
            self._used.append(slots[is_used])
            self._keys.append(keys[is_used])

    def mark(self, rows: range | Tensor) -> None:
        pass

    def finish(self) -> None:
        """Delete the keys that were held in a changed slot and are in no slot that has changed.

        A key that moved to another slot changed both.

        Raises:
            MalformedObject: two changed slots have one key.
        """
        if not self._slots:
            return
        keys = torch.cat(self._keys)
        require_own_keys(self._table.name, torch.cat(self._used), keys)
        if self._is_anew:
            return
        slots = torch.cat(self._slots)
        old_keys, is_held = self._taker.held_rows(_slots_name(self._table), slots)
        gone_keys = old_keys.flatten()[is_held]
        gone_keys = gone_keys[~torch.isin(gone_keys, keys)]
        if len(gone_keys):
            self._taker.delete(self._table.name, gone_keys)
        free = torch.cat(self._free)
        freed = free[self._taker.held_rows(_slots_name(self._table), free)[1]]
        if len(freed):
            self._taker.delete(_slots_name(self._table), freed)


class _JoinedRows:
    """Puts the pieces of a table that was sharded by columns together, in memory."""

    def __init__(self, table: LogicalTable, taker: TakesRows) -> None:
        self._table, self._taker = table, taker
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
                held, _ = self._taker.held_rows(self._table.name, ids)
                rows = torch.where(is_written, rows, held)
            self._taker.put(self._table.name, ids, rows.contiguous(), None)

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
        for part, values in _decoded(stored, positions, self._table, piece=self._number):
            self._parts.append((_ids(part), values))

    def mark(self, rows: range | Tensor) -> None:
        pass


def _decoded(
    stored: StoredRows, positions: Tensor | None, table: LogicalTable, *, piece: int
) -> Iterator[tuple[StoredRows, Tensor]]:
    """Yield rows and their decoded values, a few MiB at a time, in memory of their own."""
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
        part = stored.chosen(some)
        yield part, decoded_values(part, spec).contiguous()


def _importance(part: StoredRows, moment: int | None) -> Tensor | None:
    """Return the fourth root of the mean of a row state, f32 [n]; None: there is no such state."""
    if moment is None:
        return None
    values = state_values(part.row_states[moment]).float()
    return values.reshape(len(values), -1).mean(dim=1).clamp_(min=0).pow_(0.25)


def _ids(part: StoredRows) -> Tensor:
    assert isinstance(part.rows, Tensor)  # chosen by positions
    return part.rows
