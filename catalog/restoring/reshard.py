"""Any part of a table from whatever pieces it is stored in: other rows, other columns, all of it.

A target says which rows and columns of whole tables it wants, and where they go; `map_parts` finds
the pieces of a manifest that hold them. So a checkpoint of any number of ranks, sharded by rows, by
columns, by table or by both, restores into any other sharding (format §4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from torch import Tensor

from recpoint.catalog.chunks.logical_tables import LogicalState, LogicalTable, Piece, logical_tables
from recpoint.catalog.restoring.part_placement import PartOfPiece, PieceSink, StateOfPiece
from recpoint.catalog.restoring.restore_target import RowSink, StateWanted, TableTarget
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest

__all__ = ["PartsTarget", "TablePart", "map_parts"]


@dataclass(frozen=True, kw_only=True)
class TablePart:
    """Rows and columns of one whole table, and where they go, on any device.

    Attributes:
        table: its name.
        values: [n, w], of the table's dtype: rows first_row … first_row + n − 1 of its columns
            first_column … first_column + w − 1. Of any strides; contiguous is faster.
        row_states: those that are wanted, by name. One that has a value for each column (Adam's)
            is [n, w], any other [n, *shape], of its dtype.
        first_row, first_column: of the table, counted from 0.
        changed: if given, a dirty bitmap of the n rows on the CPU, all zero: the rows that come
            from increments are marked in it.
    """

    table: str
    values: Tensor
    row_states: Mapping[str, Tensor] = field(default_factory=dict)
    first_row: int = 0
    first_column: int = 0
    changed: Tensor | None = None

    @property
    def columns(self) -> range:
        """The columns of the table that it holds."""
        return range(self.first_column, self.first_column + self.values.shape[1])


def map_parts(manifest: Manifest, parts: Sequence[TablePart]) -> list[TableTarget | RowSink | None]:
    """Where each piece of the manifest goes: what `RestoreTarget.begin` returns.

    Values and row states come with the bits that are stored. Only a state that has no value for
    each column (row-wise Adagrad's sum, for instance) and that several pieces of a wanted part have
    becomes something new: the mean of theirs, weighted by their columns, which is what such a state
    is; of integers, the largest. Where all are equal it is the same.

    A part that has all columns of a piece, and none else, in contiguous memory, is written in
    place. Others go through 8 MiB of memory, a few rows at a time.

    Args:
        manifest: of the checkpoint.
        parts: any number of a table, overlapping or not; their tensors must not.

    Raises:
        IncompatibleModel: a part is none of a table of the checkpoint; nothing has been written.
    """
    tables = logical_tables(manifest.tables)
    wanted: dict[int, list[PartOfPiece]] = {}
    for part in parts:
        table = tables.get(part.table)
        if table is None:
            near = get_close_matches(part.table, tables, n=3) or list(tables)
            raise _does_not_fit(
                part.table, f"no such table in {manifest.ref}", f"one like {', '.join(near):.500}"
            )
        _check_part(table, part)
        for piece in table.pieces:
            common = _common(piece.columns, part.columns)
            if common and len(part.values):
                wanted.setdefault(piece.index, []).append(_of_piece(table, piece, part, common))
    return [
        _target(wanted[index]) if index in wanted else None for index in range(len(manifest.tables))
    ]


def _target(parts: list[PartOfPiece]) -> TableTarget | RowSink:
    in_place = parts[0].as_target() if len(parts) == 1 else None
    return in_place or PieceSink(parts)


def _of_piece(table: LogicalTable, piece: Piece, part: TablePart, common: range) -> PartOfPiece:
    here = slice(common.start - part.columns.start, common.stop - part.columns.start)
    before = sum(  # columns of pieces that are read before this one
        len(_common(other.columns, part.columns))
        for other in table.pieces
        if other.index < piece.index
    )
    states: list[StateOfPiece | None] = []
    for state in table.row_states if part.row_states else ():
        into = part.row_states.get(state.name)
        if into is None:
            states.append(None)
        elif state.by_column:
            states.append(StateOfPiece(into[:, here], by_column=True))
        else:
            states.append(StateOfPiece(into, by_column=False, weight=len(common), before=before))
    return PartOfPiece(
        first_row=part.first_row,
        dim=piece.spec.dim,
        columns=slice(common.start - piece.columns.start, common.stop - piece.columns.start),
        values=part.values[:, here],
        row_states=tuple(states) or (None,) * len(piece.spec.row_states),
        changed=part.changed,
    )


def _check_part(table: LogicalTable, part: TablePart) -> None:
    values, dtype = part.values, torch_dtype(table.dtype)
    if values.dim() != 2 or values.dtype != dtype:
        found = f"values: {values.dtype} {tuple(values.shape)}"
        raise _does_not_fit(part.table, found, f"{dtype}, rows and columns")
    rows, columns = values.shape
    for what, first, count, size in (
        ("rows", part.first_row, rows, table.rows),
        ("columns", part.first_column, columns, table.dim),
    ):
        if first < 0 or first + count > size:
            found = f"{what} {first} … {first + count - 1} wanted"
            raise _does_not_fit(part.table, found, f"{what} of 0 … {size - 1}")
    known = {state.name: state for state in table.row_states} if part.row_states else {}
    for name, tensor in part.row_states.items():
        if name not in known:
            there = ", ".join(known) or "none"
            raise _does_not_fit(part.table, f"row state {name!r:.80} wanted", f"one of: {there}")
        _check_state(part, known[name], tensor)


def _check_state(part: TablePart, state: LogicalState, tensor: Tensor) -> None:
    rows, columns = part.values.shape
    shape = (rows, columns) if state.by_column else (rows, *state.shape)
    if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(state.dtype):
        found = f"{state.name}: {tensor.dtype} {tuple(tensor.shape)}"
        raise _does_not_fit(part.table, found, f"{torch_dtype(state.dtype)} {shape}")


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _does_not_fit(table: str, found: str, expected: str) -> IncompatibleModel:
    return IncompatibleModel(
        f"table {table!r:.200}",
        found=found,
        expected=expected,
        next_step="recpoint show URL STEP lists the tables; ask for rows and columns of one",
    )


class PartsTarget:
    """Restores parts of tables, and nothing else.

    Args:
        parts: see `map_parts`.

    Attributes:
        manifest: the checkpoint that was restored.
    """

    def __init__(self, parts: Sequence[TablePart]) -> None:
        self._parts = parts
        self.manifest: Manifest | None = None

    def begin(self, manifest: Manifest) -> Sequence[TableTarget | RowSink | None]:
        """See `RestoreTarget.begin`."""
        return map_parts(manifest, self._parts)

    def state_wanted(self, manifest: Manifest, known: Mapping[int, object]) -> StateWanted:
        """See `StateChoosingTarget.state_wanted`: nothing."""
        return StateWanted()

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """See `RestoreTarget.finish`."""
        self.manifest = manifest
