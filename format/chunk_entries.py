"""Describes the chunks of a checkpoint, as manifests and parts name them (format §4, `chunks`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recpoint.format import naming
from recpoint.format.dtypes import item_bytes
from recpoint.format.records import Part
from recpoint.format.tables import MAX_TABLE_ROWS, TableSpec

__all__ = [
    "CODE_BITS",
    "ChunkEntry",
    "Kind",
    "MAX_CHUNK_BYTES",
    "RowCount",
    "Scheme",
    "check_chunks",
    "check_parts",
]

MAX_CHUNK_BYTES = 2**32 - 1

#: Bits of one quantized value.
CODE_BITS = (2, 3, 4, 5, 6, 8)

Kind = Literal["full", "increment"]
Scheme = Literal["asymmetric", "exact", "first", "residual"]

RowCount = Annotated[int, Field(ge=1, lt=2**31)]
_RowId = Annotated[int, Field(ge=0, lt=MAX_TABLE_ROWS)]


class ChunkEntry(Part):
    """One stored object: its key, its length, its digest, and what it holds."""

    key: Annotated[str, Field(max_length=200)]
    bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]
    crc32c: Annotated[int, Field(ge=0, lt=2**32)]
    content: naming.Content
    rank: Annotated[int, Field(ge=0, le=naming.MAX_RANK)]
    table: Annotated[int, Field(ge=0, le=naming.MAX_TABLE)] | None = None
    row_count: RowCount | None = None
    first_row: _RowId | None = None
    last_row: _RowId | None = None
    bits: Annotated[int, Field(ge=0, le=64)] | None = None
    scheme: Scheme | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        name = naming.parse_chunk_name(self.key)
        if name is None:
            raise ValueError("key does not have the form of a chunk's key")
        if (self.rank, self.table, self.content) != (name.rank, name.table, name.content):
            raise ValueError("content, rank and table differ from those in the key")
        first, last, rows = self.first_row, self.last_row, self.row_count
        about_rows = (rows, first, last, self.bits, self.scheme)
        if any((field is None) != (name.content != "rows") for field in about_rows):
            raise ValueError("table, rows, bits and scheme are for chunks of rows")
        if first is not None and last is not None and rows is not None and rows > last - first + 1:
            raise ValueError(f"{rows} rows do not fit into ids {first} to {last}")
        if self.scheme in ("asymmetric", "residual") and self.bits not in CODE_BITS:
            raise ValueError(f"bits must be one of {', '.join(map(str, CODE_BITS))} for codes")
        if self.bits is not None and (self.bits == 0) != (self.scheme == "first"):
            raise ValueError("bits must be 0 for rows with their first values, and only for these")
        return self


def check_parts(ranks: int, servers: int | None) -> None:
    """Check that the parts of ranks and embedding servers can be numbered.

    Raises:
        ValueError: they are too many.
    """
    if ranks + (servers or 0) > naming.MAX_RANK + 1:
        parts_text = f"{ranks} ranks and {servers} embedding servers"
        raise ValueError(f"{parts_text}, of at most {naming.MAX_RANK + 1} together")


def check_chunks(
    chunks: Sequence[ChunkEntry], tables: Sequence[TableSpec], *, kind: Kind, ranks: int, parts: int
) -> list[int]:
    """Check that each chunk is named once, and that its table, part and rows exist.

    Args:
        chunks: the chunks of a checkpoint, or of a part of it.
        tables: all tables of the checkpoint.
        kind: its kind: only increments have residuals, and only fulls rows with first values.
        ranks: its ranks, which alone have state.
        parts: its ranks and embedding servers.

    Returns:
        How many rows of each table the chunks hold.

    Raises:
        ValueError: a chunk fails this check.
    """
    keys = [chunk.key for chunk in chunks]
    if len(set(keys)) != len(keys):
        raise ValueError("one chunk is named twice")
    rows = [0] * len(tables)
    for chunk in chunks:
        if chunk.rank >= (ranks if chunk.content == "state" else parts):
            chunk_text = f"{chunk.key} is {chunk.content} of part {chunk.rank}"
            raise ValueError(f"{chunk_text} of {parts}, of which {ranks} are of ranks")
        if chunk.table is None or chunk.row_count is None or chunk.last_row is None:
            continue
        if chunk.table >= len(rows):
            raise ValueError(f"{chunk.key} is for table {chunk.table} of {len(rows)}")
        table = tables[chunk.table]
        exact_bits = 8 * item_bytes(table.dtype)
        if chunk.scheme == "exact" and chunk.bits != exact_bits:
            raise ValueError(f"{chunk.key} is exact with {chunk.bits} bits, not {exact_bits}")
        if chunk.scheme == "residual" and (table.dtype == "F64" or kind == "full"):
            raise ValueError(f"{chunk.key} has residuals of a {kind}'s table of {table.dtype}")
        if chunk.scheme == "first" and kind != "full":
            raise ValueError(f"{chunk.key} of an {kind} has rows with their first values")
        if chunk.last_row >= table.rows:
            raise ValueError(f"{chunk.key} has row {chunk.last_row} of {table.rows}")
        rows[chunk.table] += chunk.row_count
    return rows
