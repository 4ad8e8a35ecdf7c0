"""Runs the second step of a persist: makes recipes of chunks.

A recipe holds a chunk's header and names the extents of slot and spool that make up its body.
Exact rows and states thus go from the slot to the store without a copy in between.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from recpoint.catalog.persist.block_codes import CODED_ARRAYS, positions_of_chunks
from recpoint.catalog.persist.plan import (
    FIRST,
    ChunkGroup,
    RowBlock,
    StateBlock,
    StoredForm,
    stored_forms,
)
from recpoint.catalog.persist.row_states import NarrowState, narrow_states
from recpoint.catalog.persist.spool import (
    ChosenRows,
    Part,
    SpoolFile,
    digest_parts,
    extent_from,
    load_result,
    part_list,
    result_path,
    save_result,
    write_bits,
)
from recpoint.catalog.staging.job import StagedJob, code_name, ids_name, state_name, values_name
from recpoint.catalog.staging.slot_reading import Extent, read_into
from recpoint.errors import MalformedObject
from recpoint.format.chunk import ChunkMeta, RowSetCoding, Section, chunk_header
from recpoint.format.dtypes import Dtype, item_bytes
from recpoint.format.job import StagedTable
from recpoint.format.manifest import GRID_DTYPE, ChunkEntry
from recpoint.format.naming import row_chunk_key, sample_chunk_key, state_chunk_key
from recpoint.kernels import row_set
from recpoint.kernels.bit_packing.widths import packed_width

__all__ = ["chunk_recipes", "encode_group", "encoded_entries"]

_Ids = np.ndarray[Any, np.dtype[np.int64]]


class _Array(NamedTuple):
    """An array of a chunk; `parts` name its bytes in slot and spool."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class _Chosen(NamedTuple):
    """The rows of a block that a chunk holds.

    Attributes:
        span: positions in the block, from the chunk's first row to its last.
        rows: number of rows in the chunk.
        bits: which rows of the span these are, in the spool, as `write_bits` writes it; None: all.
    """

    span: range
    rows: int
    bits: Extent | None

    @classmethod
    def of(cls, positions: _Ids, spool: SpoolFile) -> _Chosen:
        """Choose the rows at `positions`, int64 [n], ascending, n >= 1."""
        span = range(int(positions[0]), int(positions[-1]) + 1)
        if len(span) == len(positions):
            return cls(span, len(positions), None)
        mask = np.zeros(len(span), np.bool_)
        mask[positions - span.start] = True
        return cls(span, len(positions), write_bits(mask, spool))


class _PlannedChunk(NamedTuple):
    """A chunk before its bytes are assembled; `ends`: ids of its first and its last row."""

    key: str
    meta: ChunkMeta
    arrays: list[_Array]
    ends: tuple[int, int] | None = None


def encode_group(staged: StagedJob, group: ChunkGroup) -> str:
    """Write the recipes of a group's chunks; `quantize_group` has run if the group needs it.

    Returns:
        Path of the result, a JSON file in the spool.

    Raises:
        MalformedObject: the row ids are not ascending, or outside their table.
        StagingError: slot or spool cannot be read.
        ValueError: the group has not been quantized, but has rows to quantize.
    """
    path = result_path(staged, group.index, "encoded")
    if load_result(path, staged) is None:
        with SpoolFile(path.with_suffix(".bin")) as spool:
            pending = [
                chunk for block in group.blocks for chunk in _planned(block, staged, spool, group)
            ]
        # The digests read the spool file, which is complete on disk only after it is closed.
        save_result(path, staged, {"chunks": [_finished(planned) for planned in pending]})
    return str(path)


def _planned(
    block: RowBlock | StateBlock, staged: StagedJob, spool: SpoolFile, group: ChunkGroup
) -> list[_PlannedChunk]:
    if isinstance(block, StateBlock):
        return [_tensor_chunk(staged, block)]
    if not staged.job.tables[block.table].is_quantized:
        return [_exact_chunk(staged, block, spool)]
    result = load_result(result_path(staged, group.index, "quantized"), staged)
    if result is None:
        raise ValueError(f"group {group.index} of {staged.path} has not been quantized")
    for quantized in result["blocks"]:
        if (quantized["table"], quantized["number"]) == (block.table, block.number):
            return list(_quantized_chunks(staged, block, quantized, spool))
    raise ValueError(f"group {group.index} of {staged.path} lacks table {block.table}")


