"""Places rows of a checked chunk into tensors of whole tables, or of any rows and columns.

Maps any part of a table to the pieces that it is stored in. A target says which rows and columns of
whole tables it wants, and where they go; `map_parts` finds the pieces of a manifest that hold them.
So a checkpoint of any number of ranks, sharded by rows, columns, tables or a mix, restores into any
other sharding (format §4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.restore.chunks import StoredRows
from recpoint.catalog.restore.coded_state import CodedState, StoredState, state_values
from recpoint.catalog.restore.rows import LogicalState, LogicalTable, Piece, logical_tables
from recpoint.catalog.restore.target import RowSink, StateWanted, TableTarget, mark_rows
from recpoint.errors import IncompatibleModel
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Manifest
from recpoint.kernels import quantize, row_gather

__all__ = ["PartsTarget", "TablePart", "map_parts", "place", "place_piece"]


#: Rows that cannot be decoded in place are converted in passes of this many bytes.
_PASS_BYTES: Final = 8 << 20


def place(stored: StoredRows, positions: Tensor | None, target: TableTarget) -> None:
    """Write rows of a chunk to their places; ids and shapes are already checked.

    Args:
        stored: the chunk.
        positions: positions of the rows to write in the chunk, int64 [m]; None: all rows.
        target: the table's tensors, on any device.
    """
    if positions is not None and positions.numel() == 0:
        return
    rows = stored.rows
    ids: range | Tensor = rows
    among = slice(None)
    if positions is not None and isinstance(rows, range):
        # Relative to the chunk's slice of the table, positions are ids: no ids need be computed.
        ids, among = positions, slice(rows.start, rows.stop)
    elif positions is not None and isinstance(rows, Tensor):
        # By numpy, because torch's threads would compete for cores with the chunk readers.
        ids = torch.from_numpy(rows.numpy()[positions.numpy()])
    values = target.values[among]
    if stored.scheme == "exact":
        _put(stored.values, positions, values, ids)
    elif values.is_cpu and values.dtype == torch.float32:
        _decode(stored, positions, values, ids)
    else:
        _decode_in_passes(stored, positions, values, ids)
    for part, dest in zip(stored.row_states, target.row_states, strict=True):
        if dest is not None:
            _put(part, positions, dest[among], ids)


def _decode(
    stored: StoredRows, positions: Tensor | None, dest: Tensor, ids: range | Tensor
) -> None:
    if isinstance(ids, range):
        dest, target_ids = dest[ids.start : ids.stop], None
    else:
        target_ids = ids
    quantize.dequantize_rows(
        stored.values,
        stored.scale,
        stored.offset,
        dest,
        target_ids,
        bits=stored.bits,
        positions=positions,
    )


def _decode_in_passes(
    stored: StoredRows, positions: Tensor | None, dest: Tensor, ids: range | Tensor
) -> None:
    """Decode into a table on a GPU, by that GPU, or into a table of half precision."""

    def decoded(part: slice) -> Tensor:
        codes, scale, offset = (
            _chosen(source, positions, part).to(dest.device)
            for source in (stored.values, stored.scale, stored.offset)
        )
        rows = quantize.dequantize_packed(codes, scale, offset, dim=dest.shape[1], bits=stored.bits)
        return rows.to(dest.dtype)  # rounds, format §3.2

    _in_passes(decoded, dest, ids)


def _put(source: StoredState, positions: Tensor | None, dest: Tensor, ids: range | Tensor) -> None:
    """Copy rows unchanged, or convert BF16 or codes to F32, which is exact (format §3.5)."""
    if isinstance(source, CodedState):
        _put_coded(source, positions, dest, ids)
    elif isinstance(ids, range):
        dest[ids.start : ids.stop].copy_(source)
    elif dest.is_cpu and dest.dtype == source.dtype:
        if positions is None:
            row_gather.scatter(source, ids, dest)
        else:
            row_gather.move(source, positions, dest, ids)
    else:
        _in_passes(
            lambda part: _chosen(source, positions, part).to(dest.device).to(dest.dtype), dest, ids
        )


def _put_coded(
    source: CodedState, positions: Tensor | None, dest: Tensor, ids: range | Tensor
) -> None:
    if dest.is_cpu and dest.dtype == torch.float32 and dest.is_contiguous():
        source.write(dest, ids, positions)
        return

    def decoded(part: slice) -> Tensor:
        rows = source[part] if positions is None else source[positions[part]]
        return rows.decoded().to(dest.device).to(dest.dtype)

    _in_passes(decoded, dest, ids)


def _chosen(source: Tensor, positions: Tensor | None, part: slice) -> Tensor:
    return source[part] if positions is None else source[positions[part]]


def _in_passes(rows: Callable[[slice], Tensor], dest: Tensor, ids: range | Tensor) -> None:
    row_bytes = max(1, dest.nbytes // max(1, len(dest)))
    step = max(1, _PASS_BYTES // row_bytes)
    for start in range(0, len(ids), step):
        part = slice(start, start + step)
        block_ids = ids[part]
        if isinstance(block_ids, range):
            dest[block_ids.start : block_ids.stop].copy_(rows(part))
        else:
            row_gather.scatter(rows(part), block_ids.to(dest.device), dest)


@dataclass(frozen=True)
class StateOfPiece:
    """Where a row state of a piece goes.

    Attributes:
        into: [n, columns] if `by_column`, else [n, *shape].
        by_column: whether the state has one value for each column.
        weight: if not by column, the number of wanted columns that the piece has.
        before: if not by column, the number of wanted columns in the pieces read before it.
    """

    into: Tensor
    by_column: bool
    weight: int = 0
    before: int = 0


@dataclass(frozen=True, kw_only=True)
class PartOfPiece:
    """Rows and columns of a piece, and where they go.

    Attributes:
        first_row: the table's row that is row 0 of `values`.
        dim: number of columns of the piece.
        columns: the wanted columns, counted from the piece's first.
        values: [n, columns], of any strides, on any device.
        row_states: one for each row state of the piece; None: not wanted.
        changed: as in `TableTarget`.
    """

    first_row: int
    dim: int
    columns: slice
    values: Tensor
    row_states: tuple[StateOfPiece | None, ...]
    changed: Tensor | None

    @property
    def wanted(self) -> range:
        """The rows of the table that go here."""
        return range(self.first_row, self.first_row + len(self.values))

    def as_target(self) -> TableTarget | None:
        """Return this part as a `TableTarget` if whole rows are written in place, else None."""
        if self.columns != slice(0, self.dim) or not self.values.is_contiguous():
            return None
        for state in self.row_states:
            if state and not (state.into.is_contiguous() and state.before == 0):
                return None
        return TableTarget(
            values=self.values,
            row_states=tuple(None if state is None else state.into for state in self.row_states),
            changed=self.changed,
            first_row=self.first_row,
        )


class PieceSink:
    """Distributes the rows of one piece to all parts that want some of them; a `RowSink`.

    Args:
        parts: one or more parts; rows between them are read too.
    """

    def __init__(self, parts: Sequence[PartOfPiece]) -> None:
        self._parts = parts
        first = min(part.wanted.start for part in parts)
        self._wanted_rows = range(first, max(part.wanted.stop for part in parts))

    @property
    def wanted(self) -> range:
        """The rows of the table from the first part to the last."""
        return self._wanted_rows

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """Write to each part the rows that it takes."""
        for part in self._parts:
            target_rows = self._of(part)
            inner = stored.positions_of(target_rows)
            chosen = positions
            if chosen is not None:
                ends = torch.tensor([inner.start, inner.stop], device="cpu")
                first, last = torch.searchsorted(chosen, ends).tolist()
                chosen = chosen[first:last] - inner.start
            _place(stored.within(target_rows), chosen, part)

    def mark(self, rows: range | Tensor) -> None:
        """Mark rows in each part that has them."""
        ids = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
        for part in self._parts:
            target_rows = self._of(part)
            ids_inside = (
                ids[(ids >= target_rows.start) & (ids < target_rows.stop)] - target_rows.start
            )
            mark_rows(part.changed, ids_inside, of=len(target_rows))

    def _of(self, part: PartOfPiece) -> range:
        """Return the rows of a part, counted from the sink's first row."""
        first = part.wanted.start - self._wanted_rows.start
        return range(first, first + len(part.values))


