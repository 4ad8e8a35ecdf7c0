"""Counts the bytes of a checkpoint by planning and encoding it as the agent does, without values.

Chunks, their headers and row sets, and the manifest are real. Codes, row parameters and row states
are left out, because their lengths follow from the rows. `check` compares the count with what an
agent stored. So ten million rows in hundreds of checkpoints can be counted without storing them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.plan import (
    CHUNK_BYTES,
    RowBlock,
    StateBlock,
    StoredForm,
    chunk_numbers,
    plan_groups,
    rows_of_chunk,
    stored_forms,
)
from recpoint.catalog.staging.job import StagedJob
from recpoint.format.chunk import ChunkMeta, RowSetCoding, Section, chunk_header
from recpoint.format.dtypes import Dtype, array_bytes, item_bytes
from recpoint.format.job import Job
from recpoint.format.manifest import GRID_DTYPE, ChunkEntry, Manifest
from recpoint.format.naming import row_chunk_key, sample_chunk_key, state_chunk_key
from recpoint.format.records import pack_record
from recpoint.kernels import row_set
from recpoint.kernels.quantize import quantize_packed

__all__ = [
    "EXACT",
    "NARROW",
    "WIDE",
    "Form",
    "Ids",
    "MergedFull",
    "Parts",
    "check",
    "form_of",
    "stored_parts",
]

#: The form in which a row of a table of one width is stored: codes with binary16 parameters, codes
#: with binary32 parameters, or exact.
NARROW, WIDE, EXACT = range(3)

#: The form of each row of a table: its index in `stored_forms`.
Form = np.ndarray[Any, np.dtype[np.uint8]]
#: Row ids, ascending.
Ids = np.ndarray[Any, np.dtype[np.int64]]

_ROWS_AT_ONCE = 1 << 16
_LONGEST_DIGEST = 2**32 - 1
#: Bytes that a consolidation reserves for a row id.
_ID_BYTES = 9

#: Bytes by what they hold: codes, values, parameters, row state, ids, dense,
#: samples, headers, manifest.
Parts = Counter[str]


class _Planned(NamedTuple):
    entry: ChunkEntry
    parts: Parts


def form_of(rows: Tensor, bits: int) -> Form:
    """Return the stored form of each of f32 rows [n, dim] at `bits` bits, for any quantizer."""
    form = np.empty(len(rows), np.uint8)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        quantized = quantize_packed(rows[part], bits, half_parameters=True)
        form[part] = np.where(quantized.exact, EXACT, np.where(quantized.wide, WIDE, NARROW))
    return form


def stored_parts(
    job: Job, manifest: Manifest, rows: Sequence[Ids | None], forms: Sequence[Form]
) -> Parts:
    """Count the bytes of a checkpoint.

    Args:
        job: the staged job; its digests and the offsets of its segments do not matter.
        manifest: a manifest of the same kind and run, for its contents besides chunks.
        rows: the staged ids of each table; None: all rows.
        forms: the forms of each table's rows.
    """
    planned = list(_plan(job, rows, forms))
    written = manifest.model_copy(update={"chunks": tuple(chunk.entry for chunk in planned)})
    total: Parts = Counter({"manifest": len(pack_record(written))})
    for chunk in planned:
        total.update(chunk.parts)
    return total


def check(job: Job, manifest: Manifest, rows: Sequence[Ids | None], forms: Sequence[Form]) -> None:
    """Raise RuntimeError unless `manifest`, of `job`, has exactly the chunks counted here."""
    sizes = {chunk.entry.key: chunk.entry.bytes for chunk in _plan(job, rows, forms)}
    stored = {entry.key: entry.bytes for entry in manifest.chunks}
    if sizes != stored:
        raise RuntimeError(f"step {job.step}: counted {sizes}, stored {stored}")
    counted = stored_parts(job, manifest, rows, forms)["manifest"]
    written = len(pack_record(manifest))
    # The counted digests are of other bytes, so they may have other numbers of digits: most have
    # ten, hardly any fewer than eight.
    if abs(counted - written) > 3 * (len(stored) + 1):
        raise RuntimeError(f"step {job.step}: a manifest of {counted} bytes, stored {written}")


class MergedFull:
    """A full after consolidations, with the chunk in which each row lies (format §6.8).

    Args:
        job: an increment of the run.
        manifest: a consolidated manifest of the run.
        forms: the forms of each table's rows.
    """

    def __init__(self, job: Job, manifest: Manifest, forms: Sequence[Form]) -> None:
        self._job, self._manifest, self._forms = job, manifest, forms
        # The chunk of each row. In a full that was just taken, rows ascend through all chunks.
        self._chunk = [np.zeros(len(form), np.int32) for form in forms]

    def merge(self, increments: Sequence[Sequence[Ids]]) -> Parts:
        """Merge increments, the oldest first, into this full; return the bytes of the new full.

        Args:
            increments: for each increment, the ascending ids of each table.
        """
        staged = _staged(self._job)
        groups = plan_groups(staged)
        blocks = [b for group in groups for b in group.blocks if isinstance(b, StateBlock)]
        planned = [_state_chunk(staged, block) for block in blocks]
        for table in range(len(self._forms)):
            planned += self._table(table, [ids[table] for ids in reversed(increments)])
        chunks = tuple(chunk.entry for chunk in planned)
        self.chunk_bytes = sorted((entry.content, entry.bytes) for entry in chunks)
        written = self._manifest.model_copy(update={"chunks": chunks})
        total: Parts = Counter({"manifest": len(pack_record(written))})
        for chunk in planned:
            total.update(chunk.parts)
        return total

    def _table(self, index: int, newest_first: Sequence[Ids]) -> Iterator[_Planned]:
        form, old, number = self._forms[index], self._chunk[index], 0
        chunk = self._chunk[index] = np.empty_like(old)
        forms = stored_forms(self._job.tables[index])
        for kind in np.unique(form):
            most = self._rows_of_a_chunk(index, forms[kind])
            remaining, offset = form == kind, 0
            for ids in (*newest_first, *_chunks_of(old, remaining)):
                moved = ids[remaining[ids]]
                remaining[moved] = False
                chunk[moved] = (offset + np.arange(len(moved))) // most
                offset += len(moved)
            for ids in _chunks_of(chunk, form == kind):
                yield _row_chunk(self._job, index, number, ids, forms[kind])
                number += 1

    def _rows_of_a_chunk(self, index: int, stored_form: StoredForm) -> int:
        table = self._job.tables[index]
        row = _ID_BYTES + stored_form.row_bytes(table)
        row += sum(
            state.row_bytes(dtype)
            for state, dtype in zip(table.spec.row_states, table.state_dtypes, strict=True)
        )
        return max(1, min(CHUNK_BYTES // row, table.spec.rows))


def _chunks_of(chunk: np.ndarray[Any, Any], chosen: np.ndarray[Any, Any]) -> list[Ids]:
    """Return the ascending ids of the chosen rows in each chunk."""
    last = int(chunk[chosen].max(initial=-1))
    return [np.flatnonzero(chosen & (chunk == number)) for number in range(last + 1)]


def _plan(job: Job, rows: Sequence[Ids | None], forms: Sequence[Form]) -> Iterator[_Planned]:
    staged = _staged(job)
    for group in plan_groups(staged):
        for block in group.blocks:
            if isinstance(block, StateBlock):
                yield _state_chunk(staged, block)
            else:
                yield from _row_chunks(job, block, rows[block.table], forms[block.table])


def _staged(job: Job) -> StagedJob:
    segments = {segment.name: segment for segment in job.segments}
    return StagedJob(path=Path("-"), job=job, slot=Path("-"), segments=segments)


def _state_chunk(staged: StagedJob, block: StateBlock) -> _Planned:
    job = staged.job
    sections = []
    for piece in block.pieces:
        dtype = staged.segments[piece.segment].dtype
        sections.append(_section(piece.name, dtype, piece.shape))
    name = state_chunk_key if block.content == "state" else sample_chunk_key
    key = name(job.step, job.generation, job.attempt, rank=job.rank, number=block.number)
    return _chunk(job, key, sections, {}, content=block.content)


def _row_chunks(job: Job, block: RowBlock, ids: Ids | None, form: Form) -> Iterator[_Planned]:
    table = job.tables[block.table]
    part = slice(block.first, block.first + block.rows)
    ids = np.arange(part.start, part.stop) if ids is None else ids[part]
    if not table.is_quantized:
        yield _row_chunk(job, block.table, block.number, ids, stored_forms(table)[-1])
        return
    of_rows = form[ids]
    numbered = zip(stored_forms(table), chunk_numbers(table), strict=True)
    for index, (stored_form, numbers) in enumerate(numbered):
        chosen, rows_each = ids[of_rows == index], rows_of_chunk(table, stored_form)
        for number, first in zip(numbers, range(0, chosen.size, rows_each), strict=False):
            in_chunk = chosen[first : first + rows_each]
            yield _row_chunk(job, block.table, block.number + number, in_chunk, stored_form)


def _row_chunk(job: Job, index: int, number: int, ids: Ids, stored_form: StoredForm) -> _Planned:
    table, count = job.tables[index], len(ids)
    spec, parameters = table.spec, stored_form.parameters
    scheme = stored_form.scheme(table)
    coded = row_set.encode(torch.from_numpy(ids))
    if parameters is None:
        sections = [_section("values", spec.dtype, (count, spec.dim))]
    else:
        width = (spec.dim * stored_form.bits + 7) // 8
        sections = [_section("codes", "U8", (count, width))]
        sections += [_section(name, parameters, (count,)) for name in ("scale", "offset")]
    for place, (state, dtype) in enumerate(zip(spec.row_states, table.state_dtypes, strict=True)):
        sections.append(_section(f"state.{place}", dtype, (count, *state.shape)))
        if state.is_coded(dtype):
            sections.append(_section(f"state.{place}.grid", GRID_DTYPE, (count,)))
    if coded.payload is not None:
        sections.append(_section("row_set", "U8", (len(coded.payload),)))
    key = row_chunk_key(
        job.step, job.generation, job.attempt, rank=job.rank, table=index, number=number
    )
    about_rows: dict[str, Any] = {
        "table": index,
        "row_count": count,
        "bits": stored_form.bits,
        "scheme": scheme,
    }
    coding = RowSetCoding.model_validate({"coding": coded.coding, "first": coded.first})
    ends = {"first_row": int(ids[0]), "last_row": int(ids[-1])}
    about_rows |= {"content": "rows", "dim": spec.dim, "row_set": coding}
    return _chunk(job, key, sections, ends, **about_rows)


def _section(name: str, dtype: Dtype, shape: tuple[int, ...]) -> Section:
    # A stand-in with the length of the real bytes, which takes no memory.
    return Section(name, dtype, shape, np.broadcast_to(np.uint8(0), (array_bytes(dtype, shape),)))


_HOLDS: Mapping[str, str] = {
    "codes": "codes", "values": "values", "scale": "parameters", "offset": "parameters",
    "row_set": "ids", "state": "row state", "tensor": "dense", "tree": "dense", "sample": "samples",
}  # fmt: skip


def _chunk(
    job: Job, key: str, sections: list[Section], ends: Mapping[str, int], **fields: Any
) -> _Planned:
    sections = sorted(sections, key=lambda section: -item_bytes(section.dtype))
    meta = ChunkMeta(
        run=job.run,
        step=job.step,
        generation=job.generation,
        attempt=job.attempt,
        rank=job.rank,
        **fields,
    )
    parts: Parts = Counter({"headers": len(chunk_header(meta, sections))})
    for section in sections:
        parts[_HOLDS[section.name.partition(".")[0]]] += section.nbytes
    about = {k: v for k, v in fields.items() if k not in ("dim", "row_set")} | dict(ends)
    entry = ChunkEntry(key=key, bytes=parts.total(), crc32c=_LONGEST_DIGEST, rank=job.rank, **about)
    return _Planned(entry, parts)
