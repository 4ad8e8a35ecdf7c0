"""Moves rows from stored chunks to new chunks without decoding them.

This is rule 3 of the consolidation order (format §6.8).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import crc32c
import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.plan import CHUNK_BYTES
from recpoint.catalog.restore.chunks import ChunkSource, read_chunk, row_ids, row_parameter
from recpoint.format.chunk import (
    Chunk,
    ChunkMeta,
    RowSetCoding,
    Section,
    build_chunk,
    section_tensor,
)
from recpoint.format.dtypes import Dtype, array_bytes, item_bytes
from recpoint.format.first_values import FirstValueRule, most_first_rows
from recpoint.format.manifest import GRID_DTYPE, ChunkEntry, Manifest, Scheme, TableSpec
from recpoint.format.naming import row_chunk_key
from recpoint.kernels import row_gather, row_set

__all__ = ["BUFFERED_BYTES", "ChunkBuilder", "MovedRows", "RowKind", "read_moved"]


#: Most memory of rows waiting for a full chunk, over all kinds of rows of a table.
BUFFERED_BYTES: Final = 48 << 20

#: Most bytes of one row id in a row set, as in `persist/plan.py`.
_ID_BYTES: Final = 9
_INT64_BYTES: Final = 8

_Ids = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _FirstRows(NamedTuple):
    """What rows with their first values have in common (format §3.9).

    Attributes:
        rule: computes the values.
        entries: the bytes of each row state of a row.
    """

    rule: FirstValueRule
    entries: tuple[bytes, ...]


class RowKind(NamedTuple):
    """The properties that rows must share to be in the same chunk (format §3).

    `first` is for rows with their first values alone.
    """

    rank: int
    bits: int
    scheme: Scheme
    parameters: Dtype | None
    states: tuple[Dtype, ...]
    first: _FirstRows | None = None

    def most_rows(self, spec: TableSpec) -> int:
        """Return the most rows of a chunk."""
        if self.first is not None:
            return min(most_first_rows(spec), spec.rows)
        row_bytes = sum(array_bytes(*part) for part in self.arrays(spec).values()) + _ID_BYTES
        return max(1, min(CHUNK_BYTES // row_bytes, spec.rows))

    def common_sections(self, spec: TableSpec) -> list[Section]:
        """Return the arrays of a chunk that it has once, for all its rows."""
        entries = () if self.first is None else self.first.entries
        return [
            Section(f"state.{index}", state.dtype, (1, *state.shape), entry)
            for index, (state, entry) in enumerate(zip(spec.row_states, entries, strict=False))
        ]

    def arrays(self, spec: TableSpec) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        """Return a chunk's arrays except the row set: name, dtype and shape of one row's part."""
        if self.first is not None:
            return {}
        if self.parameters is None:
            arrays: dict[str, tuple[Dtype, tuple[int, ...]]] = {"values": (spec.dtype, (spec.dim,))}
        else:
            arrays = {
                "codes": ("U8", (-(-spec.dim * self.bits // 8),)),
                "scale": (self.parameters, ()),
                "offset": (self.parameters, ()),
            }
        for index, (dtype, state) in enumerate(zip(self.states, spec.row_states, strict=True)):
            arrays[f"state.{index}"] = (dtype, state.shape)
            if state.is_coded(dtype):
                arrays[f"state.{index}.grid"] = (GRID_DTYPE, ())
        return arrays


@dataclass(frozen=True, kw_only=True)
class MovedRows:
    """The rows of a chunk as bytes.

    Attributes:
        kind: the kind of all rows.
        rows: ids, int64 [n], ascending; or a range.
        parts: each array's bytes by name, u8 [n, bytes of a row's part]. MUST NOT be written to.
    """

    kind: RowKind
    rows: range | Tensor
    parts: dict[str, Tensor]


def read_moved(source: ChunkSource, manifest: Manifest, entry: ChunkEntry) -> MovedRows:
    """Read one row chunk and check all of it; errors are those of `read_chunk`."""
    chunk = read_chunk(source, manifest, entry)
    if entry.table is None or entry.scheme is None or entry.bits is None:
        raise ValueError(f"{entry.key} is not a row chunk")
    spec, sections = manifest.tables[entry.table], chunk.sections
    quantized = entry.scheme in ("asymmetric", "residual")
    if quantized:
        for name in ("scale", "offset"):
            row_parameter(sections[name], entry)  # checks that all parameters are finite
    kind = RowKind(
        rank=entry.rank,
        bits=entry.bits,
        scheme=entry.scheme,
        parameters=sections["scale"].dtype if quantized else None,
        states=tuple(sections[f"state.{k}"].dtype for k in range(len(spec.row_states))),
        first=_common(chunk, spec),
    )
    rows = row_ids(chunk, entry, spec)
    return MovedRows(
        kind=kind,
        rows=rows,
        parts={name: _as_bytes(sections[name], len(rows)) for name in kind.arrays(spec)},
    )


def _common(chunk: Chunk, spec: TableSpec) -> _FirstRows | None:
    rule = chunk.meta.first
    if rule is None:
        return None
    states = (chunk.sections[f"state.{k}"] for k in range(len(spec.row_states)))
    return _FirstRows(rule, tuple(bytes(state.data_view) for state in states))


def _as_bytes(section: Section, rows: int) -> Tensor:
    flat = Section(section.name, "U8", (rows, section.nbytes // rows), section.data)
    return section_tensor(flat)


class ChunkBuilder:
    """Collects the rows of one table and emits chunks of them.

    The chunks and their bytes depend only on the rows and the order in which they are added.

    Args:
        manifest: manifest of the checkpoint that the chunks are for.
        attempt: the attempt in the chunks' keys.
        table: index into the manifest's tables.
        emit: called with the entry and the bytes of each complete chunk.
    """

    def __init__(
        self,
        manifest: Manifest,
        attempt: str,
        table: int,
        emit: Callable[[ChunkEntry, bytes], None],
    ) -> None:
        self._manifest = manifest
        self._attempt = attempt
        self._table = table
        self._spec = manifest.tables[table]
        self._emit = emit
        self._waiting: dict[RowKind, _PendingRows] = {}
        self._numbers: dict[int, int] = {}

    def add(self, moved: MovedRows, first: int, stop: int, positions: Tensor | None) -> None:
        """Add rows of a chunk.

        Args:
            moved: the chunk.
            first, stop: add only rows at positions first … stop − 1.
            positions: positions of the rows to add, int64 [m], ascending, counted from `first`;
                None: all.
        """
        if positions is not None:
            positions = positions + first
        total = stop - first if positions is None else positions.numel()
        appended = 0
        while appended < total:
            appended += self._append(moved, first, appended, total, positions)
        sizes = {kind: waiting.resident_bytes for kind, waiting in self._waiting.items()}
        while sum(sizes.values()) > BUFFERED_BYTES:
            largest = max(sizes, key=lambda kind: sizes[kind])
            del sizes[largest]
            self._build(largest)

    def finish(self) -> None:
        """Emit chunks of the remaining rows."""
        while self._waiting:
            self._build(next(iter(self._waiting)))

    def _append(
        self, moved: MovedRows, first: int, appended: int, total: int, positions: Tensor | None
    ) -> int:
        """Add as many rows as the chunk of their kind has room for; return their number."""
        waiting = self._waiting.get(moved.kind)
        if waiting is None:
            waiting = self._waiting[moved.kind] = _PendingRows(moved.kind, self._spec)
        count = min(total - appended, waiting.room)
        if positions is None:
            waiting.append_range(moved, first + appended, count)
        else:
            waiting.append(moved, positions[appended : appended + count])
        is_full = not waiting.room
        del waiting  # only the dictionary refers to it now, so that `_build` frees its memory
        if is_full:
            self._build(moved.kind)
        return count

    def _build(self, kind: RowKind) -> None:
        spec, manifest = self._spec, self._manifest
        # Removed from the dictionary so that its memory is freed: there may be a kind per rank.
        ids, parts = self._waiting.pop(kind).take()
        coded = row_set.encode(torch.from_numpy(ids))
        arrays = kind.arrays(spec)
        sections = [
            Section(name, arrays[name][0], (ids.size, *arrays[name][1]), part)
            for name, part in parts.items()
        ]
        sections += kind.common_sections(spec)
        if coded.payload is not None:
            sections.append(Section("row_set", "U8", (len(coded.payload),), coded.payload))
        # With the widest items first each array is aligned, and a reader need not copy it.
        sections.sort(key=lambda section: -item_bytes(section.dtype))
        meta = ChunkMeta(
            run=manifest.run,
            step=manifest.step,
            generation=manifest.generation,
            attempt=self._attempt,
            content="rows",
            rank=kind.rank,
            table=self._table,
            row_count=ids.size,
            dim=spec.dim,
            bits=kind.bits,
            scheme=kind.scheme,
            row_set=RowSetCoding.model_validate({"coding": coded.coding, "first": coded.first}),
            first=None if kind.first is None else kind.first.rule,
        )
        number = self._numbers.get(kind.rank, 0)
        self._numbers[kind.rank] = number + 1
        data = build_chunk(meta, sections)
        entry = ChunkEntry(
            key=row_chunk_key(
                manifest.step,
                manifest.generation,
                self._attempt,
                rank=kind.rank,
                table=self._table,
                number=number,
            ),
            bytes=len(data),
            crc32c=crc32c.crc32c(data),
            content="rows",
            rank=kind.rank,
            table=self._table,
            row_count=ids.size,
            first_row=int(ids[0]),
            last_row=int(ids[-1]),
            bits=kind.bits,
            scheme=kind.scheme,
        )
        self._emit(entry, data)


class _PendingRows:
    """The rows of one kind that wait until they fill a chunk.

    It allocates a memory mapping of its own. Pages that are never written take no memory, and all
    pages are returned to the system at once; an allocator may delay that.
    """

    def __init__(self, kind: RowKind, spec: TableSpec) -> None:
        self.rows = 0
        self._widths = {name: array_bytes(*part) for name, part in kind.arrays(spec).items()}
        self._most = kind.most_rows(spec)
        sizes = [_pages(self._most * width) for width in (_INT64_BYTES, *self._widths.values())]
        mapping = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # With huge pages, a few rows could take 2 MiB for each part. A kernel without huge
            # pages refuses the call.
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_NOHUGEPAGE)
        # The views keep the mapping alive.
        memory = torch.frombuffer(mapping, dtype=torch.uint8).split(sizes)
        self._ids = memory[0].view(torch.int64)[: self._most]
        self._parts = {
            name: part[: self._most * width].view(self._most, width)
            for (name, width), part in zip(self._widths.items(), memory[1:], strict=True)
        }

    @property
    def room(self) -> int:
        return self._most - self.rows

    @property
    def resident_bytes(self) -> int:
        widths = (_INT64_BYTES, *self._widths.values())
        return sum(_pages(self.rows * width) for width in widths)

    def append_range(self, moved: MovedRows, first: int, count: int) -> None:
        target = slice(self.rows, self.rows + count)
        rows = moved.rows[first : first + count]
        self._ids[target] = (
            torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
        )
        for name, part in self._parts.items():
            part[target] = moved.parts[name][first : first + count]
        self.rows += count

    def append(self, moved: MovedRows, positions: Tensor) -> None:
        target = slice(self.rows, self.rows + positions.numel())
        rows = moved.rows
        self._ids[target] = positions + rows.start if isinstance(rows, range) else rows[positions]
        for name, part in self._parts.items():
            row_gather.gather(moved.parts[name], positions, part[target])
        self.rows += positions.numel()

    def take(self) -> tuple[_Ids, dict[str, _Bytes]]:
        """Return the ids, i64 [n], ascending, and each part, u8; call it last."""
        ids = self._ids[: self.rows]
        parts = {name: part[: self.rows] for name, part in self._parts.items()}
        if bool((ids[1:] < ids[:-1]).any()):
            order = ids.argsort()
            ids = ids[order]
            parts = {name: part[order] for name, part in parts.items()}
        return ids.numpy(), {name: part.reshape(-1).numpy() for name, part in parts.items()}


def _pages(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to whole pages."""
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
