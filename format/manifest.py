"""The manifest: the record whose existence makes a checkpoint exist (format §4)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from recpoint.format import naming
from recpoint.format.dtypes import Dtype
from recpoint.format.records import (
    CheckpointRef,
    Generation,
    HexToken,
    Milliseconds,
    Part,
    Record,
    Step,
)

__all__ = [
    "ChunkEntry",
    "Dtype",
    "Kind",
    "MAX_CHUNK_BYTES",
    "MAX_TABLE_ROWS",
    "Manifest",
    "RowCount",
    "RowStateSpec",
    "Scheme",
    "Size",
    "TableSpec",
]

MAX_CHUNK_BYTES = 2**32 - 1
MAX_TABLE_ROWS = 2**48
MAX_DIM = 2**20

Kind = Literal["full", "increment"]
Scheme = Literal["asymmetric", "exact"]

Size = Annotated[int, Field(ge=1, le=MAX_DIM)]
RowCount = Annotated[int, Field(ge=1, lt=2**31)]
_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


class RowStateSpec(Part):
    """Optimizer state with one entry a row; `shape` is that of one entry, [] for a scalar."""

    name: _Name
    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Field(max_length=4, strict=False)]
    optimizer: Annotated[int, Field(ge=0, lt=1000)]


class TableSpec(Part):
    """One embedding table: its name in the model, its shape, its row states."""

    name: _Name
    rows: Annotated[int, Field(ge=1, le=MAX_TABLE_ROWS)]
    dim: Size
    dtype: Literal["F64", "F32", "F16", "BF16"]
    row_states: Annotated[tuple[RowStateSpec, ...], Field(max_length=64, strict=False)]


class ChunkEntry(Part):
    """One stored object: where it is, how long, its digest, and what is in it."""

    key: Annotated[str, Field(max_length=200)]
    bytes: Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]
    crc32c: Annotated[int, Field(ge=0, lt=2**32)]
    content: Literal["rows", "state"]
    rank: Annotated[int, Field(ge=0, le=naming.MAX_RANK)]
    table: Annotated[int, Field(ge=0, le=naming.MAX_TABLE)] | None = None
    row_count: RowCount | None = None
    bits: Annotated[int, Field(ge=1, le=64)] | None = None
    scheme: Scheme | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not naming.is_chunk_key(self.key):
            raise ValueError("key does not have the form of a chunk's key")
        about_rows = (self.table, self.row_count, self.bits, self.scheme)
        if (self.content == "rows") != all(field is not None for field in about_rows):
            raise ValueError("table, row_count, bits and scheme are for chunks of rows")
        if self.content == "state" and any(field is not None for field in about_rows):
            raise ValueError("table, row_count, bits and scheme are for chunks of rows")
        return self


class Manifest(Record):
    """One committed checkpoint."""

    format: Literal["recpoint/manifest"] = "recpoint/manifest"
    run: HexToken
    step: Step
    generation: Generation
    attempt: HexToken
    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: Annotated[int, Field(ge=1, le=10_000)]
    ranks: Annotated[int, Field(ge=1, le=100_000)]
    tables: Annotated[tuple[TableSpec, ...], Field(max_length=100_000, strict=False)]
    chunks: Annotated[
        tuple[ChunkEntry, ...], Field(min_length=1, max_length=4_000_000, strict=False)
    ]
    snapshot_ms: Milliseconds
    staged_ms: Milliseconds
    committed_ms: Milliseconds
    stall_us: _Count
    dirty_rows: _Count
    full_bytes: _Count
    writer: Annotated[str, Field(max_length=255)]

    @property
    def ref(self) -> CheckpointRef:
        """The reference by which increments name this checkpoint."""
        return CheckpointRef(step=self.step, generation=self.generation, attempt=self.attempt)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.bytes for chunk in self.chunks)

    @model_validator(mode="after")
    def _links(self) -> Self:
        if self.kind == "full":
            if self.base or self.parent or self.chain_length != 1:
                raise ValueError("a full has no base, no parent and chain_length 1")
        elif not self.base or not self.parent or self.chain_length < 2:
            raise ValueError("an increment has a base, a parent and chain_length 2 or more")
        elif self.parent.step >= self.step or self.base.step > self.parent.step:
            raise ValueError("steps must ascend from base to parent to checkpoint")
        return self

    @model_validator(mode="after")
    def _contents(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError("two tables have one name")
        keys = [chunk.key for chunk in self.chunks]
        if len(set(keys)) != len(keys):
            raise ValueError("one chunk is named twice")
        rows = [0] * len(self.tables)
        for chunk in self.chunks:
            if chunk.table is not None and chunk.row_count is not None:
                if chunk.table >= len(rows):
                    raise ValueError(f"{chunk.key} is for table {chunk.table} of {len(rows)}")
                rows[chunk.table] += chunk.row_count
        for table, stored in zip(self.tables, rows, strict=True):
            if stored > table.rows or (self.kind == "full" and stored != table.rows):
                raise ValueError(f"table {table.name!r} has {table.rows} rows, {stored} are stored")
        return self
