"""Runs the second and third step of a persist: makes recipes of chunks, writes chunks from them.

After the third step the chunks are in the store (format §6.1, write order, rule 3).

A recipe holds a chunk's header and names the extents of slot and spool that make up its body.
Exact rows and states thus go from the slot to the store without a copy in between.
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import crc32c
import numpy as np
import torch

from recpoint.catalog.persist.plan import (
    PARAMETER_DTYPES,
    ChunkGroup,
    RowBlock,
    StateBlock,
)
from recpoint.catalog.persist.spool import (
    ChosenRows,
    Part,
    SpoolFile,
    assemble_parts,
    digest_parts,
    extent_from,
    load_result,
    open_in_spool,
    part_from,
    part_list,
    pieces,
    read_bits,
    result_path,
    save_result,
    write_bits,
)
from recpoint.catalog.staging.job import StagedJob, code_name, ids_name, state_name, values_name
from recpoint.catalog.staging.slot_reading import Extent, read_into
from recpoint.catalog.store import durable
from recpoint.catalog.store.scheduler import WriteBudget, WriteScheduler
from recpoint.catalog.store.store import Store
from recpoint.errors import DigestMismatch, MalformedObject
from recpoint.format.chunk import ChunkMeta, RowSetCoding, Section, chunk_header
from recpoint.format.dtypes import Dtype, item_bytes
from recpoint.format.job import StagedTable
from recpoint.format.manifest import ChunkEntry, Scheme
from recpoint.format.naming import row_chunk_key, sample_chunk_key, state_chunk_key
from recpoint.format.row_state import to_bfloat16
from recpoint.kernels import row_set

__all__ = ["encode_group", "encoded_entries", "upload_group"]

#: The masks of a quantized block: rows stored exactly, and rows whose parameters are F32.
_FORMS = ("exact", "wide")

_Mask = np.ndarray[Any, np.dtype[np.bool_]]
_Ids = np.ndarray[Any, np.dtype[np.int64]]


class _Array(NamedTuple):
    """An array of a chunk; `parts` name its bytes in slot and spool."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class _Chosen(NamedTuple):
    """The rows of a block that a chunk holds, if it does not hold all of them.

    Attributes:
        mask: [rows of the block], true for the rows in the chunk.
        bits: the same mask in the spool, as `write_bits` writes it.
        rows: number of rows in the chunk.
    """

    mask: _Mask
    bits: Extent
    rows: int

    @classmethod
    def of(cls, mask: _Mask, spool: SpoolFile) -> _Chosen | None:
        """Write the mask to the spool; return None if it chooses all rows."""
        return None if mask.all() else cls(mask, write_bits(mask, spool), int(mask.sum()))


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
    table = staged.job.tables[block.table]
    spec = table.spec
    values = staged.extent(values_name(block.table), first=block.first, count=block.rows)
    ids = _read_ids(staged, block)
    return _row_chunk(
        staged,
        block,
        number=block.number,
        scheme="exact",
        ids=table.first_row + block.first if ids is None else ids,
        rows=block.rows,
        arrays=[
            _Array("values", spec.dtype, (block.rows, spec.dim), (values,)),
            *_states(staged, block, None, spool),
        ],
        spool=spool,
    )


