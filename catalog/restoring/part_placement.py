"""From a checked row chunk to some of its rows and columns, in tensors of any strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recpoint.catalog.chunks.chunk_reader import StoredRows
from recpoint.catalog.restoring.restore_target import TableTarget, mark_rows
from recpoint.kernels import quantize

__all__ = ["PartOfPiece", "PieceSink", "StateOfPiece"]

#: Rows that are decoded or converted at once.
_PASS_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class StateOfPiece:
    """Where a row state of a piece goes.

    Attributes:
        into: [n, columns], or [n, *shape] of a state that has no value for each column.
        by_column: which of both.
        weight: of the latter, how many of the wanted columns the piece has.
        before: how many of them the pieces have that are read before it.
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
        dim: columns of the piece.
        columns: those of them that are wanted.
        values: [n, columns], of any strides, on any device.
        row_states: one for each of the piece; None: not wanted.
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
        """The same, if the piece's rows go to their places as they are."""
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
    """Takes the rows of one piece to all parts that want some of it; a `RowSink`.

    Args:
        parts: one or more; what lies between their rows is read too.
    """

    def __init__(self, parts: Sequence[PartOfPiece]) -> None:
        self._parts = parts
        first = min(part.wanted.start for part in parts)
        self._wanted = range(first, max(part.wanted.stop for part in parts))

    @property
    def wanted(self) -> range:
        """See `RowSink.wanted`."""
        return self._wanted

    def take(self, stored: StoredRows, positions: Tensor | None) -> None:
        """See `RowSink.take`."""
        for part in self._parts:
            wanted = self._of(part)
            inside = stored.positions_of(wanted)
            chosen = positions
            if chosen is not None:
                ends = torch.tensor([inside.start, inside.stop], device="cpu")
                first, last = torch.searchsorted(chosen, ends).tolist()
                chosen = chosen[first:last] - inside.start
            _place(stored.within(wanted), chosen, part)

    def mark(self, rows: range | Tensor) -> None:
        """See `RowSink.mark`."""
        ids = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
        for part in self._parts:
            wanted = self._of(part)
            inside = ids[(ids >= wanted.start) & (ids < wanted.stop)] - wanted.start
            mark_rows(part.changed, inside, of=len(wanted))

    def _of(self, part: PartOfPiece) -> range:
        """The rows of a part, counted from the first that the sink takes."""
        first = part.wanted.start - self._wanted.start
        return range(first, first + len(part.values))


def _place(stored: StoredRows, positions: Tensor | None, part: PartOfPiece) -> None:
    """Put rows in their places, block by block; ids have been checked against the part."""
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
            rows = source[chosen]
            if state.by_column:
                _write(state.into, ids, rows[:, part.columns])
            elif state.before == 0:
                _write(state.into, ids, rows)
            else:
                _write(state.into, ids, _merged(state, ids, rows))


def _merged(state: StateOfPiece, ids: Tensor | slice, rows: Tensor) -> Tensor:
    """What several pieces have of a row: the mean by columns so far; of integers, the largest.

    The mean goes on from the one before, so that pieces with equal values leave it as it is.
    """
    before = state.into[ids if isinstance(ids, slice) else ids.to(state.into.device)].cpu()
    if not rows.is_floating_point():
        return torch.maximum(before, rows)
    old, new = before.double(), rows.double()
    by = torch.where(old == new, 0.0, new - old)  # of two infinities too
    return old + by * (state.weight / (state.before + state.weight))


def _values(stored: StoredRows, chosen: slice | Tensor, dim: int) -> Tensor:
    if stored.scheme == "exact":
        return stored.values[chosen]
    codes, scale, offset = (
        source[chosen].contiguous() for source in (stored.values, stored.scale, stored.offset)
    )
    return quantize.dequantize_packed(codes, scale, offset, dim=dim, bits=stored.bits)


def _write(dest: Tensor, ids: Tensor | slice, rows: Tensor) -> None:
    """Copy, or convert (format §3.2, §3.5)."""
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
    """What a row takes, decoded."""
    rows = max(1, len(stored.rows))
    return 8 + 4 * dim + sum(t.nbytes for t in (stored.values, *stored.row_states)) // rows
