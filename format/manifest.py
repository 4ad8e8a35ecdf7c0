"""Defines the manifest: the record whose existence makes a checkpoint exist (format §4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Literal, NamedTuple, Self

from pydantic import FailFast, Field, model_validator

from recpoint.format import naming
from recpoint.format.dtypes import Dtype, array_bytes, item_bytes
from recpoint.format.history import History
from recpoint.format.keyed_use import KeyedUses, check_keyed, check_keyed_table
from recpoint.format.records import (
    CheckpointRef,
    Generation,
    HexFloat,
    HexToken,
    Milliseconds,
    Part,
    Step,
    StoredRecord,
)

__all__ = [
    "CODE_BITS",
    "ChainLength",
    "ChosenMethod",
    "ChunkEntry",
    "Columns",
    "CacheUse",
    "CheckedStripes",
    "CopiedAhead",
    "Dtype",
    "GRID_DTYPE",
    "Kind",
    "Links",
    "MAX_CHAIN_LENGTH",
    "MAX_CHUNKS",
    "MAX_CHUNK_BYTES",
    "MAX_TABLE_ROWS",
    "Manifest",
    "MeasuredLoss",
    "Quantizer",
    "RankCount",
    "RowCount",
    "RowStateSpec",
    "Scheme",
    "ServerCount",
    "Size",
    "StandsFor",
    "StateBits",
    "TableSpec",
    "Word",
    "check_chunks",
    "check_copied_ahead",
    "check_links",
    "check_parts",
    "check_quantizers",
    "check_tables",
    "is_absent",
    "least_bits",
]

MAX_CHUNK_BYTES = 2**32 - 1
#: Bounds the chunks, and also the quantizers, of a manifest. A record's 64 MiB end both earlier.
MAX_CHUNKS = 4_000_000
MAX_TABLE_ROWS = 2**48
MAX_DIM = 2**20
MAX_CHAIN_LENGTH = 1_000_000

#: Bits of one quantized value.
CODE_BITS = (2, 3, 4, 5, 6, 8)

#: Bits of a value of row states that may be narrower; what a checkpoint has at the narrowest.
StateBits = Literal[8, 16]
#: The dtype of a coded row state's grids, one a row.
GRID_DTYPE: Final[Dtype] = "I16"

Kind = Literal["full", "increment"]
Scheme = Literal["asymmetric", "exact", "first", "residual"]

Size = Annotated[int, Field(ge=1, le=MAX_DIM)]
ChainLength = Annotated[int, Field(ge=1, le=MAX_CHAIN_LENGTH)]
RowCount = Annotated[int, Field(ge=1, lt=2**31)]
RankCount = Annotated[int, Field(ge=1, le=naming.MAX_RANK + 1)]
ServerCount = Annotated[int, Field(ge=1, le=naming.MAX_RANK + 1)]
_Name = Annotated[str, Field(min_length=1, max_length=1024)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Positive = Annotated[int, Field(ge=1, lt=2**63)]
_RowId = Annotated[int, Field(ge=0, lt=MAX_TABLE_ROWS)]
_Parameter = Annotated[int, Field(ge=0, lt=2**31)]

#: A word for people and for tuning; readers accept words that they do not know.
Word = Annotated[str, Field(pattern=r"\A[a-z][a-z0-9_]{0,31}\z")]


def least_bits(bits: Iterable[StateBits | None]) -> StateBits | None:
    """Return the fewest bits of row states; None if nothing has states in fewer bits."""
    return min((narrow for narrow in bits if narrow is not None), default=None)


def check_links(
    kind: Kind,
    step: int,
    base: CheckpointRef | None,
    parent: CheckpointRef | None,
    chain_length: int,
) -> None:
    """Check that a full has no links and that an increment's links can form a chain.

    Raises:
        ValueError: they do not.
    """
    if kind == "full":
        if base or parent or chain_length != 1:
            raise ValueError("a full has no base, no parent and chain_length 1")
    elif not base or not parent or chain_length < 2:
        raise ValueError("an increment has a base, a parent and chain_length 2 or more")
    elif parent.step >= step or base.step > parent.step:
        raise ValueError("steps must ascend from base to parent to checkpoint")


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


class ChosenMethod(Part):
    """How scales and offsets of quantized rows are found; no reader needs it.

    A parameter that the method does not have is 0. The method was chosen on `sample_rows` of the
    table's staged rows, drawn with `seed`; 0 if the setting left nothing to choose.
    """

    method: Word
    bins: _Parameter
    ratio_permille: _Parameter
    refits: _Parameter
    sample_rows: _Parameter
    seed: _Count

    @model_validator(mode="after")
    def _sample(self) -> Self:
        if self.sample_rows == 0 and self.seed != 0:
            raise ValueError("seed must be 0 if sample_rows is 0")
        return self


class Quantizer(ChosenMethod):
    """How one rank found the scales and offsets for one table of a checkpoint."""

    table: Annotated[int, Field(ge=0, le=naming.MAX_TABLE)]
    rank: Annotated[int, Field(ge=0, le=naming.MAX_RANK)]

    @property
    def chosen(self) -> ChosenMethod:
        """The method without its table and rank."""
        return ChosenMethod(**self.model_dump(exclude={"table", "rank"}))


def check_quantizers(quantizers: Sequence[Quantizer], tables: int, parts: int) -> None:
    """Check that quantizers ascend by table, then rank, with at most one for each pair.

    Raises:
        ValueError: they do not, or name a table or a part that does not exist.
    """
    quantized = [(quantizer.table, quantizer.rank) for quantizer in quantizers]
    if quantized != sorted(set(quantized)) or any(
        table_and_part[0] >= tables or table_and_part[1] >= parts for table_and_part in quantized
    ):
        raise ValueError("quantizers must ascend by table, then rank, one at most for each pair")


class CopiedAhead(Part):
    """Rows that a trainer copied before the stall of a checkpoint, and in it, with row states.

    A row that changed after it was copied was copied once more, and counts twice.
    """

    rows_before: _Positive
    bytes_before: _Positive
    rows_in_stall: _Count
    bytes_in_stall: _Count

    @property
    def share_before(self) -> float:
        """The share of the copied rows that were copied before the stall; above 0 up to 1."""
        return self.rows_before / (self.rows_before + self.rows_in_stall)


class MeasuredLoss(Part):
    """What rounding costs in loss, as a trainer had measured it by the cut; costs are shares of it.

    Attributes:
        increase: the most that it may cost.
        price: what one bit may cost; None: rows have one width.
        low, high: bounds of the cost, as shown for what is stored; both None: nothing was shown.
        predicted: cost by importances and errors; None: it was not computed for this price.
        batches: batches measured so far.
    """

    increase: HexFloat
    price: HexFloat | None
    low: HexFloat | None
    high: HexFloat | None
    predicted: HexFloat | None
    batches: _Count


class CacheUse(Part):
    """What the cache of a trainer's tables did since the checkpoint before, or since the start.

    Attributes:
        hits, misses: ids looked up whose rows were in their slots, and were not.
        fetched_rows, fetched_bytes: rows that entered a slot; bytes of those that the home had.
        written_rows, written_bytes: rows that were written back.
        wait_us: how long training waited for rows, in microseconds.
        window: batches that were planned ahead at the cut.
    """

    hits: _Count
    misses: _Count
    fetched_rows: _Count
    fetched_bytes: _Count
    written_rows: _Count
    written_bytes: _Count
    wait_us: _Count
    window: _Count

    @classmethod
    def joined(cls, found: Iterable[Self | None]) -> Self | None:
        """Return the sums of what several ranks' caches did, and the largest of their windows."""
        uses = [use for use in found if use is not None]
        if not uses:
            return None
        sums = {name: sum(getattr(use, name) for use in uses) for name in cls.model_fields}
        return cls(**sums | {"window": max(use.window for use in uses)})


