"""A checkpoint in the memory of one process: whole tables, however many ranks wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from recpoint.catalog.chunks.logical_tables import LogicalTable, logical_tables
from recpoint.catalog.restoring.reshard import TablePart, map_parts
from recpoint.catalog.restoring.restore_target import RowSink, TableTarget
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest

__all__ = ["MemoryTarget"]


class MemoryTarget:
    """Restores into fresh CPU tensors, without a model.

    Args:
        tables: names of the tables wanted; None: all.

    Attributes:
        manifest: the checkpoint that was restored.
        tables: whole ones by name, with their row states in the order of `specs`.
        specs: of these tables.
        state: the state tree of each rank.
    """

    def __init__(self, tables: Iterable[str] | None = None) -> None:
        self._wanted = None if tables is None else frozenset(tables)
        self.manifest: Manifest | None = None
        self.tables: dict[str, TableTarget] = {}
        self.specs: dict[str, LogicalTable] = {}
        self.state: dict[int, object] = {}

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """See `RestoreTarget.begin`."""
        known = logical_tables(manifest.tables)
        for name in sorted((self._wanted or frozenset()) - known.keys()):
            raise IncompatibleModel(
                f"table {name!r}",
                found=f"no such table in {manifest.ref}",
                expected=f"one of {', '.join(sorted(known))[:500]}",
                next_step="name a table of the checkpoint",
            )
        self.specs = {
            name: table
            for name, table in known.items()
            if self._wanted is None or name in self._wanted
        }
        self.tables = {name: _empty(table) for name, table in self.specs.items()}
        return map_parts(manifest, [self._part(name) for name in self.specs])

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        self.manifest, self.state = manifest, state

    def _part(self, name: str) -> TablePart:
        table, states = self.tables[name], self.specs[name].row_states
        return TablePart(
            table=name,
            values=table.values,
            row_states={
                state.name: tensor
                for state, tensor in zip(states, table.row_states, strict=True)
                if tensor is not None
            },
        )


def _empty(table: LogicalTable) -> TableTarget:
    return TableTarget(
        values=torch.empty(table.rows, table.dim, dtype=torch_dtype(table.dtype), device="cpu"),
        row_states=tuple(
            torch.empty(table.rows, *state.shape, dtype=torch_dtype(state.dtype), device="cpu")
            for state in table.row_states
        ),
    )
