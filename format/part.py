"""Defines a part of a manifest: of a rank or an embedding server, once its chunks are durable (§4).

A checkpoint has a part of each, unless it is of one rank alone. The process that finds all parts
joins them into the manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from recpoint.format import naming
from recpoint.format.history import History
from recpoint.format.keyed_use import KeyedUses, check_keyed
from recpoint.format.manifest import (
    MAX_CHUNKS,
    MAX_TABLE_ROWS,
    CacheUse,
    ChainLength,
    CheckedStripes,
    ChunkEntry,
    Kind,
    MeasuredLoss,
    Quantizer,
    RankCount,
    ServerCount,
    StateBits,
    TableSpec,
    Word,
    check_chunks,
    check_links,
    check_parts,
    check_quantizers,
    check_tables,
    is_absent,
)
from recpoint.format.records import (
    CheckpointRef,
    Generation,
    HexToken,
    Milliseconds,
    Part,
    Step,
    StoredRecord,
)

__all__ = ["RankPart", "Shard"]

_Count = Annotated[int, Field(ge=0, lt=2**63)]


class Shard(Part):
    """The rows of a table that a rank or an embedding server holds.

    They are the `rows` rows from `first_row` on; or, if `scattered`, any `rows` rows of the table,
    and `first_row` is 0. If `rows` is 0, it holds nothing, and the row states of `spec` may be
    missing.
    """

    spec: TableSpec
    first_row: Annotated[int, Field(ge=0, lt=MAX_TABLE_ROWS)]
    rows: Annotated[int, Field(ge=0, le=MAX_TABLE_ROWS)]
    scattered: Annotated[Literal[True] | None, Field(exclude_if=is_absent)] = None

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.first_row + self.rows > self.spec.rows or (self.first_row and not self.rows):
            shard_text = f"a shard of {self.rows} rows from {self.first_row}"
            raise ValueError(f"{shard_text} of {self.spec.rows} of {self.spec.name!r:.80}")
        if self.scattered and self.first_row:
            raise ValueError(f"scattered rows from {self.first_row} of {self.spec.name!r:.80}")
        return self


class RankPart(StoredRecord):
    """The part of one rank or embedding server; those of servers are numbered after the ranks'."""

    format: Literal["recpoint/part"] = "recpoint/part"
    step: Step
    generation: Generation
    attempt: HexToken
    rank: Annotated[int, Field(ge=0, le=naming.MAX_RANK)]
    ranks: RankCount
    servers: Annotated[ServerCount | None, Field(exclude_if=is_absent)] = None
    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: ChainLength
    policy: Word
    tables: Annotated[tuple[Shard, ...], Field(max_length=100_000, strict=False), FailFast()]
    chunks: Annotated[
        tuple[ChunkEntry, ...],
        # One part may have as many chunks as a manifest may have of all parts.
        Field(max_length=MAX_CHUNKS, strict=False),
        FailFast(),
    ]
    quantizers: Annotated[
        tuple[Quantizer, ...], Field(max_length=100_000, strict=False), FailFast()
    ]
    quantized_by: Annotated[str, Field(max_length=255)]
    state_bits: StateBits | None
    snapshot_ms: Milliseconds
    staged_ms: Milliseconds
    written_ms: Milliseconds
    stall_us: _Count
    cache: Annotated[CacheUse | None, Field(exclude_if=is_absent)] = None
    stripes: Annotated[CheckedStripes | None, Field(exclude_if=is_absent)] = None
    loss: Annotated[MeasuredLoss | None, Field(exclude_if=is_absent)] = None
    keyed: Annotated[KeyedUses | None, Field(exclude_if=is_absent)] = None
    dirty_rows: _Count
    full_bytes: _Count
    history: History
    writer: Annotated[str, Field(max_length=255)]

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint to which the part belongs."""
        return CheckpointRef(step=self.step, generation=self.generation, attempt=self.attempt)

    @property
    def parts(self) -> int:
        """How many parts the checkpoint has, of ranks and of embedding servers."""
        return self.ranks + (self.servers or 0)

    @model_validator(mode="after")
    def _links(self) -> Self:
        check_links(self.kind, self.step, self.base, self.parent, self.chain_length)
        check_parts(self.ranks, self.servers)
        if self.rank >= self.parts or self.parts == 1:
            raise ValueError(f"a part of rank {self.rank} of {self.parts}")
        if not self.chunks and self.rank < self.ranks:
            raise ValueError(f"a part of rank {self.rank} without chunks: every rank has state")
        return self

    @model_validator(mode="after")
    def _contents(self) -> Self:
        specs = [shard.spec for shard in self.tables]
        check_tables(specs)
        check_keyed(self.keyed, specs)
        check_quantizers(self.quantizers, len(specs), self.parts)
        if any(quantizer.rank != self.rank for quantizer in self.quantizers):
            raise ValueError(f"quantizers of other ranks in the part of rank {self.rank}")
        stored = check_chunks(
            self.chunks, specs, kind=self.kind, ranks=self.ranks, parts=self.parts
        )
        prefix = naming.attempt_prefix(self.step, self.generation, self.attempt)
        for chunk in self.chunks:
            if chunk.rank != self.rank or not chunk.key.startswith(prefix):
                raise ValueError(f"{chunk.key} is not of rank {self.rank} under {prefix}")
            if chunk.table is None or chunk.first_row is None or chunk.last_row is None:
                continue
            shard = self.tables[chunk.table]
            if shard.scattered:
                continue  # its rows lie anywhere in the table, as `check_chunks` has checked
            end = shard.first_row + shard.rows
            if chunk.first_row < shard.first_row or chunk.last_row >= end:
                raise ValueError(
                    f"{chunk.key} has rows {chunk.first_row} to {chunk.last_row}; its rank's shard "
                    f"has {shard.rows} rows from {shard.first_row}"
                )
        for shard, rows in zip(self.tables, stored, strict=True):
            if rows > shard.rows or (self.kind == "full" and rows != shard.rows):
                name = f"{shard.spec.name!r:.80}"
                raise ValueError(f"{rows} rows are stored of a shard of {shard.rows} of {name}")
        return self