def _finished(planned: _PlannedChunk) -> dict[str, Any]:
    meta = planned.meta
    # With the widest items first each array is aligned, and a reader need not copy it.
    arrays = sorted(planned.arrays, key=lambda array: -item_bytes(array.dtype))
    sections = [
        Section(array.name, array.dtype, array.shape, _absent(array.parts)) for array in arrays
    ]
    header = chunk_header(meta, sections)
    parts = tuple(part for array in arrays for part in array.parts if part.length)
    entry = ChunkEntry(
        key=planned.key,
        bytes=len(header) + sum(part.length for part in parts),
        crc32c=digest_parts(parts, start=header),
        content=meta.content,
        rank=meta.rank,
        table=meta.table,
        row_count=meta.row_count,
        first_row=planned.ends[0] if planned.ends else None,
        last_row=planned.ends[1] if planned.ends else None,
        bits=meta.bits,
        scheme=meta.scheme,
    )
    return {
        "entry": entry.model_dump(mode="json"),
        "header": base64.b64encode(header).decode("ascii"),
        "parts": part_list(parts),
    }


def _absent(parts: tuple[Part, ...]) -> np.ndarray[Any, Any]:
    """Return a placeholder for the parts' bytes: it has their length and takes no memory."""
    return np.broadcast_to(np.uint8(0), (sum(part.length for part in parts),))


def _exact_chunk(staged: StagedJob, block: RowBlock, spool: SpoolFile) -> _PlannedChunk:
    """Plan the chunk of a block of a table that is not quantized."""
    table = staged.job.tables[block.table]
    chosen = _Chosen(range(block.rows), block.rows, None)
    ids = _read_ids(staged, block)
    return _row_chunk(
        staged,
        block,
        number=block.number,
        form=stored_forms(table)[-1],
        ids=table.first_row + block.first if ids is None else ids,
        chosen=chosen,
        arrays=[_exact_values(staged, block, chosen)],
        narrow=narrow_states(staged, block, [np.arange(block.rows)], spool)[0],
        spool=spool,
    )


def _quantized_chunks(
    staged: StagedJob, block: RowBlock, quantized: dict[str, Any], spool: SpoolFile
) -> Iterator[_PlannedChunk]:
    """Yield the chunks of each form of which the block has rows."""
    table = staged.job.tables[block.table]
    form_of_row = _read_array(extent_from(quantized["forms"]), np.uint8)
    ids = _read_ids(staged, block)
    forms = stored_forms(table)
    chunks = list(positions_of_chunks(table, form_of_row))
    narrow = narrow_states(staged, block, [positions for *_, positions in chunks], spool)
    for (index, number, start, positions), of_chunk in zip(chunks, narrow, strict=True):
        form, chosen = forms[index], _Chosen.of(positions, spool)
        if form == FIRST:
            arrays = []
        elif form.parameters is not None:
            arrays = _codes(table, form, quantized["coded"][index], start, len(positions))
        elif table.codes:
            first = quantized["exact_first"] + start
            arrays = [_staged_exact_values(staged, block, first, len(positions))]
        else:
            arrays = [_exact_values(staged, block, chosen)]
        yield _row_chunk(
            staged,
            block,
            number=block.number + number,
            form=form,
            ids=_chosen_ids(table, ids, block, positions),
            chosen=chosen,
            arrays=arrays,
            narrow=of_chunk,
            spool=spool,
        )


def _codes(
    table: StagedTable, form: StoredForm, coded: dict[str, Any], first: int, rows: int
) -> list[_Array]:
    """Return the arrays of `rows` rows from `first` on of those that the spool has in a form."""
    dtype = form.parameters
    assert dtype is not None
    width = packed_width(table.spec.dim, form.bits)
    item = item_bytes(dtype)
    codes, scale, offset = (
        _slice([extent_from(part) for part in coded[name]], first * each, rows * each)
        for name, each in zip(CODED_ARRAYS, (width, item, item), strict=True)
    )
    return [
        _Array("codes", "U8", (rows, width), codes),
        _Array("scale", dtype, (rows,), scale),
        _Array("offset", dtype, (rows,), offset),
    ]


