"""Defines the manifest: the record whose existence makes a checkpoint exist (format §4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import FailFast, Field, PrivateAttr, model_validator

from recpoint.format import naming
from recpoint.format.chunk_entries import (
    CODE_BITS,
    MAX_CHUNK_BYTES,
    ChunkEntry,
    Kind,
    RowCount,
    Scheme,
    check_chunks,
    check_parts,
)
from recpoint.format.dtypes import Dtype
from recpoint.format.history import History
from recpoint.format.keyed_use import KeyedUses, check_keyed
from recpoint.format.quantizers import ChosenMethod, Quantizer, Word, check_quantizers
from recpoint.format.records import (
    CheckpointRef,
    Generation,
    HexToken,
    Milliseconds,
    Part,
    Step,
    StoredRecord,
)
from recpoint.format.tables import (
    GRID_DTYPE,
    MAX_TABLE_ROWS,
    Columns,
    RowStateSpec,
    Size,
    StateBits,
    TableSpec,
    check_tables,
    least_bits,
)
from recpoint.format.trainer_figures import (
    CacheUse,
    CheckedStripes,
    CopiedAhead,
    MeasuredLoss,
    check_copied_ahead,
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
    "ManifestHead",
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
    "StoredPage",
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

#: Bounds the chunks, and also the quantizers, of a manifest that is read whole.
MAX_CHUNKS = 4_000_000
MAX_CHAIN_LENGTH = 1_000_000

ChainLength = Annotated[int, Field(ge=1, le=MAX_CHAIN_LENGTH)]
RankCount = Annotated[int, Field(ge=1, le=naming.MAX_RANK + 1)]
ServerCount = Annotated[int, Field(ge=1, le=naming.MAX_RANK + 1)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]


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


class ManifestHead(StoredRecord):
    """What a manifest says beside its chunks, in either form."""

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

    @model_validator(mode="after")
    def _links(self) -> Self:
        check_links(self.kind, self.step, self.base, self.parent, self.chain_length)
        check_parts(self.ranks, self.servers)
        check_copied_ahead(self.copied_ahead, self.parts)
        check_tables(self.tables)
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


class StoredPage(NamedTuple):
    """A page of a manifest that is stored in pages: its key, and its length in bytes."""

    key: str
    bytes: int


class Manifest(ManifestHead):
    """One committed checkpoint, or a consolidation with the same step, generation and attempt.

    It has all chunks, also if it is stored as a root and pages (format §4.1).
    """

    chunks: Annotated[
        tuple[ChunkEntry, ...],
        Field(min_length=1, max_length=MAX_CHUNKS, strict=False),
        FailFast(),  # otherwise a list of a million bad entries becomes ten million errors
    ]
    quantizers: Annotated[
        tuple[Quantizer, ...], Field(max_length=MAX_CHUNKS, strict=False), FailFast()
    ]
    _pages: tuple[StoredPage, ...] = PrivateAttr(default=())

    @property
    def pages(self) -> tuple[StoredPage, ...]:
        """The pages from which it was read; none if it was read from one record, or not read."""
        return self._pages

    def read_from(self, pages: Sequence[StoredPage]) -> Self:
        """Note the pages from which this manifest was read, and return it."""
        self._pages = tuple(pages)
        return self

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
    def _contents(self) -> Self:
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
