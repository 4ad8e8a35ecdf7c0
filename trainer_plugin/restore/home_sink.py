"""Restores a cached table: its rows go to their home, and no row is in a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

import torch
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.placement import TablePart, place_piece
from recpoint.catalog.restore.rows import LogicalTable, Piece
from recpoint.catalog.restore.target import mark_rows
from recpoint.embeddings.cache.mover import Mover
from recpoint.embeddings.cache.residents import CachedRows
from recpoint.embeddings.cache.slots import RecordLayout

__all__ = ["HomeSink", "RowsAtHomeIdle", "RowsOfTable"]

_ROWS_AT_A_TIME: Final = 65_536


class RowsAtHomeIdle(Protocol):
    """Reads and writes rows at a home while nothing is trained: int64 [n], ascending."""

    def fetch(self, ids: Tensor, records: Tensor) -> None:
        """Read records of rows that were written: uint8 [n, bytes]. Others are left alone."""

    def write(self, ids: Tensor, records: Tensor) -> None:
        """Write records, uint8 [n, bytes]."""


class RowsOfTable:
    """The rows of a cached table at its home; `RowsAtHomeIdle`.

    Args:
        mover: moves rows between slots and home.
        cached_rows: the table.
    """

    def __init__(self, mover: Mover, cached_rows: CachedRows) -> None:
        self._mover, self._name = mover, cached_rows.slots.name
        # Also if no row is for this rank: other ranks write theirs.
        mover.put_at_home(cached_rows)

    def fetch(self, ids: Tensor, records: Tensor) -> None:
        """Read records; see `Mover.fetch_idle`."""
        self._mover.fetch_idle(self._name, ids, records)

    def write(self, ids: Tensor, records: Tensor) -> None:
        """Write records; see `Mover.write_idle`."""
        self._mover.write_idle(self._name, ids, records)


class HomeSink:
    """Writes the rows of one piece of a table to a home; a `RowSink`.

    A table that was sharded by columns has several pieces. They are read one after another, and
    each adds its columns to the records that the home has.

    Args:
        at_home: reads and writes the rows.
        part: the rows that are for this trainer.
        layout: layout of the records, with the row states of the checkpoint, by name. One value a
            row may be [slots] or [slots, 1].
        stored: the table in the checkpoint.
        piece: the piece.
        changed: bitmap of the rows of the table's part that increments held; None: nobody asks.
        states_here: row states that are in memory here and not at home: name -> [rows of the part].

    Attributes:
        wanted: the rows of the table's part that the checkpoint has; this trainer restores them.
    """

    def __init__(
        self,
        at_home: RowsAtHomeIdle,
        part: range,
        layout: RecordLayout,
        stored: LogicalTable,
        piece: Piece,
        changed: Tensor | None,
        states_here: Mapping[str, Tensor],
    ) -> None:
        self._at_home = at_home
        self._layout = layout
        self._stored, self._piece = stored, piece
        self._changed = changed
        self._states_here = dict(states_here)
        self.wanted = range(min(part.start, stored.rows), min(part.stop, stored.rows))

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """See `RowSink.take`."""
        count = len(stored.rows) if positions is None else positions.numel()
        for first in range(0, count, _ROWS_AT_A_TIME):
            last = min(first + _ROWS_AT_A_TIME, count)
            if positions is None:
                places = torch.arange(first, last, dtype=torch.int64, device="cpu")
            else:
                places = positions[first:last]
            self._take(stored, places)

    def _take(self, stored: StoredRows, positions: Tensor) -> None:
        part = stored.chosen(positions)
        assert isinstance(part.rows, Tensor)  # chosen by positions
        own_ids = part.rows
        ids = own_ids + self.wanted.start
        part = replace(part, rows=range(positions.numel()))
        records = torch.zeros(
            positions.numel(), self._layout.size_bytes, dtype=torch.uint8, device="cpu"
        )
        if len(self._stored.pieces) > 1:
            self._at_home.fetch(ids, records)
        arrays = {field.name: self._layout.array(records, field) for field in self._layout.fields}
        values = arrays.pop("")
        for name, state in self._states_here.items():
            arrays[name] = torch.zeros(positions.numel(), dtype=state.dtype, device="cpu")
        states = {
            state.name: arrays[state.name].view(len(positions), *state.shape)
            for state in self._stored.row_states
        }
        target = TablePart(table=self._stored.name, values=values, row_states=states)
        place_piece(part, self._stored, self._piece, target)
        for field in self._layout.fields:
            self._layout.put(records, field, arrays.get(field.name, values))
        for name, state in self._states_here.items():
            state[own_ids] = arrays[name]
        self._at_home.write(ids, records)

    def mark(self, rows: range | Tensor) -> None:
        """See `RowSink.mark`."""
        mark_rows(self._changed, rows, of=len(self.wanted))