def _slice(extents: list[Extent], first: int, length: int) -> tuple[Extent, ...]:
    """Return the extents of bytes `first` … `first + length − 1` of all extents together."""
    parts = []
    for path, offset, extent_length in extents:
        skipped = min(first, extent_length)
        taken = min(length, extent_length - skipped)
        if taken:
            parts.append(Extent(path, offset + skipped, taken))
        first, length = first - skipped, length - taken
    return tuple(parts)


def _exact_values(staged: StagedJob, block: RowBlock, chosen: _Chosen) -> _Array:
    spec = staged.job.tables[block.table].spec
    values = _part(staged, values_name(block.table), block, chosen)
    return _Array("values", spec.dtype, (chosen.rows, spec.dim), (values,))


def _staged_exact_values(staged: StagedJob, block: RowBlock, first: int, rows: int) -> _Array:
    """Return rows that the trainer could not quantize, from the `first` of the table's on."""
    spec = staged.job.tables[block.table].spec
    values = staged.extent(code_name(block.table, "exact"), first=first, count=rows)
    return _Array("values", spec.dtype, (rows, spec.dim), (values,))


def _row_chunk(
    staged: StagedJob,
    block: RowBlock,
    *,
    number: int,
    form: StoredForm,
    ids: int | _Ids,
    chosen: _Chosen,
    arrays: list[_Array],
    narrow: list[NarrowState | None],
    spool: SpoolFile,
) -> _PlannedChunk:
    """Plan one row chunk.

    Args:
        staged: the job.
        block: the block of the rows.
        number: number of the chunk.
        form: of its rows.
        ids: the first id of a contiguous range, or all ids (whole table).
        chosen: the rows of the block.
        arrays: its values, or its codes and their parameters.
        narrow: its row states that are stored narrower than staged.
        spool: takes what has to be written for the chunk.
    """
    job, table, rows = staged.job, staged.job.tables[block.table], chosen.rows
    if form == FIRST:
        arrays = [*arrays, *_common_states(staged, block, chosen)]
    else:
        arrays = [*arrays, *_states(staged, block, chosen, narrow)]
    coding = RowSetCoding(coding="range", first=ids) if isinstance(ids, int) else None
    if coding is None:
        coded = row_set.encode(torch.from_numpy(ids))
        coding = RowSetCoding.model_validate({"coding": coded.coding, "first": coded.first})
        if coded.payload is not None:
            extent = spool.append(coded.payload)
            arrays = [*arrays, _Array("row_set", "U8", (extent.length,), (extent,))]
    meta = ChunkMeta(
        run=job.run,
        step=job.step,
        generation=job.generation,
        attempt=job.attempt,
        content="rows",
        rank=job.rank,
        table=block.table,
        row_count=rows,
        dim=table.spec.dim,
        bits=form.bits,
        scheme=form.scheme(table),
        row_set=coding,
        first=table.first_values if form == FIRST else None,
    )
    key = row_chunk_key(
        job.step, job.generation, job.attempt, rank=job.rank, table=block.table, number=number
    )
    ends = (ids, ids + rows - 1) if isinstance(ids, int) else (int(ids[0]), int(ids[-1]))
    return _PlannedChunk(key, meta, arrays, ends)


def _read_ids(staged: StagedJob, block: RowBlock) -> _Ids | None:
    """Return the block's row ids in the whole table; None if all rows of the shard are staged."""
    table = staged.job.tables[block.table]
    if table.all_rows:
        return None
    # Also reads the last id of the block before, to check that the ids ascend across blocks.
    rows_before = 1 if block.first else 0
    extent = staged.extent(
        ids_name(block.table), first=block.first - rows_before, count=block.rows + rows_before
    )
    ids = _read_array(extent, np.int64)
    ascending = bool(np.all(ids[1:] > ids[:-1]))
    if not ascending or ids[0] < 0 or ids[-1] >= table.id_bound:
        raise MalformedObject(
            f"{staged.slot} ({ids_name(block.table)})",
            found=f"ids from {ids[0]} to {ids[-1]}, {'' if ascending else 'not '}ascending",
            expected=f"ascending ids below {table.id_bound}",
            next_step="nothing: the job is rejected, and the trainer stages its rows again",
        )
    return ids[rows_before:] + table.first_row