def _quantized_chunks(
    staged: StagedJob, block: RowBlock, quantized: dict[str, Any], spool: SpoolFile
) -> Iterator[_PlannedChunk]:
    """Yield at most one chunk for each dtype of row parameters, then the chunks of exact rows."""
    table = staged.job.tables[block.table]
    exactly, wide = (read_bits(extent_from(quantized[name]), block.rows) for name in _FORMS)
    exact, narrow = np.flatnonzero(exactly), ~(exactly | wide)
    ids = _read_ids(staged, block)
    width = (table.spec.dim * table.bits + 7) // 8
    for number, (dtype, chosen) in enumerate(
        zip(PARAMETER_DTYPES, (narrow, wide), strict=True), block.number
    ):
        rows = int(chosen.sum())
        if not rows:
            continue
        codes, scale, offset = (
            tuple(extent_from(part) for part in quantized[dtype][name])
            for name in ("codes", "scale", "offset")
        )
        yield _row_chunk(
            staged,
            block,
            number=number,
            scheme="asymmetric",
            ids=_chosen(table, ids, block, chosen),
            rows=rows,
            arrays=[
                _Array("codes", "U8", (rows, width), codes),
                _Array("scale", dtype, (rows,), scale),
                _Array("offset", dtype, (rows,), offset),
                *_states(staged, block, _Chosen.of(chosen, spool), spool),
            ],
            spool=spool,
        )
    rows_each = block.exact_rows_each
    starts = range(0, len(exact), rows_each)
    for number, start in zip(count(block.number + len(PARAMETER_DTYPES)), starts):
        positions = exact[start : start + rows_each]
        mask = np.zeros(block.rows, np.bool_)
        mask[positions] = True
        picked = _Chosen.of(mask, spool)
        values: Part
        if table.codes:
            first = quantized["exact_first"] + start
            name = code_name(block.table, "exact")
            values = staged.extent(name, first=first, count=len(positions))
        else:
            values = _part(staged, values_name(block.table), block, picked)
        yield _row_chunk(
            staged,
            block,
            number=number,
            scheme="exact",
            ids=_chosen(table, ids, block, mask),
            rows=len(positions),
            arrays=[
                _Array("values", table.spec.dtype, (len(positions), table.spec.dim), (values,)),
                *_states(staged, block, picked, spool),
            ],
            spool=spool,
        )


def _row_chunk(
    staged: StagedJob,
    block: RowBlock,
    *,
    number: int,
    scheme: Scheme,
    ids: int | _Ids,
    rows: int,
    arrays: list[_Array],
    spool: SpoolFile,
) -> _PlannedChunk:
    """Plan one row chunk; `ids`: the first id of a contiguous range, or all ids (whole table)."""
    job, table = staged.job, staged.job.tables[block.table]
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
        bits=table.bits if scheme == "asymmetric" else 8 * item_bytes(table.spec.dtype),
        scheme=scheme,
        row_set=coding,
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


def _chosen(table: StagedTable, ids: _Ids | None, block: RowBlock, mask: _Mask) -> int | _Ids:
    if ids is not None:
        return ids[mask]
    first = table.first_row + block.first
    return first if bool(mask.all()) else first + np.flatnonzero(mask)


def _states(
    staged: StagedJob, block: RowBlock, chosen: _Chosen | None, spool: SpoolFile
) -> list[_Array]:
    """Return the row states of the `chosen` rows (None: all); copy only those to be rounded."""
    table = staged.job.tables[block.table]
    rows = block.rows if chosen is None else chosen.rows
    arrays = []
    for index, (state, dtype) in enumerate(
        zip(table.spec.row_states, table.state_dtypes, strict=True)
    ):
        part = _part(staged, state_name(block.table, index), block, chosen)
        if dtype != state.dtype:
            part = _rounded(part, spool)
        arrays.append(_Array(f"state.{index}", dtype, (rows, *state.shape), (part,)))
    return arrays


