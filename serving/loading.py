"""Reads a chain of checkpoints into one copy of a served model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.coded_state import state_values
from recpoint.catalog.restore.keyed_rows import has_keys
from recpoint.catalog.restore.placement import TablePart, map_parts
from recpoint.catalog.restore.restore import dense_tensors
from recpoint.catalog.restore.rows import LogicalTable, logical_tables
from recpoint.catalog.restore.target import RowSink, TableTarget
from recpoint.catalog.run.chain import Chain
from recpoint.embeddings.tables.managed_collisions import NO_ID, RAW_ID
from recpoint.errors import IncompatibleModel
from recpoint.format.manifest import Manifest
from recpoint.kernels import dirty_bitmap
from recpoint.serving.keyed_table import RowsByKey, ServedTable
from recpoint.serving.model import Bitmaps, ModelCopy, changed_ids, tables_with_raw_ids
from recpoint.serving.tables import CodedTable, FloatTable, RowTable, coded_bytes

__all__ = ["Loading"]


class Loading:
    """Reads a chain into a copy; a `RestoreTarget`.

    Args:
        copy: the copy to read into. If the chain does not start with a full, it has caught up.
        chain: the chain to read.
        wanted_tables: names of tables; None: all.
        coded: if most rows of a table are quantized, keep them as they are stored.

    Attributes:
        changed: the rows that increments brought.
    """

    def __init__(
        self, copy: ModelCopy, chain: Chain, wanted_tables: Collection[str] | None, *, coded: bool
    ) -> None:
        self._copy = copy
        self._chain = chain
        self._wanted_tables = wanted_tables
        self._coded = coded
        self._from_full = chain.manifests[0].parent is None
        self.changed: Bitmaps = {}

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """See `RestoreTarget.begin`."""
        self.changed.clear()
        tables = logical_tables(manifest.tables)
        for name in sorted(set(self._wanted_tables or ()) - tables.keys()):
            raise IncompatibleModel(
                f"table {name!r}",
                found=f"no such table in {manifest.ref}",
                expected=f"one of {', '.join(sorted(tables))[:500]}",
                next_step="name tables of the checkpoint",
            )
        model = self._copy.model
        if model is not None:
            model.check_tables(manifest)
        if self._from_full:
            for name in self._copy.tables.keys() - tables.keys():
                del self._copy.tables[name]
            self._copy.raw_ids = {} if model is None else _new_raw_ids(manifest)
        chosen = [
            t for n, t in tables.items() if self._wanted_tables is None or n in self._wanted_tables
        ]
        coded: dict[int, RowSink] = {}
        parts: list[TablePart] = []
        for table in chosen:
            served = self._served(table)
            row_states = served.row_states if isinstance(served, RowsByKey) else {}
            if table.name in self._copy.raw_ids:
                row_states = {RAW_ID: self._copy.raw_ids[table.name].values.flatten()}
            rows = served.by_slot if isinstance(served, RowsByKey) else served
            if isinstance(rows, CodedTable):
                changed = self.changed[table.name, 0] = dirty_bitmap.new(table.rows)
                sink: RowSink = rows.into(table, changed)
                if row_states:
                    sink = _CodedRowsWithStates(rows, table, row_states)
                coded[table.pieces[0].index] = sink
            else:
                parts += self._parts(table, rows.values, row_states)
        targets = map_parts(manifest, parts)
        return [coded.get(index, target) for index, target in enumerate(targets)]

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `StateCheckingTarget.check_state`."""
        if self._copy.model is not None:
            self._copy.model.check_state(manifest, state)

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        for name, table in self._copy.tables.items():
            table.finish()
            if isinstance(table, RowsByKey):
                table.follow_keys(
                    None if self._from_full else changed_ids(self.changed, name, table)
                )
        self._copy.dense = dense_tensors(state)
        if self._copy.model is not None:
            self._copy.model.use(self._copy.tables)
            self._copy.model.load_state(state, self._copy.raw_ids)

    def _parts(
        self, table: LogicalTable, values: Tensor, row_states: Mapping[str, Tensor]
    ) -> Iterator[TablePart]:
        for piece in table.pieces:
            first, stop = piece.columns.start, piece.columns.stop
            changed = self.changed[table.name, first] = dirty_bitmap.new(table.rows)
            yield TablePart(
                table=table.name,
                values=values[:, first:stop],
                row_states=row_states,
                first_column=first,
                changed=changed,
            )

    def _served(self, table: LogicalTable) -> ServedTable:
        served = self._copy.tables.get(table.name)
        if self._from_full or served is None:
            served = self._copy.tables[table.name] = self._table(table, served)
        return served

    def _table(self, table: LogicalTable, current: ServedTable | None) -> ServedTable:
        weight = None if self._copy.model is None else self._copy.model.table(table.name)
        if weight is not None:
            return weight
        if not has_keys([state.name for state in table.row_states]):
            return self._rows(table, None if isinstance(current, RowsByKey) else current)
        keyed = current if isinstance(current, RowsByKey) and current.fits(table) else None
        rows = self._rows(table, None if keyed is None else keyed.by_slot)
        if keyed is not None and keyed.by_slot is rows:
            return keyed
        return RowsByKey(table, rows)

    def _rows(self, table: LogicalTable, current: RowTable | None) -> RowTable:
        # Each piece of a row has its own scale, so only tables stored whole are kept as codes.
        bits = self._bits(table.pieces[0].index) if self._coded and len(table.pieces) == 1 else 0
        if bits:
            fits = isinstance(current, CodedTable) and current.fits(table) and current.bits == bits
            return current if fits and current is not None else CodedTable(table, bits)
        fits = isinstance(current, FloatTable) and current.fits(table)
        if fits and current is not None:
            return current
        return FloatTable.empty(table, self._copy.device_of(table.name))

    def _bits(self, table: int) -> int:
        """Return the width of codes that keeps a table in the least memory, wider rows beside it.

        0 unless most rows are quantized, of those that are not computed from a rule.
        """
        rows_of_bits: Counter[int] = Counter()
        rows = 0
        for link in self._chain.manifests:
            for entry in link.chunks:
                if entry.table == table and entry.scheme != "first":
                    rows += entry.row_count or 0
                    if entry.scheme == "asymmetric" and entry.bits:
                        rows_of_bits[entry.bits] += entry.row_count or 0
        if 2 * rows_of_bits.total() <= rows:
            return 0
        dim = self._chain.manifests[-1].tables[table].dim
        return min(rows_of_bits, key=lambda bits: (coded_bytes(rows_of_bits, dim, bits), bits))


