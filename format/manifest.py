"""The manifest: the record whose existence makes a checkpoint exist (format §4)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from recpoint.format import naming
from recpoint.format.dtypes import Dtype, item_bytes
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
    "CODE_BITS",
    "ChunkEntry",
    "Dtype",
    "Kind",
    "MAX_CHUNK_BYTES",
    "MAX_TABLE_ROWS",
    "Manifest",
    "Quantizer",
    "RowCount",
    "RowStateSpec",
    "Scheme",
    "Size",
    "TableSpec",
    "check_links",
]

MAX_CHUNK_BYTES = 2**32 - 1
MAX_TABLE_ROWS = 2**48
MAX_DIM = 2**20

#: Bits of one quantized value.
CODE_BITS = (2, 3, 4, 8)

Kind = Literal["full", "increment"]
Scheme = Literal["asymmetric", "exact"]

Size = Annotated[int, Field(ge=1, le=MAX_DIM)]
RowCount = Annotated[int, Field(ge=1, lt=2**31)]
_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Parameter = Annotated[int, Field(ge=0, lt=2**31)]


def check_links(
    kind: Kind,
    step: int,
    base: CheckpointRef | None,
    parent: CheckpointRef | None,
    chain_length: int,
) -> None:
    """That a full has no links, and an increment links that can be those of a chain.

    Raises:
        ValueError: otherwise.
    """
    if kind == "full":
        if base or parent or chain_length != 1:
            raise ValueError("a full has no base, no parent and chain_length 1")
    elif not base or not parent or chain_length < 2:
        raise ValueError("an increment has a base, a parent and chain_length 2 or more")
    elif parent.step >= step or base.step > parent.step:
        raise ValueError("steps must ascend from base to parent to checkpoint")


class RowStateSpec(Part):
    """Optimizer state with one entry a row; `shape` is that of one entry, [] for a scalar."""

    name: _Name
    dtype: Dtype
    shape: Annotated[tuple[Size, ...], Field(max_length=4, strict=False), FailFast()]
    optimizer: Annotated[int, Field(ge=0, lt=1000)]

    @property
    def narrow_dtype(self) -> Dtype:
        """The dtype it is stored in when it may be rounded: one value a row is always exact."""
        several = any(size > 1 for size in self.shape)
        return "BF16" if self.dtype == "F32" and several else self.dtype


class TableSpec(Part):
    """One embedding table: its name in the model, its shape, its row states."""

    name: _Name
    rows: Annotated[int, Field(ge=1, le=MAX_TABLE_ROWS)]
    dim: Size
    dtype: Literal["F64", "F32", "F16", "BF16"]
    row_states: Annotated[tuple[RowStateSpec, ...], Field(max_length=64, strict=False), FailFast()]


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
        name = naming.parse_chunk_name(self.key)
        if name is None:
            raise ValueError("key does not have the form of a chunk's key")
        content = "state" if name.table is None else "rows"
        if (self.rank, self.table, self.content) != (name.rank, name.table, content):
            raise ValueError("content, rank and table differ from those in the key")
        about_rows = (self.row_count, self.bits, self.scheme)
        if any((field is None) != (content == "state") for field in about_rows):
            raise ValueError("table, row_count, bits and scheme are for chunks of rows")
        if self.scheme == "asymmetric" and self.bits not in CODE_BITS:
            raise ValueError(f"codes have {', '.join(map(str, CODE_BITS))} bits")
        return self


class Quantizer(Part):
    """How the scales and offsets of a table's quantized rows were found; no reader needs it.

    Parameters that the method does not have are 0. `sample_rows` is how many of the table's staged
    rows they were chosen on, drawn with `seed`; 0 when the setting left nothing to choose.
    """

    table: Annotated[int, Field(ge=0, le=naming.MAX_TABLE)]
    method: Annotated[str, Field(pattern=r"\A[a-z][a-z0-9_]{0,31}\z")]
    bins: _Parameter
    ratio_permille: _Parameter
    refits: _Parameter
    sample_rows: _Parameter
    seed: _Count

    @model_validator(mode="after")
    def _sample(self) -> Self:
        if self.sample_rows == 0 and self.seed != 0:
            raise ValueError("a seed of no sample")
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
    tables: Annotated[tuple[TableSpec, ...], Field(max_length=100_000, strict=False), FailFast()]
    chunks: Annotated[
        tuple[ChunkEntry, ...],
        Field(min_length=1, max_length=4_000_000, strict=False),
        FailFast(),  # else a list of a million bad entries becomes ten million errors
    ]
    quantizers: Annotated[
        tuple[Quantizer, ...], Field(max_length=100_000, strict=False), FailFast()
    ]
    quantized_by: Annotated[str, Field(max_length=255)]
    state_bits: Literal[16] | None
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
        check_links(self.kind, self.step, self.base, self.parent, self.chain_length)
        return self

    @model_validator(mode="after")
    def _contents(self) -> Self:
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError("two tables have one name")
        keys = [chunk.key for chunk in self.chunks]
        if len(set(keys)) != len(keys):
            raise ValueError("one chunk is named twice")
        quantized = [quantizer.table for quantizer in self.quantizers]
        if quantized != sorted(set(quantized)) or max(quantized, default=-1) >= len(self.tables):
            raise ValueError("quantizers ascend by table, one at most for each table")
        rows = [0] * len(self.tables)
        for chunk in self.chunks:
            if chunk.rank >= self.ranks:
                raise ValueError(f"{chunk.key} is of rank {chunk.rank} of {self.ranks}")
            if chunk.table is not None and chunk.row_count is not None:
                if chunk.table >= len(rows):
                    raise ValueError(f"{chunk.key} is for table {chunk.table} of {len(rows)}")
                exact_bits = 8 * item_bytes(self.tables[chunk.table].dtype)
                if chunk.scheme == "exact" and chunk.bits != exact_bits:
                    raise ValueError(f"{chunk.key} has {chunk.bits} exact bits, not {exact_bits}")
                rows[chunk.table] += chunk.row_count
        for table, stored in zip(self.tables, rows, strict=True):
            if stored > table.rows or (self.kind == "full" and stored != table.rows):
                raise ValueError(f"table {table.name!r} has {table.rows} rows, {stored} are stored")
        return self
