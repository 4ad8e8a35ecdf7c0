"""Holds the row states of a chunk that are stored as codes, and decodes them (format §3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from recpoint.format.chunk import Section, section_tensor
from recpoint.format.manifest import RowStateSpec
from recpoint.kernels import moments

__all__ = ["CodedState", "StoredState", "state_values", "stored_state"]


@dataclass(frozen=True, kw_only=True)
class CodedState:
    """A row state as codes.

    Attributes:
        codes: u8 [n, *shape].
        grids: i16 [n].
    """

    codes: Tensor
    grids: Tensor

    def __getitem__(self, rows: slice | Tensor) -> CodedState:
        """Return some of the rows: a slice, or positions, int64 [m]."""
        return CodedState(codes=self.codes[rows], grids=self.grids[rows])

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of what they decode to."""
        return self.grids.nbytes + (1 + 4) * self.codes.nbytes

    def decoded(self) -> Tensor:
        """Return the values: f32 [n, *shape]."""
        values = moments.decode(_flat(self.codes), self.grids.contiguous())
        return values.view(self.codes.shape)

    def write(self, dest: Tensor, ids: range | Tensor, positions: Tensor | None) -> None:
        """Write the values of chosen rows to their places.

        Args:
            dest: f32 [R, *shape], contiguous, on the CPU.
            ids: row of `dest` for each chosen row, int64 [m]; or a range.
            positions: the chosen rows, int64 [m]; None: all.
        """
        codes, grids = _flat(self.codes), self.grids.contiguous()
        if isinstance(ids, range):
            target = _flat(dest[ids.start : ids.stop])
            moments.decode_rows(codes, grids, target, None, positions=positions)
        else:
            moments.decode_rows(codes, grids, _flat(dest), ids, positions=positions)


#: A row state of a chunk: values of the state's dtype or BF16, [n, *shape], or codes.
StoredState = Tensor | CodedState


def stored_state(sections: Mapping[str, Section], number: int, state: RowStateSpec) -> StoredState:
    """Return a row state of a checked chunk, in the chunk's memory.

    Args:
        sections: the chunk's arrays, by name.
        number: index of the row state.
        state: the row state.
    """
    section = sections[f"state.{number}"]
    values = section_tensor(section)
    if not state.is_coded(section.dtype):
        return values
    return CodedState(codes=values, grids=section_tensor(sections[f"state.{number}.grid"]))


def state_values(state: StoredState) -> Tensor:
    """Return the values of a row state, [n, *shape]: decoded if it is coded."""
    return state.decoded() if isinstance(state, CodedState) else state


def _flat(rows: Tensor) -> Tensor:
    """Return [n, *shape] as [n, m], contiguous; of contiguous rows the same memory."""
    return rows.flatten(1).contiguous()