class _CodedRowsWithStates:
    """Takes rows of a table as they are stored, and some of their row states; a `RowSink`.

    Args:
        coded: takes the rows.
        table: the table of the checkpoint.
        row_states: name -> what takes that row state, int64 [rows].
    """

    def __init__(
        self, coded: CodedTable, table: LogicalTable, row_states: Mapping[str, Tensor]
    ) -> None:
        self._coded = coded
        names = [state.name for state in table.row_states]
        self._row_states = [(names.index(name), state) for name, state in row_states.items()]

    @property
    def wanted(self) -> None:
        """None: all rows are wanted; see `catalog.restore.target.RowSink`."""
        return None

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """Take rows and row states over; see `catalog.restore.target.RowSink.take`."""
        self._coded.take(stored, positions)
        rows = stored.rows
        if isinstance(rows, range):
            rows = torch.arange(rows.start, rows.stop, device="cpu")
        if positions is not None:
            rows = rows[positions]
        for number, state in self._row_states:
            values = state_values(stored.row_states[number])
            state[rows] = values if positions is None else values[positions]

    def mark(self, rows: range | Tensor) -> None:
        """Note rows of an increment; see `catalog.restore.target.RowSink.mark`."""
        self._coded.mark(rows)


def _new_raw_ids(manifest: Manifest) -> dict[str, FloatTable]:
    return {
        name: FloatTable(torch.full((table.rows, 1), NO_ID, dtype=torch.int64, device="cpu"))
        for name, table in tables_with_raw_ids(manifest).items()
    }
