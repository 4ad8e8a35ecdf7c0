"""Reads stored chunks, checks them, and returns their rows undecoded.

Reuses memory for large objects that are read one after another. An allocator keeps the memory that
a thread has freed for that thread: glibc keeps up to two blocks of the largest size for each, so
that several reader threads hold twice what they use. Memory that is returned to the system is
cleared when it is allocated again, which takes longer than reading. A buffer lent here comes back
when the last view of it is gone, and is then lent to the next thread that reads.

Turns stored chunks into checked rows; nothing is trusted before it is checked. The order of checks
is rule 5 of the read order (format §6.3): length and crc32c of all bytes, then the header against
the manifest's entry, then the row set and the row parameters.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.restore.coded_state import StoredState, stored_state
from recpoint.catalog.run.chain import Chain
from recpoint.catalog.store.contract import Store
from recpoint.catalog.store.records import parsed_twice
from recpoint.catalog.store.scheduler import ReadScheduler
from recpoint.errors import DigestMismatch, FormatError, MalformedObject, ObjectNotFound
from recpoint.format.chunk import Chunk, Section, parse_chunk, section_tensor
from recpoint.format.dtypes import item_bytes
from recpoint.format.first_values import FirstValueRule
from recpoint.format.manifest import ChunkEntry, Manifest, Scheme, TableSpec
from recpoint.format.naming import parse_chunk_key
from recpoint.kernels import row_set

__all__ = [
    "ChunkSource",
    "ReadBuffers",
    "StoreChunks",
    "StoredRows",
    "check_entry",
    "check_stored",
    "look_at_stored",
    "read_chunk",
    "read_rows",
    "row_ids",
    "row_parameter",
    "why_missing",
]


class ChunkSource(Protocol):
    """A source of the bytes of chunks; called from several threads.

    A source is not trusted: `read_chunk` compares the bytes with the digest in the manifest, and
    reads a second time if they differ.
    """

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the lengths in bytes of the chunks whose keys start with `prefix`, by key.

        Raises:
            ObjectNotFound: the source has none of them; the error says why.
            StoreError: the source cannot tell now.
        """

    def read(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview] | None = None
    ) -> bytes | memoryview:
        """Return all bytes of a chunk, unchecked.

        Args:
            key: key of the chunk.
            max_bytes: a larger chunk is an error, and no memory is allocated for it.
            lend: returns memory of a given size; a source that can read into given memory uses it.

        Raises:
            ObjectNotFound: there is no such chunk.
            MalformedObject: the chunk is larger than `max_bytes`.
            StoreError: the chunk could not be read.
        """


