"""Estimates how large the records of a checkpoint will be, before anything of it is staged.

Readers accept no record of more than 64 MiB, and no manifest of more than 1 GiB with its pages
(format §4). A manifest names each chunk in about 260 bytes, so a very large model, or many tables
on many ranks, may exceed that. All sizes follow from what
a trainer is about to stage.

An estimate counts as few chunks as can hold a block of quantized rows. The agent writes more if
rows of the block have several widths, need parameters of 32 bits, or cannot be quantized. So a
checkpoint whose estimate is too large can never be committed. One whose estimate fits may still be
rejected if it has quantized rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from recpoint.catalog.persist.plan import (
    TENSORS_EACH,
    rows_of_block,
    rows_of_largest_chunk,
    stored_row_bytes,
    tensor_chunks,
)
from recpoint.format.job import Segment, StagedTable
from recpoint.format.manifest import ChunkEntry, Quantizer, TableSpec
from recpoint.format.naming import row_chunk_key, state_chunk_key
from recpoint.format.paging import manifest_fits
from recpoint.format.part import Shard
from recpoint.format.records import body_bytes

__all__ = ["PartSizes", "part_sizes", "row_entry_bytes"]


class PartSizes(NamedTuple):
    """Sizes of the records of one part of a checkpoint, or of several parts added up.

    Attributes:
        chunks: chunks that the manifest names.
        entries_bytes: bytes of the entries of these chunks and of the quantizers.
        tables_bytes: bytes that describe the tables in the manifest.
        parts_bytes: bytes of the part's own record, which a checkpoint of several parts has.
        part_bytes: the same; of several parts, of the largest.
        job_bytes: bytes of the job file; of several parts, of the largest.
    """

    chunks: int
    entries_bytes: int
    tables_bytes: int
    parts_bytes: int
    part_bytes: int
    job_bytes: int

    @property
    def manifest_bytes(self) -> int:
        """Bytes of a manifest of these parts."""
        return self.entries_bytes + self.tables_bytes

    @property
    def fits(self) -> bool:
        """Whether readers would accept a manifest of these parts."""
        return manifest_fits(self.entries_bytes, self.tables_bytes)

    def joined(self, further: PartSizes) -> PartSizes:
        """Return the sizes of both together, of one checkpoint."""
        return PartSizes(
            self.chunks + further.chunks,
            self.entries_bytes + further.entries_bytes,
            max(self.tables_bytes, further.tables_bytes),
            self.parts_bytes + further.parts_bytes,
            max(self.part_bytes, further.part_bytes),
            max(self.job_bytes, further.job_bytes),
        )


def part_sizes(
    tables: Sequence[StagedTable],
    *,
    part: int,
    state_bytes: Sequence[int] = (),
) -> PartSizes:
    """Estimate the sizes of the records of one part.

    Args:
        tables: all tables of the checkpoint, with the rows that are staged of them.
        part: number of the part.
        state_bytes: sizes of the state tree and of each of its tensors; empty: the part has none.
    """
    chunks = entries = specs = shards = staged_tables = segments = sampled = 0
    for index, table in enumerate(tables):
        spec_bytes = _spec_bytes(table.spec)
        states = len(table.spec.row_states)
        specs += spec_bytes
        shards += spec_bytes + _SHARD_BYTES
        staged_tables += spec_bytes + _STAGED_TABLE_BYTES
        if table.shard_rows:
            sampled += 2 + states + bool(table.row_count)
        if not table.row_count:
            continue
        rows_each = min(table.row_count, rows_of_largest_chunk(table))
        blocks, remainder = divmod(table.row_count, rows_of_block(table))
        row_chunks = blocks * -(-rows_of_block(table) // rows_each) - (-remainder // rows_each)
        chunks += row_chunks
        entries += row_chunks * row_entry_bytes(
            index,
            part,
            size_bytes=rows_each * stored_row_bytes(table),
            rows=rows_each,
            last_row=table.first_row + table.id_bound,
        )
        entries += _QUANTIZER_BYTES * table.is_quantized
        segments += states + (not table.all_rows) + (_CODE_ARRAYS if table.codes else 1)
    tensors = tensor_chunks(state_bytes) - (-sampled // TENSORS_EACH)
    entries += tensors * _TENSORS_ENTRY_BYTES
    segments += sampled + len(state_bytes)
    return PartSizes(
        chunks=chunks + tensors,
        entries_bytes=entries,
        tables_bytes=specs,
        parts_bytes=shards + entries,
        part_bytes=shards + entries,
        job_bytes=staged_tables + segments * _SEGMENT_BYTES,
    )


def row_entry_bytes(table: int, part: int, *, size_bytes: int, rows: int, last_row: int) -> int:
    """Return the bytes of a manifest's entry of a typical chunk of rows, with its comma.

    Args:
        table: index of the table.
        part: number of the part.
        size_bytes: bytes of the chunk.
        rows: rows of the chunk.
        last_row: number of the last row that the part may have of the table.
    """
    # Half of all ids are above the middle, so that is how long a typical one is.
    row = len(str(last_row // 2))
    digits = len(str(size_bytes)) + len(str(rows)) + 2 * row + len(str(table)) + len(str(part))
    return _ROW_ENTRY_BYTES + digits


@lru_cache(maxsize=100_000)
def _spec_bytes(spec: TableSpec) -> int:
    return body_bytes(spec) + 1


#: A digest of as many digits as nearly all have.
_CRC32C: Final = 1 << 31
_ATTEMPT: Final = "0" * 32
#: A table whose own bytes are taken off below.
_TABLE: Final = TableSpec(name="t", rows=1, dim=1, dtype="F32", row_states=())

# Bytes of parts of records, with the comma behind them. Of row entries, without the six numbers
# whose digits `row_entry_bytes` adds.
_ROW_ENTRY_BYTES: Final = (
    body_bytes(
        ChunkEntry(
            key=row_chunk_key(0, 1, _ATTEMPT, rank=0, table=0, number=0),
            bytes=1,
            crc32c=_CRC32C,
            content="rows",
            rank=0,
            table=0,
            row_count=1,
            first_row=0,
            last_row=0,
            bits=32,
            scheme="exact",
        )
    )
    + 1
    - 6
)
_TENSORS_ENTRY_BYTES: Final = 1 + body_bytes(
    ChunkEntry(
        key=state_chunk_key(0, 1, _ATTEMPT, rank=0, number=0),
        bytes=1 << 20,
        crc32c=_CRC32C,
        content="state",
        rank=0,
    )
)
_QUANTIZER_BYTES: Final = 1 + body_bytes(
    Quantizer(
        method="refit",
        bins=0,
        ratio_permille=0,
        refits=0,
        sample_rows=0,
        seed=0,
        table=0,
        rank=0,
    )
)
_SEGMENT_BYTES: Final = 1 + body_bytes(
    Segment(name="t0.ids", dtype="I64", shape=(1,), offset=1 << 26, bytes=8, crc32c=_CRC32C)
)
_SHARD_BYTES: Final = body_bytes(Shard(spec=_TABLE, first_row=0, rows=1)) - body_bytes(_TABLE)
_STAGED_TABLE_BYTES: Final = body_bytes(
    StagedTable(
        spec=_TABLE,
        first_row=0,
        shard_rows=1,
        row_count=1,
        all_rows=True,
        bits=32,
        quantizer="auto",
        state_bits=None,
        method=None,
        codes=False,
    )
) - body_bytes(_TABLE)
#: Arrays of codes in a slot (`staging.job.CodeArray`).
_CODE_ARRAYS: Final = 6
