"""One consistent cut of tables, row states and state tree, copied into a slot: the stall."""

from __future__ import annotations

import ctypes
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recpoint.format.dtypes import Dtype, array_bytes, dtype_name, item_bytes, torch_dtype
from recpoint.format.job import QuantizerName, StagedTable
from recpoint.format.manifest import TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.kernels import dirty_bitmap, dirty_rows, row_gather
from recpoint.trainer_plugin.device_drain import DeviceDrain
from recpoint.trainer_plugin.policy import Link
from recpoint.trainer_plugin.slot import ALIGNMENT_BYTES, Slot, array_view

__all__ = [
    "MarkedRows",
    "Placed",
    "Snapshot",
    "TablePart",
    "fill",
    "full_bytes",
    "new_attempt",
    "now_ms",
    "place",
]


#: Up to this size one thread copies.
_SMALL_BYTES = 4 << 20


class MarkedRows:
    """How many rows of each table are marked, and the way to copy those on the CPU together.

    Args:
        bitmaps: of each table, on any device; None: all its rows.
        rows: rows of each table.

    Attributes:
        counts: marked rows of each table.
    """

    def __init__(self, bitmaps: Sequence[Tensor | None], rows: Sequence[int]) -> None:
        here = {i: bitmap for i, bitmap in enumerate(bitmaps) if bitmap is not None}
        on_device = {i: here.pop(i) for i in list(here) if not here[i].is_cpu}
        self._on_cpu = tuple(here)
        self._tally = dirty_rows.count(tuple(here.values()), rows=[rows[i] for i in here])
        self.counts = list(rows)
        for i, bitmap in on_device.items():
            self.counts[i] = dirty_bitmap.count(bitmap)
        for i, count in zip(here, self._tally.counts, strict=True):
            self.counts[i] = count

    def copy(self, destinations: Mapping[int, dirty_rows.Destination]) -> None:
        """Copy the rows of tables on the CPU; of those that have a destination."""
        self._tally.copy([destinations.get(i) for i in self._on_cpu])


