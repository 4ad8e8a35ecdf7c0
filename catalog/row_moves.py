"""Rows from stored chunks into new ones, as they are stored: none is decoded (format §6.8 C3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import crc32c
import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.chunk_reader import read_chunk, row_ids, row_parameter
from recpoint.catalog.persist_plan import CHUNK_BYTES
from recpoint.catalog.store_contract import Store
from recpoint.format.chunk import ChunkMeta, RowSetCoding, Section, build_chunk, section_tensor
from recpoint.format.dtypes import Dtype, array_bytes, item_bytes
from recpoint.format.manifest import ChunkEntry, Manifest, Scheme, TableSpec
from recpoint.format.naming import row_chunk_key
from recpoint.kernels import row_gather, row_set

__all__ = ["BUFFERED_BYTES", "ChunkBuilder", "MovedRows", "RowKind", "read_moved"]

#: Most bytes of rows that wait for a chunk of their kind to be full, over all kinds of a table.
BUFFERED_BYTES: Final = 48 << 20

#: Room for one row id in a row set, as in `persist_plan`.
_ID_BYTES: Final = 9

_Ids = np.ndarray[Any, np.dtype[np.int64]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class RowKind(NamedTuple):
    """What rows have to have in common to share a chunk (format §3)."""

    rank: int
    bits: int
    scheme: Scheme
    parameters: Dtype | None
    states: tuple[Dtype, ...]

    def arrays(self, spec: TableSpec) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        """Names of a chunk's arrays but for the row set, with dtype and shape of one row's part."""
        if self.parameters is None:
            found: dict[str, tuple[Dtype, tuple[int, ...]]] = {"values": (spec.dtype, (spec.dim,))}
        else:
            found = {
                "codes": ("U8", (-(-spec.dim * self.bits // 8),)),
                "scale": (self.parameters, ()),
                "offset": (self.parameters, ()),
            }
        for index, (dtype, state) in enumerate(zip(self.states, spec.row_states, strict=True)):
            found[f"state.{index}"] = (dtype, state.shape)
        return found


@dataclass(frozen=True, kw_only=True)
class MovedRows:
    """A chunk's rows as bytes.

    Attributes:
        kind: of all of them.
        rows: ids, int64 [n], ascending; or a range.
        parts: by name of the array, u8 [n, bytes of a row's part]. MUST NOT be written to.
    """

    kind: RowKind
    rows: range | Tensor
    parts: dict[str, Tensor]


def read_moved(store: Store, manifest: Manifest, entry: ChunkEntry) -> MovedRows:
    """Read one row chunk and check all of it; errors as for `chunk_reader.read_chunk`."""
    chunk = read_chunk(store, manifest, entry)
    if entry.table is None or entry.scheme is None or entry.bits is None:
        raise ValueError(f"{entry.key} is not a row chunk")
    spec, sections = manifest.tables[entry.table], chunk.sections
    quantized = entry.scheme == "asymmetric"
    if quantized:
        for name in ("scale", "offset"):
            row_parameter(sections[name], entry)  # refuses those that are not finite
    kind = RowKind(
        rank=entry.rank,
        bits=entry.bits,
        scheme=entry.scheme,
        parameters=sections["scale"].dtype if quantized else None,
        states=tuple(sections[f"state.{k}"].dtype for k in range(len(spec.row_states))),
    )
    rows = row_ids(chunk, entry, spec)
    return MovedRows(
        kind=kind,
        rows=rows,
        parts={name: _as_bytes(sections[name], len(rows)) for name in kind.arrays(spec)},
    )


def _as_bytes(section: Section, rows: int) -> Tensor:
    flat = Section(section.name, "U8", (rows, section.nbytes // rows), section.data)
    return section_tensor(flat)


class ChunkBuilder:
    """Collects the rows of one table and hands out chunks of them.

    Which chunks come out, and their bytes, follow from what is added in which order.

    Args:
        manifest: of the checkpoint that the chunks are for.
        attempt: under which they lie.
        table: index into its tables.
        emit: takes each chunk when it is complete.
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
        self._waiting: dict[RowKind, _Waiting] = {}
        self._numbers: dict[int, int] = {}

    def add(self, moved: MovedRows, first: int, stop: int, positions: Tensor | None) -> None:
        """Take rows of a chunk.

        Args:
            moved: the chunk.
            first, stop: take none but rows at these positions of it.
            positions: which of those, int64 [m], ascending, counted from `first`; None: all.
        """
        if positions is not None:
            positions = positions + first
        total = stop - first if positions is None else positions.numel()
        waiting = self._waiting.get(moved.kind)
        if waiting is None:
            waiting = self._waiting[moved.kind] = _Waiting(moved.kind, self._spec)
        done = 0
        while done < total:
            count = min(total - done, waiting.room)
            if positions is None:
                waiting.append_range(moved, first + done, count)
            else:
                waiting.append(moved, positions[done : done + count])
            done += count
            if not waiting.room:
                self._build(waiting)
        while sum(other.bytes for other in self._waiting.values()) > BUFFERED_BYTES:
            self._build(max(self._waiting.values(), key=lambda other: other.bytes))

    def finish(self) -> None:
        """Hand out what is left."""
        for waiting in self._waiting.values():
            if waiting.rows:
                self._build(waiting)
        self._waiting.clear()

    def _build(self, waiting: _Waiting) -> None:
        kind, spec, manifest = waiting.kind, self._spec, self._manifest
        ids, parts = waiting.take()
        coded = row_set.encode(torch.from_numpy(ids))
        arrays = kind.arrays(spec)
        sections = [
            Section(name, arrays[name][0], (ids.size, *arrays[name][1]), part)
            for name, part in parts.items()
        ]
        if coded.payload is not None:
            sections.append(Section("row_set", "U8", (len(coded.payload),), coded.payload))
        # Wider items first: then each array is aligned, and a reader need not copy it.
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


class _Waiting:
    """Rows of one kind, until they fill a chunk."""

    def __init__(self, kind: RowKind, spec: TableSpec) -> None:
        self.kind = kind
        self.rows = 0
        widths = {name: array_bytes(*part) for name, part in kind.arrays(spec).items()}
        self._row_bytes = sum(widths.values()) + _ID_BYTES
        self._most = max(1, min(CHUNK_BYTES // self._row_bytes, spec.rows))
        # Memory that nothing is written to takes no room.
        self._ids = torch.empty(self._most, dtype=torch.int64)
        self._parts = {
            name: torch.empty(self._most, width, dtype=torch.uint8)
            for name, width in widths.items()
        }

    @property
    def room(self) -> int:
        return self._most - self.rows

    @property
    def bytes(self) -> int:
        return self.rows * self._row_bytes

    def append_range(self, moved: MovedRows, first: int, count: int) -> None:
        at = slice(self.rows, self.rows + count)
        rows = moved.rows[first : first + count]
        self._ids[at] = torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
        for name, part in self._parts.items():
            part[at] = moved.parts[name][first : first + count]
        self.rows += count

    def append(self, moved: MovedRows, positions: Tensor) -> None:
        at = slice(self.rows, self.rows + positions.numel())
        rows = moved.rows
        self._ids[at] = positions + rows.start if isinstance(rows, range) else rows[positions]
        for name, part in self._parts.items():
            row_gather.gather(moved.parts[name], positions, part[at])
        self.rows += positions.numel()

    def take(self) -> tuple[_Ids, dict[str, _Bytes]]:
        """Ids, ascending, and parts; views that the next `append` overwrites."""
        ids = self._ids[: self.rows]
        parts = {name: part[: self.rows] for name, part in self._parts.items()}
        if bool((ids[1:] < ids[:-1]).any()):
            order = ids.argsort()
            ids = ids[order]
            parts = {name: part[order] for name, part in parts.items()}
        self.rows = 0
        return ids.numpy(), {name: part.reshape(-1).numpy() for name, part in parts.items()}
