"""From stored chunks to rows and state trees: nothing is believed before it is checked.

Read order R5 (format §6.3): length and crc32c of all bytes, then the header against the manifest's
entry, then the row set, then the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from recpoint.catalog.checked_read import read_checked
from recpoint.catalog.chunk_pool import ChunkPool
from recpoint.catalog.store_contract import Store
from recpoint.errors import DigestMismatch, MalformedObject, ObjectNotFound
from recpoint.format.chunk import Chunk, Section, parse_chunk, section_tensor
from recpoint.format.dtypes import array_bytes, item_bytes, torch_dtype
from recpoint.format.manifest import ChunkEntry, Manifest, TableSpec
from recpoint.format.naming import manifest_key
from recpoint.format.state_tree import unflatten
from recpoint.kernels import quantize, row_set

__all__ = [
    "DecodedRows",
    "check_entry",
    "check_stored",
    "read_chunk",
    "read_rows",
    "read_state",
]

_NEXT_STEP = "recpoint check URL --level full, and restore an older checkpoint"
_TENSOR = re.compile(r"tensor\.(0|[1-9][0-9]{0,8})(?:\.(0|[1-9][0-9]{0,8}))?\Z")


@dataclass(frozen=True, kw_only=True)
class DecodedRows:
    """What a row chunk holds.

    Attributes:
        rows: ids, int64 [n], ascending, without duplicates, each in the table; or a range.
        values: [n, dim], of the table's dtype. MUST NOT be written to.
        row_states: one [n, *shape] for each row state of the table. MUST NOT be written to.
    """

    rows: range | Tensor
    values: Tensor
    row_states: tuple[Tensor, ...]


# --- before anything is read ---------------------------------------------------------------------


def check_entry(manifest: Manifest, entry: ChunkEntry) -> None:
    """Whether so few bytes can hold so many rows.

    A reader allocates for the rows that a manifest promises; after this check and `check_stored`
    that is at most a small multiple of what the store really holds (format §9).

    Raises:
        MalformedObject: they cannot.
    """
    if entry.table is None or entry.row_count is None or entry.bits is None:
        return
    spec = manifest.tables[entry.table]
    least_bytes = entry.row_count * (_row_bytes(spec, entry) + _state_bytes(spec))
    if entry.bytes < least_bytes:
        raise MalformedObject(
            entry.key,
            found=f"{entry.bytes} bytes for {entry.row_count} rows of table {spec.name!r:.80}",
            expected=f"at least {least_bytes}",
            next_step=_NEXT_STEP,
        )


def _row_bytes(spec: TableSpec, entry: ChunkEntry) -> int:
    if entry.scheme == "exact" or entry.bits is None:
        return spec.dim * item_bytes(spec.dtype)
    return (spec.dim * entry.bits + 7) // 8 + 2 * item_bytes("F16")


def _state_bytes(spec: TableSpec) -> int:
    return sum(array_bytes(state.narrow_dtype, state.shape) for state in spec.row_states)


def check_stored(manifest: Manifest, entry: ChunkEntry, sizes: Mapping[str, int]) -> None:
    """Whether the object is there and as long as the manifest says.

    Args:
        manifest: the checkpoint that names it.
        entry: the chunk.
        sizes: length in bytes of each stored object, by key.

    Raises:
        ObjectNotFound: it is not there.
        DigestMismatch: it has another length.
    """
    size_bytes = sizes.get(entry.key)
    if size_bytes is None:
        raise ObjectNotFound(
            entry.key,
            found="no object",
            expected=f"a chunk of {manifest.ref}",
            next_step=_NEXT_STEP,
        )
    if size_bytes != entry.bytes:
        raise DigestMismatch(
            entry.key,
            found=f"{size_bytes} bytes",
            expected=f"{entry.bytes} bytes",
            next_step=_NEXT_STEP,
        )


# --- chunks --------------------------------------------------------------------------------------


def read_chunk(store: Store, manifest: Manifest, entry: ChunkEntry) -> Chunk:
    """Read one chunk and check its length, digest, header and origin.

    Raises:
        ObjectNotFound: it is not there.
        FormatError: it is not what the manifest says; its key is the subject.
        StoreError: it could not be read.
    """

    def parse(data: bytes) -> Chunk:
        return parse_chunk(data, key=entry.key, entry=entry, manifest=manifest)

    return read_checked(store, entry.key, max_bytes=entry.bytes, parse=parse)


def read_rows(store: Store, manifest: Manifest, entry: ChunkEntry) -> DecodedRows:
    """Read and decode one row chunk. Errors as for `read_chunk`."""
    chunk = read_chunk(store, manifest, entry)
    return _decode_rows(chunk, manifest, entry)


def _decode_rows(chunk: Chunk, manifest: Manifest, entry: ChunkEntry) -> DecodedRows:
    if entry.table is None or entry.row_count is None or entry.bits is None:
        raise ValueError(f"{entry.key} is not a row chunk")
    spec = manifest.tables[entry.table]
    rows = _row_ids(chunk, entry, spec)
    sections = chunk.sections
    if entry.scheme == "exact":
        values = section_tensor(sections["values"])
    else:
        scale, offset = (_parameter(sections[name], entry) for name in ("scale", "offset"))
        try:
            decoded = quantize.dequantize_packed(
                section_tensor(sections["codes"]),
                scale,
                offset,
                dim=spec.dim,
                bits=entry.bits,
            )
        except ValueError as error:
            raise _malformed(
                entry.key, f"codes that do not decode ({error})", "format §3.2"
            ) from error
        values = decoded.to(torch_dtype(spec.dtype))  # rounds, format §3.2
    states = [
        section_tensor(sections[f"state.{k}"]).to(torch_dtype(state.dtype))  # exact, format §3.5
        for k, state in enumerate(spec.row_states)
    ]
    return DecodedRows(rows=rows, values=values, row_states=tuple(states))


def _parameter(section: Section, entry: ChunkEntry) -> Tensor:
    """The scales or offsets as f32 [n]; the conversion from F16 is exact."""
    parameter = section_tensor(section).to(torch.float32)
    if not bool(parameter.isfinite().all()):
        raise _malformed(
            entry.key, f"a {section.name} that is not finite", "finite row parameters (format §3.2)"
        )
    return parameter


def _row_ids(chunk: Chunk, entry: ChunkEntry, spec: TableSpec) -> range | Tensor:
    coded = chunk.meta.row_set
    count = entry.row_count
    if coded is None or count is None:
        raise ValueError(f"{entry.key} is not a row chunk")
    if coded.coding == "range":
        if coded.first + count > spec.rows:
            found = f"{count} rows from {coded.first}"
            raise _malformed(entry.key, found, f"rows below {spec.rows}")
        return range(coded.first, coded.first + count)
    payload = bytes(chunk.sections["row_set"].data)
    try:
        return row_set.decode(coded.coding, coded.first, payload, count=count, rows=spec.rows)
    except ValueError as error:
        raise _malformed(
            entry.key, f"a row set that does not decode ({error})", "format §3.1"
        ) from error


# --- state ---------------------------------------------------------------------------------------


def read_state(
    store: Store,
    manifest: Manifest,
    pool: ChunkPool,
    on_chunk: Callable[[ChunkEntry], None],
) -> dict[int, object]:
    """The state tree of every rank, in new memory.

    Raises:
        FormatError: a chunk is damaged, or a rank's chunks do not make one tree.
        ObjectNotFound: a chunk is missing.
        StoreError: a chunk could not be read.
    """
    entries = [entry for entry in manifest.chunks if entry.content == "state"]
    entries.sort(key=lambda entry: entry.key)
    sections: dict[int, dict[str, Section]] = {rank: {} for rank in range(manifest.ranks)}
    chunks = pool.in_order(entries, lambda entry: read_chunk(store, manifest, entry))
    for entry, outcome in chunks:
        chunk = outcome.result()
        of_rank = sections[entry.rank]
        twice = of_rank.keys() & chunk.sections.keys()
        if twice:
            raise _malformed(entry.key, f"{min(twice)} again", "each part of the state once")
        of_rank.update(chunk.sections)
        on_chunk(entry)
    return {rank: _assemble(manifest, rank, parts) for rank, parts in sections.items()}


def _assemble(manifest: Manifest, rank: int, sections: dict[str, Section]) -> object:
    """One rank's state tree from the sections of all its state chunks (format §3.4)."""
    key = f"{manifest_key(manifest.step, manifest.generation)}, state of rank {rank}"
    if "tree" not in sections:
        raise _malformed(key, "no tree", "one tree")
    whole: dict[int, Tensor] = {}
    pieces: dict[int, dict[int, Tensor]] = {}
    for name, section in sections.items():
        if name == "tree":
            continue
        match = _TENSOR.match(name)
        if match is None:
            raise _malformed(key, f"the tensor {name!r:.80}", "tensor.<i> or tensor.<i>.<piece>")
        if match[2] is None:
            whole[int(match[1])] = section_tensor(section)
        else:
            pieces.setdefault(int(match[1]), {})[int(match[2])] = section_tensor(section)
    for number, parts in pieces.items():
        if number in whole or sorted(parts) != list(range(len(parts))):
            raise _malformed(key, f"tensor {number} with pieces missing", "each piece once")
        ordered = [parts[piece] for piece in range(len(parts))]
        if any(part.dim() != 1 or part.dtype != ordered[0].dtype for part in ordered):
            raise _malformed(key, f"tensor {number} in pieces that do not fit", "1-D, one dtype")
        whole[number] = torch.cat(ordered)
    if sorted(whole) != list(range(len(whole))):
        raise _malformed(key, f"the tensors {sorted(whole)!r:.80}", "numbers from 0 without gap")
    tree = bytes(sections["tree"].data)
    tensors = [whole[number] for number in range(len(whole))]
    return unflatten(tree, tensors, name=key)


def _malformed(key: str, found: str, expected: str) -> MalformedObject:
    return MalformedObject(key, found=found, expected=expected, next_step=_NEXT_STEP)