def _place(stored: StoredRows, positions: Tensor | None, part: PartOfPiece) -> None:
    """Write rows to their places, block by block; the ids are already checked."""
    count = len(stored.rows) if positions is None else positions.numel()
    step = max(1, _PASS_BYTES // _row_bytes(stored, part.dim))
    for start in range(0, count, step):
        block = slice(start, min(start + step, count))
        chosen = block if positions is None else positions[block]
        ids = _ids(stored.rows, chosen)
        _write(part.values, ids, _values(stored, chosen, part.dim)[:, part.columns])
        for source, state in zip(stored.row_states, part.row_states, strict=True):
            if state is None:
                continue
            rows = state_values(source[chosen])
            if state.by_column:
                _write(state.into, ids, rows[:, part.columns])
            elif state.before == 0:
                _write(state.into, ids, rows)
            else:
                _write(state.into, ids, _merged(state, ids, rows))


def _merged(state: StateOfPiece, ids: Tensor | slice, rows: Tensor) -> Tensor:
    """Merge a piece's states into those of earlier pieces: mean by columns; largest of integers.

    The mean is updated from the previous mean, so that pieces with equal values do not change it.
    """
    earlier = state.into[ids if isinstance(ids, slice) else ids.to(state.into.device)].cpu()
    if not rows.is_floating_point():
        return torch.maximum(earlier, rows)
    old, new = earlier.double(), rows.double()
    by = torch.where(old == new, 0.0, new - old)  # 0 also for two infinities, not NaN
    return old + by * (state.weight / (state.before + state.weight))


def _values(stored: StoredRows, chosen: slice | Tensor, dim: int) -> Tensor:
    if stored.scheme == "exact":
        return stored.values[chosen]
    codes, scale, offset = (
        source[chosen].contiguous() for source in (stored.values, stored.scale, stored.offset)
    )
    return quantize.dequantize_packed(codes, scale, offset, dim=dim, bits=stored.bits)


def _write(dest: Tensor, ids: Tensor | slice, rows: Tensor) -> None:
    """Write rows to `dest`, converted to its dtype (format §3.2, §3.5)."""
    if isinstance(ids, slice):
        dest[ids].copy_(rows)
    else:
        moved = rows.to(dest.device).to(dest.dtype)
        dest.index_copy_(0, ids.to(dest.device), moved)


def _ids(rows: range | Tensor, chosen: slice | Tensor) -> Tensor | slice:
    if isinstance(rows, range):
        if isinstance(chosen, slice):
            return slice(rows.start + chosen.start, rows.start + chosen.stop)
        return chosen + rows.start
    return rows[chosen]


def _row_bytes(stored: StoredRows, dim: int) -> int:
    """Return the memory of one row, stored and decoded."""
    rows = max(1, len(stored.rows))
    return 8 + 4 * dim + sum(t.nbytes for t in (stored.values, *stored.row_states)) // rows


@dataclass(frozen=True, kw_only=True)
class TablePart:
    """Rows and columns of one whole table, and where they go, on any device.

    Attributes:
        table: name of the table.
        values: [n, w], of the table's dtype: rows first_row … first_row + n − 1 of its columns
            first_column … first_column + w − 1. Of any strides; contiguous is faster.
        row_states: the wanted row states, by name, each of its dtype: [n, w] for a state with a
            value for each column (Adam's), else [n, *shape].
        first_row, first_column: first row and column of the part in the table, counted from 0.
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
    """Return where each piece of the manifest goes, as `RestoreTarget.begin` returns it.

    Values and row states keep their stored bits, with one exception: a state without a value for
    each column (row-wise Adagrad's sum, for instance) whose wanted part spans several pieces. It
    becomes the mean of the pieces' states weighted by their columns, which is what such a state
    means; integers become the largest. Equal states stay unchanged.

    A part that covers exactly the columns of one piece, in contiguous memory, is written in place.
    Other parts go through 8 MiB of memory, a few rows at a time.

    Args:
        manifest: manifest of the checkpoint.
        parts: any number of parts of each table; they may overlap, their tensors must not.

    Raises:
        IncompatibleModel: a part does not lie in a table of the checkpoint; nothing has been
            written.
    """
    tables = logical_tables(manifest.tables)
    parts_of: dict[int, list[PartOfPiece]] = {}
    for part in parts:
        table = tables.get(part.table)
        if table is None:
            near = get_close_matches(part.table, tables, n=3) or list(tables)
            tables_text = ", ".join(map(repr, near))
            raise _does_not_fit(
                part.table, f"no such table in {manifest.ref}", f"a name such as {tables_text:.500}"
            )
        _check_part(table, part)
        for piece in table.pieces:
            common = _common(piece.columns, part.columns)
            if common and len(part.values):
                parts_of.setdefault(piece.index, []).append(_of_piece(table, piece, part, common))
    return [
        _target(parts_of[index]) if index in parts_of else None
        for index in range(len(manifest.tables))
    ]


def place_piece(stored: StoredRows, table: LogicalTable, piece: Piece, part: TablePart) -> None:
    """Write rows of a chunk to a part that has all columns of their piece.

    Args:
        stored: rows of the piece, numbered as those of the part.
        table: the table in the checkpoint.
        piece: one of its pieces.
        part: as `map_parts` takes it.
    """
    target = _target([_of_piece(table, piece, part, _common(piece.columns, part.columns))])
    if isinstance(target, TableTarget):
        place(stored, None, target)
    else:
        target.take(stored, None)


def _target(parts: list[PartOfPiece]) -> TableTarget | RowSink:
    in_place = parts[0].as_target() if len(parts) == 1 else None
    return in_place or PieceSink(parts)


def _of_piece(table: LogicalTable, piece: Piece, part: TablePart, common: range) -> PartOfPiece:
    target_columns = slice(common.start - part.columns.start, common.stop - part.columns.start)
    columns_before = sum(  # columns of pieces that are read before this one
        len(_common(earlier_piece.columns, part.columns))
        for earlier_piece in table.pieces
        if earlier_piece.index < piece.index
    )
    states: list[StateOfPiece | None] = []
    for state in table.row_states if part.row_states else ():
        state_target = part.row_states.get(state.name)
        if state_target is None:
            states.append(None)
        elif state.by_column:
            states.append(StateOfPiece(state_target[:, target_columns], by_column=True))
        else:
            states.append(
                StateOfPiece(
                    state_target, by_column=False, weight=len(common), before=columns_before
                )
            )
    return PartOfPiece(
        first_row=part.first_row,
        dim=piece.spec.dim,
        columns=slice(common.start - piece.columns.start, common.stop - piece.columns.start),
        values=part.values[:, target_columns],
        row_states=tuple(states) or (None,) * len(piece.spec.row_states),
        changed=part.changed,
    )


def _check_part(table: LogicalTable, part: TablePart) -> None:
    values, dtype = part.values, torch_dtype(table.dtype)
    if values.dim() != 2 or values.dtype != dtype:
        values_text = f"values: {values.dtype} {tuple(values.shape)}"
        raise _does_not_fit(part.table, values_text, f"{dtype}, rows and columns")
    rows, columns = values.shape
    for label, first, count, size in (
        ("rows", part.first_row, rows, table.rows),
        ("columns", part.first_column, columns, table.dim),
    ):
        if first < 0 or first + count > size:
            values_text = f"{label} {first} … {first + count - 1} wanted"
            raise _does_not_fit(part.table, values_text, f"{label} of 0 … {size - 1}")
    stored_states = {state.name: state for state in table.row_states} if part.row_states else {}
    for name, tensor in part.row_states.items():
        if name not in stored_states:
            states_text = ", ".join(stored_states) or "none"
            raise _does_not_fit(
                part.table, f"row state {name!r:.80} wanted", f"one of: {states_text}"
            )
        _check_state(part, stored_states[name], tensor)


def _check_state(part: TablePart, state: LogicalState, tensor: Tensor) -> None:
    rows, columns = part.values.shape
    shape = (rows, columns) if state.by_column else (rows, *state.shape)
    if tuple(tensor.shape) != shape or tensor.dtype != torch_dtype(state.dtype):
        state_text = f"{state.name}: {tensor.dtype} {tuple(tensor.shape)}"
        raise _does_not_fit(part.table, state_text, f"{torch_dtype(state.dtype)} {shape}")


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


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
        """Return where the rows of each piece go."""
        return map_parts(manifest, self._parts)

    def state_wanted(self, manifest: Manifest, known_trees: Mapping[int, object]) -> StateWanted:
        """Ask for no state."""
        return StateWanted()

    def finish(self, manifest: Manifest, state: dict[int, object]) -> None:
        """Keep the manifest."""
        self.manifest = manifest
