"""Describes embedding tables, their pieces and their row states (format §4, `tables`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal, Self

from pydantic import FailFast, Field, model_validator

from recpoint.format.dtypes import Dtype, array_bytes
from recpoint.format.keyed_use import check_keyed_table
from recpoint.format.records import Part

__all__ = [
    "Columns",
    "GRID_DTYPE",
    "MAX_TABLE_ROWS",
    "RowStateSpec",
    "Size",
    "StateBits",
    "TableSpec",
    "check_tables",
    "least_bits",
]

MAX_TABLE_ROWS = 2**48
MAX_DIM = 2**20

#: Bits of a value of row states that may be narrower; what a checkpoint has at the narrowest.
StateBits = Literal[8, 16]
#: The dtype of a coded row state's grids, one a row.
GRID_DTYPE: Final[Dtype] = "I16"

Size = Annotated[int, Field(ge=1, le=MAX_DIM)]
_Name = Annotated[str, Field(min_length=1, max_length=1024)]


def least_bits(bits: Iterable[StateBits | None]) -> StateBits | None:
    """Return the fewest bits of row states; None if nothing has states in fewer bits."""
    return min((narrow for narrow in bits if narrow is not None), default=None)


class RowStateSpec(Part):
    """Optimizer state with one entry a row; `shape` is the shape of one entry, [] for a scalar."""

    name: _Name
    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Field(max_length=4, strict=False), FailFast()]
    optimizer: Annotated[int, Field(ge=0, lt=1000)]

    @property
    def may_be_narrower(self) -> bool:
        """Whether it may be stored in fewer bits (format §3.5); one value a row stays exact."""
        return self.dtype == "F32" and any(size > 1 for size in self.shape)

    @property
    def narrow_dtype(self) -> Dtype:
        """The dtype in which it is stored if it is rounded to 16 bits where that is allowed."""
        return "BF16" if self.may_be_narrower else self.dtype

    @property
    def least_bytes(self) -> int:
        """The fewest bytes in which a row of it may be stored."""
        return self.row_bytes("U8" if self.may_be_narrower else self.dtype)

    def is_coded(self, dtype: Dtype) -> bool:
        """Tell whether it is stored as codes if its array has this dtype."""
        return dtype == "U8" and self.may_be_narrower

    def row_bytes(self, dtype: Dtype) -> int:
        """Return the stored bytes of a row's state if its array has this dtype; with its grid."""
        grid = array_bytes(GRID_DTYPE, ()) if self.is_coded(dtype) else 0
        return array_bytes(dtype, self.shape) + grid


class Columns(Part):
    """The columns of a table that a piece holds: those from `first` on, of `of` in the table."""

    first: Annotated[int, Field(ge=0, lt=MAX_DIM)]
    of: Size


class TableSpec(Part):
    """One embedding table, or a piece of one: its name in the model, its shape, its row states.

    `columns` says which columns of the whole table a piece's `dim` columns are; None: all of them.
    """

    name: _Name
    rows: Annotated[int, Field(ge=1, le=MAX_TABLE_ROWS)]
    dim: Size
    dtype: Literal["F64", "F32", "F16", "BF16"]
    row_states: Annotated[tuple[RowStateSpec, ...], Field(max_length=64, strict=False), FailFast()]
    columns: Columns | None = None

    @model_validator(mode="after")
    def _piece(self) -> Self:
        columns, dim = self.columns, self.dim
        if columns is not None and (dim == columns.of or columns.first + dim > columns.of):
            raise ValueError(f"{dim} columns from {columns.first} are no piece of {columns.of}")
        return self

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        check_keyed_table(self)
        return self


def check_tables(tables: Sequence[TableSpec]) -> None:
    """Check that table names are unique, except for pieces, which must make up one whole table.

    Raises:
        ValueError: they are not, or the pieces do not.
    """
    by_name: dict[str, list[TableSpec]] = {}
    for table in tables:
        by_name.setdefault(table.name, []).append(table)
    for name, pieces_found in by_name.items():
        pieces = [(table.columns, table) for table in pieces_found if table.columns is not None]
        if not pieces and len(pieces_found) == 1:
            continue
        if len(pieces) != len(pieces_found):
            raise ValueError("two tables have one name")
        end, first = 0, pieces_found[0]
        for columns, piece in sorted(pieces, key=lambda pair: pair[0].first):
            if columns.first != end or pieces[0][0].of != columns.of:
                raise ValueError(
                    f"a piece of {name!r:.80} has columns from {columns.first} of {columns.of}, "
                    f"not from {end}"
                )
            if (piece.rows, piece.dtype) != (first.rows, first.dtype):
                raise ValueError(f"pieces of {name!r:.80} differ in rows or dtype")
            end += piece.dim
        if end != pieces[0][0].of:
            raise ValueError(f"the pieces of {name!r:.80} have {end} of {pieces[0][0].of} columns")