class CheckedStripes(Part):
    """What a trainer found when it compared rows of embedding servers with their parity.

    It compared the stripes of the rows that the checkpoint took from the servers, after its cut.
    One stripe that did not fit would have ended the checkpoint.

    Attributes:
        fits: comparisons of a stripe, all of whose members fit each other.
        unknown: stripes that could not be compared, such as those of a server that was recovered.
    """

    fits: _Count
    unknown: _Count

    @classmethod
    def joined(cls, found: Iterable[Self | None]) -> Self | None:
        """Return the sums of what several ranks, or several checkpoints, found."""
        checks = [check for check in found if check is not None]
        if not checks:
            return None
        fits, unknown = sum(check.fits for check in checks), sum(check.unknown for check in checks)
        return cls(fits=fits, unknown=unknown)


def check_copied_ahead(copied: CopiedAhead | None, parts: int) -> None:
    """Check that no row was copied ahead if there are several parts, which cannot say so.

    Raises:
        ValueError: rows were.
    """
    if copied is not None and parts > 1:
        raise ValueError(f"rows copied ahead, of a checkpoint of {parts} parts")


def is_absent(value: object) -> bool:
    """Whether an optional field is left out of a record: absent, and not null."""
    return value is None


class Links(NamedTuple):
    """A checkpoint's place in its chain when it was taken; a consolidation does not change it."""

    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: int


class StandsFor(Part):
    """The links of the checkpoint that a consolidated manifest stands for.

    A checkpoint that was taken as a full has no `StandsFor`.
    """

    kind: Literal["increment"] = "increment"
    base: CheckpointRef
    parent: CheckpointRef
    chain_length: ChainLength


