"""One of the two copies of a model that a serving process holds: one is read, one is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.chunks.logical_tables import LogicalTable, logical_tables
from recpoint.catalog.restoring.reshard import TablePart, map_parts
from recpoint.catalog.restoring.restore_target import RowSink, TableTarget
from recpoint.catalog.restoring.restored_model import dense_tensors
from recpoint.catalog.runs.chain import Chain
from recpoint.embeddings.served_tables import CodedTable, FloatTable, ServedTable
from recpoint.errors import IncompatibleModel
from recpoint.format.manifest import Manifest
from recpoint.kernels import dirty_bitmap
from recpoint.serving.served_model import ServedModel
from recpoint.serving.version import Version

__all__ = ["ALL", "Bitmaps", "Loading", "ModelCopy"]

#: Of `ModelCopy.behind`: every row of every table.
ALL: Final = None

#: Dirty bitmaps by the table's name and the first column of its piece: of a table that was sharded
#: by columns, an increment may hold a row of one piece and not of another.
Bitmaps = dict[tuple[str, int], Tensor]


class ModelCopy:
    """Tables and dense layers of one version, and how they differ from the other copy's.

    Args:
        model: the model whose weights the tables are; None: tables have memory of their own.

    Attributes:
        version: what is in it, whole; None: nothing, or something half applied.
        readers: requests that are looking at it.
        behind: rows in which it may differ from the other copy; ALL: any.
    """

    def __init__(self, model: ServedModel | None) -> None:
        self.model = model
        self.tables: dict[str, ServedTable] = {}
        self.dense: dict[str, Tensor] = {}
        self.version: Version | None = None
        self.readers = 0
        self.behind: Bitmaps | None = ALL

    def catch_up(self, other: ModelCopy) -> None:
        """Take over the rows in which this copy differs from the other, which is whole."""
        for name, table in other.tables.items():
            mine, ids = self.tables.get(name), None
            if mine is None or mine.form != table.form:
                mine = self.tables[name] = self._like(name, table)
            elif self.behind is not ALL:
                rows = [bits for (of, _), bits in self.behind.items() if of == name]
                if not rows:
                    continue
                ids = dirty_bitmap.collect(reduce(torch.bitwise_or, rows), rows=table.rows)
            if isinstance(mine, FloatTable) and isinstance(table, FloatTable):
                mine.copy_rows(table, ids)
            elif isinstance(mine, CodedTable) and isinstance(table, CodedTable):
                mine.copy_rows(table, ids)
        for name in self.tables.keys() - other.tables.keys():
            del self.tables[name]
        self.behind = {}

    def _like(self, name: str, table: ServedTable) -> ServedTable:
        weight = None if self.model is None else self.model.table(name)
        if weight is not None:
            return weight
        if isinstance(table, CodedTable):
            return table.empty_like()
        return FloatTable(torch.empty_like(table.values))


class Loading:
    """Reads a chain into a copy; a `RestoreTarget`.

    Args:
        copy: which has caught up, if the chain does not start with a full.
        chain: what is read.
        wanted: names of tables; None: all.
        coded: keep rows as they are stored, in tables of which most are quantized.

    Attributes:
        changed: the rows that increments brought.
    """

    def __init__(
        self, copy: ModelCopy, chain: Chain, wanted: Collection[str] | None, *, coded: bool
    ) -> None:
        self._copy = copy
        self._chain = chain
        self._wanted = wanted
        self._coded = coded
        self._from_full = chain.manifests[0].parent is None
        self.changed: Bitmaps = {}

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """See `RestoreTarget.begin`."""
        self.changed.clear()
        tables = logical_tables(manifest.tables)
        for name in sorted(set(self._wanted or ()) - tables.keys()):
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
        wanted = [t for n, t in tables.items() if self._wanted is None or n in self._wanted]
        coded: dict[int, CodedTable] = {}
        parts: list[TablePart] = []
        for table in wanted:
            served = self._served(table)
            if isinstance(served, CodedTable):
                changed = self.changed[table.name, 0] = dirty_bitmap.new(table.rows)
                coded[table.pieces[0].index] = served.into(table, changed)
            else:
                parts += self._parts(table, served.values)
        into = map_parts(manifest, parts)
        return [coded.get(index, target) for index, target in enumerate(into)]

    def check_state(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `StateCheckingTarget.check_state`."""
        if self._copy.model is not None:
            self._copy.model.check_dense(manifest, state)

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        for table in self._copy.tables.values():
            table.finish()
        self._copy.dense = dense_tensors(state)
        if self._copy.model is not None:
            self._copy.model.use(self._copy.tables)
            self._copy.model.load_dense(state)

    def _parts(self, table: LogicalTable, values: Tensor) -> Iterator[TablePart]:
        for piece in table.pieces:
            first, stop = piece.columns.start, piece.columns.stop
            changed = self.changed[table.name, first] = dirty_bitmap.new(table.rows)
            yield TablePart(
                table=table.name, values=values[:, first:stop], first_column=first, changed=changed
            )

    def _served(self, table: LogicalTable) -> ServedTable:
        there = self._copy.tables.get(table.name)
        if self._from_full or there is None:
            there = self._copy.tables[table.name] = self._table(table, there)
        return there

    def _table(self, table: LogicalTable, there: ServedTable | None) -> ServedTable:
        weight = None if self._copy.model is None else self._copy.model.table(table.name)
        if weight is not None:
            return weight
        # Pieces of a row have a scale each: what is kept as codes is stored whole.
        bits = self._bits(table.pieces[0].index) if self._coded and len(table.pieces) == 1 else 0
        if bits:
            fits = isinstance(there, CodedTable) and there.fits(table) and there.bits == bits
            return there if fits and there is not None else CodedTable(table, bits)
        fits = isinstance(there, FloatTable) and there.fits(table)
        return there if fits and there is not None else FloatTable.empty(table)

    def _bits(self, table: int) -> int:
        """The widest codes of a table's chunks; 0 where most rows are stored exactly."""
        chunks = [e for link in self._chain.manifests for e in link.chunks if e.table == table]
        coded = [entry for entry in chunks if entry.scheme == "asymmetric"]
        rows, coded_rows = (sum(e.row_count or 0 for e in some) for some in (chunks, coded))
        return max((e.bits or 0 for e in coded), default=0) if 2 * coded_rows > rows else 0
