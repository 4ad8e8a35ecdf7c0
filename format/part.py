"""A rank's part: what a manifest will say of it, written when its chunks are durable (format §4).

A checkpoint of several ranks has one for each. Whoever finds them all joins them to the manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from recpoint.format import naming
from recpoint.format.history import History
from recpoint.format.manifest import (
    MAX_CHUNKS,
    MAX_TABLE_ROWS,
    ChainLength,
    ChunkEntry,
    Kind,
    Quantizer,
    RankCount,
    TableSpec,
    Word,
    check_chunks,
    check_links,
    check_quantizers,
    check_tables,
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
    """What a rank holds of a table: the rows from `first_row` on, `rows` of them.

    `rows` 0: nothing; then the row states of `spec` mean nothing, and may be missing.
    """

    spec: TableSpec
    first_row: Annotated[int, Field(ge=0, lt=MAX_TABLE_ROWS)]
    rows: Annotated[int, Field(ge=0, le=MAX_TABLE_ROWS)]

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.first_row + self.rows > self.spec.rows or (self.first_row and not self.rows):
            found = f"{self.rows} rows from {self.first_row}"
            raise ValueError(f"{found} of {self.spec.rows} of {self.spec.name!r:.80}")
        return self


class RankPart(StoredRecord):
    """One rank's part of a checkpoint of several."""

    format: Literal["recpoint/part"] = "recpoint/part"
    step: Step
    generation: Generation
    attempt: HexToken
    rank: Annotated[int, Field(ge=0, le=naming.MAX_RANK)]
    ranks: RankCount
    kind: Kind
    base: CheckpointRef | None
    parent: CheckpointRef | None
    chain_length: ChainLength
    policy: Word
    tables: Annotated[tuple[Shard, ...], Field(max_length=100_000, strict=False), FailFast()]
    chunks: Annotated[
        tuple[ChunkEntry, ...],
        # Of one rank as many as a manifest may have of all.
        Field(min_length=1, max_length=MAX_CHUNKS, strict=False),
        FailFast(),
    ]
    quantizers: Annotated[
        tuple[Quantizer, ...], Field(max_length=100_000, strict=False), FailFast()
    ]
    quantized_by: Annotated[str, Field(max_length=255)]
    state_bits: Literal[16] | None
    snapshot_ms: Milliseconds
    staged_ms: Milliseconds
    written_ms: Milliseconds
    stall_us: _Count
    dirty_rows: _Count
    full_bytes: _Count
    history: History
    writer: Annotated[str, Field(max_length=255)]

    @property
    def ref(self) -> CheckpointRef:
        """The checkpoint that it is a part of."""
        return CheckpointRef(step=self.step, generation=self.generation, attempt=self.attempt)

    @model_validator(mode="after")
    def _links(self) -> Self:
        check_links(self.kind, self.step, self.base, self.parent, self.chain_length)
        if self.rank >= self.ranks or self.ranks == 1:
            raise ValueError(f"a part of rank {self.rank} of {self.ranks}")
        return self

    @model_validator(mode="after")
    def _contents(self) -> Self:
        specs = [shard.spec for shard in self.tables]
        check_tables(specs)
        check_quantizers(self.quantizers, len(specs), self.ranks)
        if any(quantizer.rank != self.rank for quantizer in self.quantizers):
            raise ValueError(f"quantizers of other ranks than {self.rank}")
        stored = check_chunks(self.chunks, specs, self.ranks)
        prefix = naming.attempt_prefix(self.step, self.generation, self.attempt)
        for chunk in self.chunks:
            if chunk.rank != self.rank or not chunk.key.startswith(prefix):
                raise ValueError(f"{chunk.key} is not of rank {self.rank} under {prefix}")
            if chunk.table is None or chunk.first_row is None or chunk.last_row is None:
                continue
            shard = self.tables[chunk.table]
            end = shard.first_row + shard.rows
            if chunk.first_row < shard.first_row or chunk.last_row >= end:
                raise ValueError(
                    f"{chunk.key} has rows from {chunk.first_row} to {chunk.last_row}, its rank "
                    f"{shard.rows} from {shard.first_row}"
                )
        for shard, rows in zip(self.tables, stored, strict=True):
            if rows > shard.rows or (self.kind == "full" and rows != shard.rows):
                name = f"{shard.spec.name!r:.80}"
                raise ValueError(f"a shard of {shard.rows} rows of {name}, {rows} are stored")
        return self