class Manifest(StoredRecord):
    """One committed checkpoint, or a consolidation with the same step, generation and attempt."""

    format: Literal["recpoint/manifest"] = "recpoint/manifest"
    step: Step
    generation: Generation
    attempt: HexToken
    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: ChainLength
    stands_for: StandsFor | None
    policy: Word
    ranks: RankCount
    servers: Annotated[ServerCount | None, Field(exclude_if=is_absent)] = None
    tables: Annotated[tuple[TableSpec, ...], Field(max_length=100_000, strict=False), FailFast()]
    chunks: Annotated[
        tuple[ChunkEntry, ...],
        Field(min_length=1, max_length=MAX_CHUNKS, strict=False),
        FailFast(),  # otherwise a list of a million bad entries becomes ten million errors
    ]
    quantizers: Annotated[
        tuple[Quantizer, ...], Field(max_length=MAX_CHUNKS, strict=False), FailFast()
    ]
    quantized_by: Annotated[str, Field(max_length=255)]
    state_bits: StateBits | None
    snapshot_ms: Milliseconds
    staged_ms: Milliseconds
    committed_ms: Milliseconds
    stall_us: _Count
    copied_ahead: Annotated[CopiedAhead | None, Field(exclude_if=is_absent)] = None
    loss: Annotated[MeasuredLoss | None, Field(exclude_if=is_absent)] = None
    keyed: Annotated[KeyedUses | None, Field(exclude_if=is_absent)] = None
    cache: Annotated[CacheUse | None, Field(exclude_if=is_absent)] = None
    stripes: Annotated[CheckedStripes | None, Field(exclude_if=is_absent)] = None
    dirty_rows: _Count
    full_bytes: _Count
    history: History
    writer: Annotated[str, Field(max_length=255)]

    @property
    def ref(self) -> CheckpointRef:
        """The reference with which increments name this checkpoint."""
        return CheckpointRef(step=self.step, generation=self.generation, attempt=self.attempt)

    @property
    def parts(self) -> int:
        """How many parts it has: one of each rank, then one of each embedding server."""
        return self.ranks + (self.servers or 0)

    @property
    def links(self) -> Links:
        """The links of the checkpoint when it was taken; its children go by these."""
        name = self.stands_for or self
        return Links(name.kind, name.base, name.parent, name.chain_length)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(chunk.bytes for chunk in self.chunks)

    @property
    def needed_base(self) -> CheckpointRef | None:
        """The full whose rows its residuals are added to; None if it has no residuals."""
        has_residuals = any(chunk.scheme == "residual" for chunk in self.chunks)
        return self.base if has_residuals else None

    @model_validator(mode="after")
    def _links(self) -> Self:
        check_links(self.kind, self.step, self.base, self.parent, self.chain_length)
        check_parts(self.ranks, self.servers)
        check_copied_ahead(self.copied_ahead, self.parts)
        check_keyed(self.keyed, self.tables)
        if self.stands_for is not None:
            links = self.links
            check_links(links.kind, self.step, links.base, links.parent, links.chain_length)
            self._check_shorter(self.stands_for)
        return self

    def _check_shorter(self, shortened: StandsFor) -> None:
        if self.parent is None:
            return
        if self.base != shortened.base:
            raise ValueError("a consolidated increment must keep the base of its checkpoint")
        if self.parent.step >= shortened.parent.step or self.chain_length >= shortened.chain_length:
            raise ValueError("a consolidated increment needs an earlier parent and a shorter chain")

    @model_validator(mode="after")
    def _contents(self) -> Self:
        check_tables(self.tables)
        check_quantizers(self.quantizers, len(self.tables), self.parts)
        rows = check_chunks(
            self.chunks, self.tables, kind=self.kind, ranks=self.ranks, parts=self.parts
        )
        for table, stored in zip(self.tables, rows, strict=True):
            if stored > table.rows or (self.kind == "full" and stored != table.rows):
                raise ValueError(f"table {table.name!r} has {table.rows} rows, {stored} are stored")
        return self

    @model_validator(mode="after")
    def _under_one_prefix(self) -> Self:
        """Check that one attempt, or one consolidation, wrote all chunks (§4, invariant 1)."""
        attempt = naming.AttemptName(self.step, self.generation, self.attempt)
        if self.stands_for is not None:
            chunk_name = naming.parse_chunk_key(self.chunks[0].key)
            assert chunk_name is not None  # ChunkEntry lets no other key through
            if chunk_name[:2] != attempt[:2] or chunk_name == attempt:
                raise ValueError(f"{self.chunks[0].key} is of no consolidation of this checkpoint")
            attempt = chunk_name
        prefix = naming.attempt_prefix(*attempt)
        for chunk in self.chunks:
            if not chunk.key.startswith(prefix):
                raise ValueError(f"{chunk.key} is not under {prefix}")
        return self
