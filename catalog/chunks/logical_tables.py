"""Tables as the model has them, put together from the pieces that a manifest lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import Dtype
from recpoint.format.manifest import TableSpec

__all__ = ["LogicalState", "LogicalTable", "Piece", "logical_tables"]


@dataclass(frozen=True)
class Piece:
    """An entry of a manifest's tables: its index, and which columns of its table it holds."""

    index: int
    spec: TableSpec
    columns: range


class LogicalState(NamedTuple):
    """A row state of a whole table.

    `by_column`: it has one value for each of the table's, and is cut into pieces as they are; else
    each piece has its own for the whole row. `shape` is that of one row's entry.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    by_column: bool


@dataclass(frozen=True)
class LogicalTable:
    """A whole table of a checkpoint.

    Attributes:
        name: in the model.
        rows: of each piece.
        dim: columns of all pieces.
        dtype: of its values.
        pieces: as the manifest lists them; one, unless it was sharded by columns.
    """

    name: str
    rows: int
    dim: int
    dtype: Dtype
    pieces: tuple[Piece, ...]

    @cached_property
    def row_states(self) -> tuple[LogicalState, ...]:
        """Its row states, which all pieces have.

        Raises:
            IncompatibleModel: the pieces differ in them.
        """
        specs = [piece.spec for piece in self.pieces]
        forms = [[(s.name, s.dtype) for s in spec.row_states] for spec in specs]
        if any(form != forms[0] for form in forms):
            raise self._differ(f"{forms!r:.200}")
        found = []
        for number, state in enumerate(specs[0].row_states):
            shapes = [spec.row_states[number].shape for spec in specs]
            by_column = shapes == [(spec.dim,) for spec in specs]
            if not by_column and any(shape != shapes[0] for shape in shapes):
                raise self._differ(f"{state.name!r} of {shapes!r:.200} a row")
            shape = (self.dim,) if by_column else shapes[0]
            found.append(LogicalState(state.name, state.dtype, shape, by_column))
        return tuple(found)

    def _differ(self, found: str) -> IncompatibleModel:
        return IncompatibleModel(
            f"table {self.name!r}",
            found=f"row states that differ between its pieces: {found}",
            expected="the same of each, or one value for each column",
            next_step="restore the model without optimizer states",
        )


def logical_tables(tables: Sequence[TableSpec]) -> dict[str, LogicalTable]:
    """The tables of a manifest by name, in the order in which their first pieces are listed.

    Args:
        tables: of a manifest, which has checked that the pieces of one name fit together.
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
