"""From stored chunks to checked rows: nothing is believed before it is checked.

Read order R5 (format §6.3): length and crc32c of all bytes, then the header against the manifest's
entry, then the row set and the row parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recpoint.catalog.chunks.chunk_source import ChunkSource
from recpoint.catalog.chunks.read_buffers import ReadBuffers
from recpoint.catalog.stores.stored_records import parsed_twice
from recpoint.errors import DigestMismatch, MalformedObject, ObjectNotFound
from recpoint.format.chunk import Chunk, Section, parse_chunk, section_tensor
from recpoint.format.dtypes import array_bytes, item_bytes
from recpoint.format.manifest import ChunkEntry, Manifest, Scheme, TableSpec
from recpoint.kernels import row_set

__all__ = [
    "StoredRows",
    "check_entry",
    "check_stored",
    "read_chunk",
    "read_rows",
    "row_ids",
    "row_parameter",
]

_NEXT_STEP = "recpoint check URL --level full, and restore an older checkpoint"


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """What a row chunk holds, checked and not yet decoded. Its tensors MUST NOT be written to.

    Attributes:
        rows: ids, int64 [n], ascending, without duplicates, each in the table; or a range.
        scheme: `"exact"` or `"asymmetric"`.
        bits: of a code; for scheme exact of a value.
        values: for scheme exact [n, dim] of the table's dtype, else packed codes
            u8 [n, ceil(dim·bits/8)].
        scale, offset: f32 [n], finite; empty for scheme exact.
        row_states: one [n, *shape] for each row state of the table, of its dtype or BF16.
    """

    rows: range | Tensor
    scheme: Scheme
    bits: int
    values: Tensor
    scale: Tensor
    offset: Tensor
    row_states: tuple[Tensor, ...]

    def positions_of(self, wanted: range) -> range:
        """The positions of those of its rows whose ids are wanted."""
        rows = self.rows
        if isinstance(rows, range):
            start, stop = (
                min(max(end, rows.start), rows.stop) - rows.start
                for end in (wanted.start, wanted.stop)
            )
        else:
            ends = torch.tensor([wanted.start, wanted.stop], device="cpu")
            start, stop = torch.searchsorted(rows, ends).tolist()
        return range(start, max(start, stop))

    def within(self, wanted: range) -> StoredRows:
        """Those of its rows that are wanted, in the same memory; ids count from `wanted.start`."""
        inside = self.positions_of(wanted)
        if len(inside) == len(self.rows) and wanted.start == 0:
            return self
        part = slice(inside.start, inside.stop)
        quantized = self.scheme != "exact"
        return replace(
            self,
            rows=_moved(self.rows[part], -wanted.start),
            values=self.values[part],
            scale=self.scale[part] if quantized else self.scale,
            offset=self.offset[part] if quantized else self.offset,
            row_states=tuple(state[part] for state in self.row_states),
        )


def _moved(rows: range | Tensor, by: int) -> range | Tensor:
    return range(rows.start + by, rows.stop + by) if isinstance(rows, range) else rows + by


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


def read_chunk(
    source: ChunkSource,
    manifest: Manifest,
    entry: ChunkEntry,
    *,
    buffers: ReadBuffers | None = None,
) -> Chunk:
    """Read one chunk and check its length, digest, header and origin.

    Args:
        source: where it is.
        manifest: the checkpoint that names it.
        entry: the chunk.
        buffers: whose memory it may be in as long as the chunk lives; None: memory of its own.

    Raises:
        ObjectNotFound: it is not there.
        FormatError: it is not what the manifest says; its key is the subject.
        StoreError: it could not be read.
    """

    def parse(data: bytes | memoryview) -> Chunk:
        return parse_chunk(data, key=entry.key, entry=entry, manifest=manifest)

    lend = None if buffers is None else buffers.lend
    return parsed_twice(lambda: source.read(entry.key, max_bytes=entry.bytes, lend=lend), parse)


def read_rows(
    source: ChunkSource,
    manifest: Manifest,
    entry: ChunkEntry,
    *,
    buffers: ReadBuffers | None = None,
) -> StoredRows:
    """Read one row chunk and check all of it; `row_placement.place` decodes what is wanted.

    Arguments and errors as for `read_chunk`.
    """
    chunk = read_chunk(source, manifest, entry, buffers=buffers)
    if entry.table is None or entry.scheme is None or entry.bits is None:
        raise ValueError(f"{entry.key} is not a row chunk")
    spec = manifest.tables[entry.table]
    sections = chunk.sections
    exact = entry.scheme == "exact"
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    return StoredRows(
        rows=row_ids(chunk, entry, spec),
        scheme=entry.scheme,
        bits=entry.bits,
        values=section_tensor(sections["values" if exact else "codes"]),
        scale=none if exact else row_parameter(sections["scale"], entry),
        offset=none if exact else row_parameter(sections["offset"], entry),
        row_states=tuple(
            section_tensor(sections[f"state.{k}"]) for k in range(len(spec.row_states))
        ),
    )


def row_parameter(section: Section, entry: ChunkEntry) -> Tensor:
    """The scales or offsets as f32 [n]; the conversion from F16 is exact.

    Raises:
        MalformedObject: one is not finite.
    """
    parameter = section_tensor(section).to(torch.float32)
    # Both ends are NaN where any value is one, and infinite where any is that.
    if not all(bool(end.isfinite()) for end in parameter.aminmax()):
        raise _malformed(
            entry.key, f"a {section.name} that is not finite", "finite row parameters (format §3.2)"
        )
    return parameter


def row_ids(chunk: Chunk, entry: ChunkEntry, spec: TableSpec) -> range | Tensor:
    """Ids of a chunk's rows, int64 [n], ascending, each in the table; or a range.

    Raises:
        MalformedObject: the row set does not decode to as many, or to others than the manifest's.
    """
    rows = _decoded_ids(chunk, entry, spec)
    ends = (int(rows[0]), int(rows[-1]))
    if ends != (entry.first_row, entry.last_row):
        raise _malformed(
            entry.key,
            f"rows from {ends[0]} to {ends[1]}",
            f"rows from {entry.first_row} to {entry.last_row}, as in the manifest",
        )
    return rows


def _decoded_ids(chunk: Chunk, entry: ChunkEntry, spec: TableSpec) -> range | Tensor:
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


def _malformed(key: str, found: str, expected: str) -> MalformedObject:
    return MalformedObject(key, found=found, expected=expected, next_step=_NEXT_STEP)