def _part(staged: StagedJob, name: str, block: RowBlock, chosen: _Chosen | None) -> Part:
    """Return where the `chosen` rows (None: all rows of the block) lie in a segment."""
    whole = staged.extent(name, first=block.first, count=block.rows)
    if chosen is None or not whole.length:
        return whole
    return ChosenRows(whole, whole.length // block.rows, chosen.rows, chosen.bits)


def _rounded(part: Part, spool: SpoolFile) -> Extent:
    """Round F32 values to the nearest BF16 and write them to the spool (format §3.5)."""
    offset, length = spool.append(b"").offset, 0
    spool.flush()  # `pieces` reads the mask of chosen rows from this file
    for piece in pieces(part):
        values = torch.frombuffer(piece, dtype=torch.float32)
        length += spool.append(to_bfloat16(values).view(torch.uint8).numpy()).length
    return Extent(str(spool.path), offset, length)


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


#: Concurrent uploads in this process, over all groups and runs. Each holds a chunk in memory, and
#: the store's client holds one or two more copies.
_PERSIST_UPLOADS = WriteBudget(4)


def upload_group(store: Store, staged: StagedJob, group: ChunkGroup) -> int:
    """Write the chunks of an encoded group, several at once; all are durable when it returns.

    After a failure, the next call continues where the failed one stopped. At the end the group's
    spool files are removed, except for the entries that the manifest needs. If the spool had no
    room to note a written chunk, the files stay for the next call.

    Returns:
        Bytes of the group's chunks in the store.

    Raises:
        DigestMismatch: slot or spool changed after the group was encoded.
        StoreError: the store did not accept a chunk.
        ValueError: the group has not been encoded.
    """
    chunks = _chunks(staged, group)
    marker = result_path(staged, group.index, "uploaded")
    uploaded_keys = _uploaded(marker, staged)
    remaining = [chunk for chunk in chunks if chunk["entry"]["key"] not in uploaded_keys]
    unnoted = threading.Event()
    lock = threading.Lock()

    def upload(chunk: dict[str, Any]) -> None:
        store.put(chunk["entry"]["key"], _chunk_bytes(chunk))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with lock, open(open_in_spool(marker, flags), "a", encoding="ascii") as file:
                # Starts with a line break, because an earlier write may have left half a line.
                file.write(f"\n{staged.job.attempt} {chunk['entry']['key']}\n")
        except OSError:
            # The chunk is stored even if there was no room for this line; a later call writes it
            # again.
            unnoted.set()

    with WriteScheduler(_PERSIST_UPLOADS) as writes:
        for chunk in remaining:
            writes.begin(writes.reserve(chunk["entry"]["bytes"]), partial(upload, chunk))
        writes.finish()
    if not unnoted.is_set():  # otherwise a later call needs these files again
        for name in ("quantized", "encoded"):
            result_path(staged, group.index, name).with_suffix(".bin").unlink(missing_ok=True)
    return sum(int(chunk["entry"]["bytes"]) for chunk in chunks)


def encoded_entries(staged: StagedJob, group: ChunkGroup) -> list[ChunkEntry]:
    """Return the manifest entries of the chunks of an encoded group."""
    return [ChunkEntry.model_validate(chunk["entry"]) for chunk in _chunks(staged, group)]


def _chunks(staged: StagedJob, group: ChunkGroup) -> list[dict[str, Any]]:
    result = load_result(result_path(staged, group.index, "encoded"), staged)
    if result is None:
        raise ValueError(f"group {group.index} of {staged.path} has not been encoded")
    chunks: list[dict[str, Any]] = result["chunks"]
    return chunks


def _chunk_bytes(chunk: dict[str, Any]) -> bytes:
    entry = chunk["entry"]
    parts = tuple(part_from(part) for part in chunk["parts"])
    data = assemble_parts(parts, start=base64.b64decode(chunk["header"]))
    checksum = crc32c.crc32c(data)
    if checksum != entry["crc32c"] or len(data) != entry["bytes"]:
        raise DigestMismatch(
            f"{os.path.dirname(_file(parts[0])) if parts else 'recipe'} ({entry['key']})",
            found=f"{len(data)} bytes with crc32c {checksum}",
            expected=f"{entry['bytes']} bytes with crc32c {entry['crc32c']}",
            next_step="check the memory of this host; the trainer stages the rows again",
        )
    durable.step(f"chunk {entry['key']} put together")
    return data


def _file(part: Part) -> str:
    return part.path if isinstance(part, Extent) else part.whole.path


def _uploaded(marker: Path, staged: StagedJob) -> set[str]:
    try:
        with open(open_in_spool(marker), encoding="ascii") as file:
            lines = file.read().split("\n")
    except FileNotFoundError:
        return set()
    pairs = (line.partition(" ") for line in lines)
    return {key for attempt, _, key in pairs if attempt == staged.job.attempt}