@dataclass(frozen=True)
class StoreChunks:
    """The chunks in the store of a run."""

    store: Store

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the sizes of all chunks in bytes, by key; costs one listing."""
        return {info.key: info.size_bytes for info in self.store.list(prefix)}

    def read(
        self, key: str, *, max_bytes: int, lend: Callable[[int], memoryview] | None = None
    ) -> bytes | memoryview:
        """Read a chunk from the store."""
        if lend is None:
            return self.store.get(key, max_bytes=max_bytes)
        return self.store.get_lent(key, max_bytes=max_bytes, lend=lend)


#: Sizes of buffers are rounded up to a multiple of this, so that similar objects can share them.
_GRAIN_BYTES: Final = 1 << 20
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class ReadBuffers:
    """Lends buffers and takes them back; holds as many as were lent at once at most.

    Each buffer is freed after this object and the last view of the buffer are gone. Several threads
    may use it: they share only a list, whose `append` and `pop` are atomic. A lock could deadlock,
    because a buffer may come back in a thread that holds it.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def lend(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` of uninitialized memory, reserved as long as any view of it lives."""
        if size_bytes < 1:
            return memoryview(bytearray())
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = None
        if buffer is None or len(buffer) < size_bytes:
            buffer = None  # frees a buffer that is too small before allocating a larger one
            grains = -(-size_bytes // _GRAIN_BYTES)
            buffer = np.frombuffer(mmap.mmap(-1, grains * _GRAIN_BYTES, flags=_PRIVATE), np.uint8)
        lent: Any = buffer[:size_bytes]
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return memoryview(lent)


_NEXT_STEP = "recpoint check URL --level full, and restore an older checkpoint"


@dataclass(frozen=True, kw_only=True)
class StoredRows:
    """The rows of a chunk, checked and not yet decoded. Its tensors MUST NOT be written to.

    Attributes:
        rows: ids, int64 [n], ascending, without duplicates, each in the table; or a range.
        scheme: `"exact"`, `"asymmetric"`, or `"residual"`: codes of rows less those of the base.
            Rows of scheme `"first"` are computed as they are read, and are exact from then on.
        bits: bits of a code; for scheme exact, bits of a value.
        values: for scheme exact [n, dim] of the table's dtype, else packed codes
            u8 [n, ceil(dim·bits/8)].
        scale, offset: f32 [n], finite; empty for scheme exact.
        row_states: one [n, *shape] for each row state of the table, of its dtype, BF16, or coded.
        first: the rule by which the values were computed; None: they were stored.
    """

    rows: range | Tensor
    scheme: Scheme
    bits: int
    values: Tensor
    scale: Tensor
    offset: Tensor
    row_states: tuple[StoredState, ...]
    first: FirstValueRule | None = None

    def positions_of(self, wanted_rows: range) -> range:
        """Return the positions of the rows whose ids are in `wanted_rows`."""
        rows = self.rows
        if isinstance(rows, range):
            start, stop = (
                min(max(end, rows.start), rows.stop) - rows.start
                for end in (wanted_rows.start, wanted_rows.stop)
            )
        else:
            ends = torch.tensor([wanted_rows.start, wanted_rows.stop], device="cpu")
            start, stop = torch.searchsorted(rows, ends).tolist()
        return range(start, max(start, stop))

    def within(self, wanted_rows: range) -> StoredRows:
        """Return the rows that are wanted, in the same memory; ids count from `wanted.start`."""
        positions = self.positions_of(wanted_rows)
        if len(positions) == len(self.rows) and wanted_rows.start == 0:
            return self
        part = slice(positions.start, positions.stop)
        quantized = self.scheme != "exact"
        return replace(
            self,
            rows=_moved(self.rows[part], -wanted_rows.start),
            values=self.values[part],
            scale=self.scale[part] if quantized else self.scale,
            offset=self.offset[part] if quantized else self.offset,
            row_states=tuple(state[part] for state in self.row_states),
        )

    def chosen(self, positions: Tensor) -> StoredRows:
        """Return some of the rows, in memory of their own.

        Args:
            positions: int64 [m], ascending.
        """
        rows, is_quantized = self.rows, self.scheme != "exact"
        return replace(
            self,
            rows=positions + rows.start if isinstance(rows, range) else rows[positions],
            values=self.values[positions],
            scale=self.scale[positions] if is_quantized else self.scale,
            offset=self.offset[positions] if is_quantized else self.offset,
            row_states=tuple(state[positions] for state in self.row_states),
        )


def _moved(rows: range | Tensor, by: int) -> range | Tensor:
    return range(rows.start + by, rows.stop + by) if isinstance(rows, range) else rows + by


def check_entry(manifest: Manifest, entry: ChunkEntry) -> None:
    """Check that a chunk's bytes can hold its rows.

    A reader allocates memory for the rows that a manifest states. After this check and
    `check_stored` that is at most a small multiple of what the store really holds (format §9).

    Raises:
        MalformedObject: the chunk has too few bytes for its rows.
    """
    if entry.table is None or entry.row_count is None or entry.bits is None:
        return
    spec = manifest.tables[entry.table]
    if entry.scheme == "first":
        return  # it has no rows; `parse_chunk` bounds how many are computed
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
    return sum(state.least_bytes for state in spec.row_states)


def check_stored(manifest: Manifest, entry: ChunkEntry, sizes: Mapping[str, int]) -> None:
    """Check that a chunk's object exists and has the length that the manifest states.

    Args:
        manifest: the checkpoint that names the chunk.
        entry: the chunk.
        sizes: length in bytes of each stored object, by key.

    Raises:
        ObjectNotFound: there is no such object.
        DigestMismatch: the object has another length.
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


def read_chunk(
    source: ChunkSource,
    manifest: Manifest,
    entry: ChunkEntry,
    *,
    buffers: ReadBuffers | None = None,
) -> Chunk:
    """Read one chunk and check its length, digest, header and origin.

    Args:
        source: where the chunk is read from.
        manifest: the checkpoint that names the chunk.
        entry: the chunk.
        buffers: lend the memory for the chunk as long as the chunk lives; None allocates memory.

    Raises:
        ObjectNotFound: there is no such chunk.
        FormatError: the chunk is not what the manifest says; its key is the subject.
        StoreError: the chunk could not be read.
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
    """Read one row chunk and check all of it; `placement.place` decodes the wanted rows.

    Arguments and errors are those of `read_chunk`.
    """
    chunk = read_chunk(source, manifest, entry, buffers=buffers)
    if entry.table is None or entry.scheme is None or entry.bits is None:
        raise ValueError(f"{entry.key} is not a row chunk")
    spec = manifest.tables[entry.table]
    sections = chunk.sections
    if entry.scheme == "first":
        return _first_rows(chunk, entry, spec)
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
            stored_state(sections, number, state) for number, state in enumerate(spec.row_states)
        ),
    )


def _first_rows(chunk: Chunk, entry: ChunkEntry, spec: TableSpec) -> StoredRows:
    rule, rows = chunk.meta.first, row_ids(chunk, entry, spec)
    assert rule is not None  # a chunk of this scheme has one
    ids = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    return StoredRows(
        rows=rows,
        scheme="exact",
        bits=8 * item_bytes(spec.dtype),
        values=rule.rows(spec, ids),
        scale=none,
        offset=none,
        row_states=tuple(
            section_tensor(chunk.sections[f"state.{number}"])
            .expand(len(rows), *state.shape)
            .contiguous()
            for number, state in enumerate(spec.row_states)
        ),
        first=rule,
    )


def row_parameter(section: Section, entry: ChunkEntry) -> Tensor:
    """Return the scales or offsets as f32 [n]; the conversion from F16 is exact.

    Raises:
        MalformedObject: a parameter is not finite.
    """
    parameter = section_tensor(section).to(torch.float32)
    # If any value is NaN, both the minimum and the maximum are NaN; if any value is infinite, one
    # of them is.
    if not all(bool(end.isfinite()) for end in parameter.aminmax()):
        raise _malformed(
            entry.key, f"a {section.name} that is not finite", "finite row parameters (format §3.2)"
        )
    return parameter


def row_ids(chunk: Chunk, entry: ChunkEntry, spec: TableSpec) -> range | Tensor:
    """Return the ids of a chunk's rows: int64 [n], ascending, each in the table; or a range.

    Raises:
        MalformedObject: the row set does not decode, or its count, first or last row differ from
            the manifest's.
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
            range_text = f"{count} rows from {coded.first}"
            raise _malformed(entry.key, range_text, f"rows below {spec.rows}")
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


#: Most listings at once.
_LISTINGS = 16


class Missing(NamedTuple):
    """A chunk that is missing, or not as long as its manifest says; and the error."""

    entry: ChunkEntry
    error: FormatError | ObjectNotFound


def _needed(chain: Chain) -> list[tuple[Manifest, ChunkEntry]]:
    """Return the chunks that a restore or validation of a chain reads.

    These are the rows of all checkpoints, of a base beside the chain too, and the state and samples
    of the newest.
    """
    return [
        (manifest, entry)
        for manifest in chain.all_manifests
        for entry in manifest.chunks
        if entry.content == "rows" or manifest is chain.newest
    ]


def look_at_stored(source: ChunkSource, chain: Chain) -> Iterator[Missing]:
    """Find missing and truncated objects by listings, without reading an object.

    Raises:
        StoreError: the source cannot tell now.
    """
    chunks = _needed(chain)
    prefixes = {_prefix_of(entry) for _, entry in chunks if parse_chunk_key(entry.key)}
    sizes: dict[str, int] = {}
    refused: dict[str, ObjectNotFound] = {}
    # Each prefix needs a listing, which mostly waits; several at once speed up a long chain.
    with ReadScheduler(min(_LISTINGS, len(prefixes) or 1)) as reads:
        for prefix, listing in reads.in_order(sorted(prefixes), source.sizes):
            try:
                sizes.update(listing.result())
            except ObjectNotFound as error:
                refused[prefix] = error
    for manifest, entry in chunks:
        try:
            check_entry(manifest, entry)
            check_stored(manifest, entry, sizes)
        except (FormatError, ObjectNotFound) as error:
            yield Missing(entry, refused.get(_prefix_of(entry), error))


def why_missing(source: ChunkSource, entry: ChunkEntry) -> ObjectNotFound | None:
    """Return the source's reason why the chunks beside `entry` cannot be listed; None if none.

    Raises:
        StoreError: the source cannot tell now.
    """
    try:
        source.sizes(_prefix_of(entry))
    except ObjectNotFound as error:
        return error
    return None


def _prefix_of(entry: ChunkEntry) -> str:
    return entry.key.rpartition("/")[0] + "/"