@dataclass(frozen=True, kw_only=True, eq=False)
class TablePart:
    """What one snapshot holds of one table.

    Attributes:
        values: the live weight [rows, dim].
        row_states: live row states, in the order of `spec.row_states`.
        bitmap: the rows to store, on the weight's device; None: all rows.
        row_count: how many that are.
        bits: how they are to be stored.
        quantizer: how they are to be quantized, if they are.
        state_bits: 16: element-wise row states are to be rounded.
    """

    spec: TableSpec
    values: Tensor
    row_states: tuple[Tensor, ...]
    bitmap: Tensor | None
    row_count: int
    bits: int
    quantizer: QuantizerName
    state_bits: Literal[16] | None

    @property
    def staged(self) -> StagedTable:
        """The table as the job describes it."""
        return StagedTable(
            spec=self.spec,
            row_count=self.row_count,
            all_rows=self.bitmap is None,
            bits=self.bits,
            quantizer=self.quantizer,
            state_bits=self.state_bits,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed:
    """An array's place in the slot: a job's segment without its digest."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    def view(self, data: Tensor) -> Tensor:
        """The array in the slot's bytes; no copy."""
        return array_view(data, self.offset, torch_dtype(self.dtype), self.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A cut that lies in its slot, or is on its way there from a device."""

    ref: CheckpointRef
    link: Link
    tables: tuple[StagedTable, ...]
    slot: Slot
    placed: tuple[Placed, ...]
    slot_bytes: int
    device: DeviceDrain
    snapshot_ms: int
    stall_us: int
    full_bytes: int
    interval_batches: int


def new_attempt() -> str:
    """A checkpoint's identity; from the system, so that no generator of the training moves."""
    return secrets.token_hex(16)


def full_bytes(specs: Sequence[TableSpec], tree: bytes, tensors: Sequence[Tensor]) -> int:
    """Bytes of a full, exact checkpoint."""
    total = len(tree) + sum(tensor.nbytes for tensor in tensors)
    for spec in specs:
        row = spec.dim * item_bytes(spec.dtype)
        row += sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
        total += spec.rows * row
    return total


def place(
    parts: Sequence[TablePart], tree: bytes, tensors: Sequence[Tensor]
) -> tuple[tuple[Placed, ...], int]:
    """Where each array goes, and how many bytes that takes (format §7, segments)."""
    placed: list[Placed] = []
    end = 0

    def add(name: str, dtype: Dtype, shape: tuple[int, ...]) -> None:
        nonlocal end
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        size = array_bytes(dtype, shape)
        placed.append(Placed(name=name, dtype=dtype, shape=shape, offset=offset, size_bytes=size))
        end = offset + size

    for index, part in enumerate(parts):
        rows = part.row_count
        if rows == 0:
            continue
        if part.bitmap is not None:
            add(f"t{index}.ids", "I64", (rows,))
        add(f"t{index}.values", part.spec.dtype, (rows, part.spec.dim))
        for number, state in enumerate(part.spec.row_states):
            add(f"t{index}.state.{number}", state.dtype, (rows, *state.shape))
    add("tree", "U8", (len(tree),))
    for number, tensor in enumerate(tensors):
        add(f"tensor.{number}", dtype_name(tensor.dtype), tuple(tensor.shape))
    return tuple(placed), end


def fill(
    placed: Sequence[Placed],
    data: Tensor,
    parts: Sequence[TablePart],
    marked: MarkedRows,
    tree: bytes,
    tensors: Sequence[Tensor],
) -> DeviceDrain:
    """Copy everything to its place. On return training may go on.

    Args:
        placed: as `place` returned it for the same parts, tree and tensors.
        data: the slot's bytes, reserved.
        marked: the parts' dirty rows, counted.

    Returns:
        What is still on a device and has to be drained.
    """
    by_name = {spot.name: spot for spot in placed}
    device = DeviceDrain()
    together: dict[int, dirty_rows.Destination] = {}
    with torch.no_grad():
        for index, part in enumerate(parts):
            if part.row_count == 0:
                continue
            arrays = [(part.values.detach(), by_name[f"t{index}.values"])]
            for number, state in enumerate(part.row_states):
                arrays.append((state.detach(), by_name[f"t{index}.state.{number}"]))
            if part.bitmap is None:
                for source, spot in arrays:
                    if source.is_cuda:
                        device.gather(source, None, spot.view(data))
                    else:
                        _copy(source, spot, data)
                continue
            ids = by_name[f"t{index}.ids"].view(data)
            outs = tuple((source, spot.view(data)) for source, spot in arrays)
            if part.bitmap.is_cpu and all(source.is_cpu for source, _ in outs):
                together[index] = dirty_rows.Destination(ids, outs)
            else:
                _marked_rows(part.bitmap, part.spec.rows, ids, outs, device)
        marked.copy(together)
        if tree:
            ctypes.memmove(data.data_ptr() + by_name["tree"].offset, tree, len(tree))
        for number, tensor in enumerate(tensors):
            _copy(tensor, by_name[f"tensor.{number}"], data)
    device.release_training()
    return device


def _marked_rows(
    bitmap: Tensor,
    rows: int,
    ids_out: Tensor,
    arrays: Sequence[tuple[Tensor, Tensor]],
    device: DeviceDrain,
) -> None:
    """Rows of a table that is on a device, or has row states on one."""
    ids = dirty_bitmap.collect(bitmap, rows=rows)
    ids_out.copy_(ids)
    for source, out in arrays:
        if source.is_cuda:
            device.gather(source, ids.to(source.device), out)
        else:
            row_gather.gather(source, ids.to(source.device), out)


def _copy(source: Tensor, place: Placed, data: Tensor) -> None:
    plain = source.is_cpu and source.is_contiguous() and not source.is_neg()
    if not plain or source.nbytes != place.size_bytes or place.size_bytes > _SMALL_BYTES:
        place.view(data).copy_(source)
    elif place.size_bytes:
        # No thread is woken and no view made for what is usually one of many small tensors. Safe:
        # `data` is the slot's memory, of which `place` is a part, and as long as the source's.
        ctypes.memmove(data.data_ptr() + place.offset, source.data_ptr(), place.size_bytes)


def now_ms() -> int:
    """Time for people, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