def _chosen_ids(
    table: StagedTable, ids: _Ids | None, block: RowBlock, positions: _Ids
) -> int | _Ids:
    if ids is not None:
        return ids[positions]
    rows = positions + (table.first_row + block.first)
    return int(rows[0]) if rows[-1] - rows[0] == len(rows) - 1 else rows


def _states(
    staged: StagedJob, block: RowBlock, chosen: _Chosen, narrow: list[NarrowState | None]
) -> list[_Array]:
    """Return the row states of the chosen rows, where they lie."""
    states = staged.job.tables[block.table].spec.row_states
    arrays = []
    for index, (state, narrowed) in enumerate(zip(states, narrow, strict=True)):
        name, shape = f"state.{index}", (chosen.rows, *state.shape)
        if narrowed is None:
            part = _part(staged, state_name(block.table, index), block, chosen)
            arrays.append(_Array(name, state.dtype, shape, (part,)))
            continue
        arrays.append(_Array(name, narrowed.dtype, shape, narrowed.values))
        if narrowed.grids:
            arrays.append(_Array(f"{name}.grid", GRID_DTYPE, (chosen.rows,), narrowed.grids))
    return arrays


def _common_states(staged: StagedJob, block: RowBlock, chosen: _Chosen) -> list[_Array]:
    """Return the row states of the first chosen row, which are those of all chosen rows."""
    row = block.first + chosen.span.start
    return [
        _Array(
            f"state.{index}",
            state.dtype,
            (1, *state.shape),
            (staged.extent(state_name(block.table, index), first=row, count=1),),
        )
        for index, state in enumerate(staged.job.tables[block.table].spec.row_states)
    ]


def _part(staged: StagedJob, name: str, block: RowBlock, chosen: _Chosen) -> Part:
    """Return where the chosen rows lie in a segment."""
    span = chosen.span
    whole = staged.extent(name, first=block.first + span.start, count=len(span))
    if chosen.bits is None or not whole.length:
        return whole
    return ChosenRows(whole, whole.length // len(span), chosen.rows, chosen.bits)


def _read_array(extent: Extent, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    array = np.empty(extent.length // np.dtype(dtype).itemsize, dtype)
    if extent.length:
        read_into(array.data.cast("B"), extent)
    return array


def _tensor_chunk(staged: StagedJob, block: StateBlock) -> _PlannedChunk:
    job = staged.job
    arrays = []
    for piece in block.pieces:
        segment = staged.segments[piece.segment]
        elements_each = item_bytes(segment.dtype)
        extent = Extent(
            str(staged.slot),
            segment.offset + piece.first * elements_each,
            piece.count * elements_each,
        )
        arrays.append(_Array(piece.name, segment.dtype, piece.shape, (extent,)))
    meta = ChunkMeta(
        run=job.run,
        step=job.step,
        generation=job.generation,
        attempt=job.attempt,
        content=block.content,
        rank=job.rank,
    )
    name = state_chunk_key if block.content == "state" else sample_chunk_key
    key = name(job.step, job.generation, job.attempt, rank=job.rank, number=block.number)
    return _PlannedChunk(key, meta, arrays)


def encoded_entries(staged: StagedJob, group: ChunkGroup) -> list[ChunkEntry]:
    """Return the manifest entries of the chunks of an encoded group."""
    return [ChunkEntry.model_validate(chunk["entry"]) for chunk in chunk_recipes(staged, group)]


def chunk_recipes(staged: StagedJob, group: ChunkGroup) -> list[dict[str, Any]]:
    """Return the recipes of the chunks of an encoded group, as JSON.

    Each has the manifest's `entry`, the `header` in base64, and the `parts` of the body.

    Raises:
        ValueError: the group has not been encoded.
    """
    result = load_result(result_path(staged, group.index, "encoded"), staged)
    if result is None:
        raise ValueError(f"group {group.index} of {staged.path} has not been encoded")
    chunks: list[dict[str, Any]] = result["chunks"]
    return chunks
