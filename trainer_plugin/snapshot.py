"""One consistent cut of tables, row states and state tree, copied into a slot: the stall."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from recpoint.format.dtypes import Dtype, array_bytes, dtype_name, item_bytes, torch_dtype
from recpoint.format.history import History
from recpoint.format.job import QuantizerName, StagedTable
from recpoint.format.manifest import ChosenMethod, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.format.state_values import booleans
from recpoint.kernels import dirty_bitmap, dirty_rows, row_gather
from recpoint.trainer_plugin.device_drain import DeviceDrain
from recpoint.trainer_plugin.policy import Link, PolicyName
from recpoint.trainer_plugin.sample import Sample, StagedRows
from recpoint.trainer_plugin.slot import ALIGNMENT_BYTES, Slot, array_view
from recpoint.trainer_plugin.table_codes import Codes

__all__ = [
    "SMALL_BYTES",
    "MarkedRows",
    "Placed",
    "Snapshot",
    "TablePart",
    "copy_state",
    "copy_tables",
    "full_bytes",
    "new_attempt",
    "place_sample",
    "place_state",
    "place_tables",
]


#: Up to this size one thread copies.
SMALL_BYTES = 4 << 20


class MarkedRows:
    """Which rows of each table are marked, and the way to copy those on the CPU together.

    Args:
        bitmaps: of each table, on any device; None: all its rows.
        rows: rows of each table.

    Attributes:
        counts: marked rows of each table.
        ids: those of tables on a device, int64, ascending, there; others are found as they are
            copied.
    """

    def __init__(self, bitmaps: Sequence[Tensor | None], rows: Sequence[int]) -> None:
        here = {i: bitmap for i, bitmap in enumerate(bitmaps) if bitmap is not None}
        on_device = {i: here.pop(i) for i in list(here) if not here[i].is_cpu}
        self._on_cpu = tuple(here)
        self._tally = dirty_rows.count(tuple(here.values()), rows=[rows[i] for i in here])
        self.counts = list(rows)
        self.ids: dict[int, Tensor] = {}
        for device in {bitmap.device for bitmap in on_device.values()}:
            there = {i: bitmap for i, bitmap in on_device.items() if bitmap.device == device}
            # One wait for each device, however many tables it has.
            found = dirty_bitmap.collect_many([*there.values()], rows=[rows[i] for i in there])
            self.ids.update(zip(there, found, strict=True))
        for i, ids in self.ids.items():
            self.counts[i] = ids.numel()
        for i, count in zip(here, self._tally.counts, strict=True):
            self.counts[i] = count

    def copy(
        self, destinations: Mapping[int, dirty_rows.Destination], meanwhile: Callable[[], None]
    ) -> None:
        """Copy the rows of tables on the CPU; of those that have a destination.

        Args:
            meanwhile: called once, while other threads copy where there are any.
        """
        wanted = [destinations.get(i) for i in self._on_cpu]
        sources = [source for to in destinations.values() for source, _ in to.arrays]
        before = [0 if source.is_inference() else source._version for source in sources]
        self._tally.copy(wanted, meanwhile=meanwhile)
        if before != [0 if source.is_inference() else source._version for source in sources]:
            # A `state_dict` may lend a table other values: the state is what it left there.
            self._tally.copy(wanted)


@dataclass(frozen=True, kw_only=True, eq=False)
class TablePart:
    """What one snapshot holds of one table.

    Attributes:
        held: which rows of the table this rank stores; positions count from its start.
        values: the live weight [len(held), dim].
        row_states: live row states, in the order of `spec.row_states`.
        bitmap: the rows to store, on the weight's device; None: all rows.
        ids: the same, int64 [row_count], ascending, on the weight's device; None: all rows, or not
            looked up before they are copied.
        row_count: how many that are.
        bits: how they are to be stored.
        quantizer: how they are to be quantized, if they are.
        state_bits: 16: element-wise row states are to be rounded.
        method: with what; None: the agent chooses, if they are.
        codes: the rows, quantized already; None: `values` are staged.
    """

    spec: TableSpec
    held: range
    values: Tensor
    row_states: tuple[Tensor, ...]
    bitmap: Tensor | None
    row_count: int
    bits: int
    quantizer: QuantizerName
    state_bits: Literal[16] | None
    ids: Tensor | None = None
    method: ChosenMethod | None = None
    codes: Codes | None = None

    @property
    def staged(self) -> StagedTable:
        """The table as the job describes it."""
        return StagedTable(
            spec=self.spec,
            first_row=self.held.start,
            shard_rows=len(self.held),
            row_count=self.row_count,
            all_rows=self.bitmap is None and len(self.held) > 0,
            bits=self.bits,
            quantizer=self.quantizer,
            state_bits=self.state_bits,
            method=self.method,
            codes=self.codes is not None,
        )


class Placed(NamedTuple):
    """An array's place in the slot: a job's segment without its digest."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size_bytes

    def view(self, data: Tensor) -> Tensor:
        """The array in the slot's bytes; no copy."""
        return array_view(data, self.offset, torch_dtype(self.dtype), self.shape)

    def room(self, data: Tensor) -> dirty_rows.Room:
        """The same for a kernel.

        Raises:
            ValueError: the slot ends before.
        """
        if self.end > data.numel():
            raise ValueError(f"{self.name}: room for {data.numel()} bytes, expected {self.end}")
        return dirty_rows.Room(data.data_ptr() + self.offset, self.size_bytes, data)


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A cut that lies in its slot, or is on its way there from a device.

    `quantized_on`: types of the devices on which rows were quantized.
    """

    ref: CheckpointRef
    link: Link
    policy: PolicyName
    tables: tuple[StagedTable, ...]
    slot: Slot
    placed: tuple[Placed, ...]
    slot_bytes: int
    device: DeviceDrain
    sample: Sample
    quantized_on: frozenset[str]
    snapshot_ms: int
    stall_us: int
    full_bytes: int
    interval_batches: int
    history: History


def new_attempt() -> str:
    """A checkpoint's identity; from the system, so that no generator of the training moves."""
    return os.urandom(16).hex()


def full_bytes(parts: Sequence[TablePart], tree: bytes, tensors: Sequence[Tensor]) -> int:
    """Bytes of a full, exact checkpoint; of this rank's part of it."""
    total = len(tree) + sum(tensor.nbytes for tensor in tensors)
    for part in parts:
        spec = part.spec
        row = spec.dim * item_bytes(spec.dtype)
        row += sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
        total += len(part.held) * row
    return total


def place_tables(parts: Sequence[TablePart]) -> tuple[tuple[Placed, ...], int]:
    """Where the arrays of tables go, and how many bytes that takes (format §7, segments)."""
    placed: list[Placed] = []
    end = 0

    def add(name: str, dtype: Dtype, shape: tuple[int, ...]) -> None:
        nonlocal end
        placed.append(_placed(name, dtype, shape, end))
        end = placed[-1].end

    for index, part in enumerate(parts):
        rows = part.row_count
        if rows == 0:
            continue
        if part.bitmap is not None:
            add(f"t{index}.ids", "I64", (rows,))
        if part.codes is None:
            add(f"t{index}.values", part.spec.dtype, (rows, part.spec.dim))
        else:
            for name, dtype, array in part.codes.arrays():
                add(f"t{index}.{name}", dtype or part.spec.dtype, tuple(array.shape))
        for number, state in enumerate(part.spec.row_states):
            add(f"t{index}.state.{number}", state.dtype, (rows, *state.shape))
    return tuple(placed), end


def place_state(tree: bytes, tensors: Sequence[Tensor], end: int) -> tuple[tuple[Placed, ...], int]:
    """Where the state goes, behind tables that end at `end`, and where it ends itself."""
    placed = [_placed("tree", "U8", (len(tree),), end)]
    for number, tensor in enumerate(tensors):
        name, dtype = f"tensor.{number}", dtype_name(tensor.dtype)
        placed.append(_placed(name, dtype, tuple(tensor.shape), placed[-1].end))
    return tuple(placed), placed[-1].end


def copy_tables(
    placed: Sequence[Placed],
    data: Tensor,
    parts: Sequence[TablePart],
    marked: MarkedRows,
    meanwhile: Callable[[DeviceDrain], None],
) -> DeviceDrain:
    """Copy the tables to their places.

    Args:
        placed: as `place_tables` returned it for the same parts.
        data: the slot's bytes, reserved.
        marked: the parts' dirty rows.
        meanwhile: called once, while other threads copy where there are any.

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
            arrays = []
            if part.codes is None:
                arrays.append((part.values, by_name[f"t{index}.values"]))
            else:
                for name, _, array in part.codes.arrays():
                    _codes(array, by_name[f"t{index}.{name}"], data, device)
            for number, state in enumerate(part.row_states):
                arrays.append((state, by_name[f"t{index}.state.{number}"]))
            if part.bitmap is None:
                for source, spot in arrays:
                    if source.is_cuda:
                        device.gather(source.detach(), None, spot.view(data))
                    else:
                        _copy(source.detach(), spot, data)
                continue
            ids_spot = by_name[f"t{index}.ids"]
            on_cpu = part.bitmap.is_cpu and all(source.is_cpu for source, _ in arrays)
            if part.ids is None and on_cpu:
                rooms = tuple((source, _room_for(source, spot, data)) for source, spot in arrays)
                together[index] = dirty_rows.Destination(ids_spot.room(data), rooms)
                continue
            ids = part.ids
            if ids is None:
                ids = dirty_bitmap.collect(part.bitmap, rows=len(part.held))
            outs = tuple((source.detach(), spot.view(data)) for source, spot in arrays)
            _rows(ids, ids_spot.view(data), outs, device)
    marked.copy(together, lambda: meanwhile(device))
    return device


def copy_state(
    placed: Sequence[Placed], data: Tensor, tree: bytes, tensors: Sequence[Tensor]
) -> None:
    """Copy the state to its places, which `place_state` has chosen for it.

    Args:
        data: the slot's bytes, reserved.
    """
    spot, *others = placed
    ctypes.memmove(data.data_ptr() + spot.offset, tree, len(tree))
    with torch.no_grad():
        for tensor, spot in zip(tensors, others, strict=True):
            _copy(tensor, spot, data)


def place_sample(snapshot: Snapshot) -> tuple[tuple[Placed, ...], int]:
    """Write the sample into the slot, behind the snapshot; where it is, and the end of it all.

    For the background thread: everything on a device has been drained. Booleans are settled first:
    the sample, its digests and the chunk are of the same bytes.
    """
    data = snapshot.slot.data
    views = {spot.name: spot.view(data) for spot in snapshot.placed}
    for spot in snapshot.placed:
        if spot.dtype == "BOOL":
            views[spot.name].copy_(booleans(views[spot.name]))
    staged: list[StagedRows | None] = []
    for index, table in enumerate(snapshot.tables):
        names = [f"t{index}.values"]
        names += [f"t{index}.state.{number}" for number in range(len(table.spec.row_states))]
        if table.row_count == 0 or table.codes:  # no values to draw from and to digest
            staged.append(None)
            continue
        arrays = tuple(views[name] for name in names)
        staged.append(StagedRows(ids=views.get(f"t{index}.ids"), arrays=arrays))
    placed: list[Placed] = []
    end = snapshot.slot_bytes
    for name, array in snapshot.sample.parts(staged):
        array = booleans(array) if array.dtype == torch.bool else array
        spot = _placed(name, dtype_name(array.dtype), tuple(array.shape), end)
        spot.view(data).copy_(array)
        placed.append(spot)
        end = spot.end
    return tuple(placed), end


def _placed(name: str, dtype: Dtype, shape: tuple[int, ...], end: int) -> Placed:
    """The next place for an array behind `end`."""
    offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    size = array_bytes(dtype, shape)
    return Placed(name=name, dtype=dtype, shape=shape, offset=offset, size_bytes=size)


def _rows(
    ids: Tensor, ids_out: Tensor, arrays: Sequence[tuple[Tensor, Tensor]], device: DeviceDrain
) -> None:
    """Rows of arrays that are on a device, or of which there are no values to copy."""
    if ids.is_cuda:
        device.take(ids, ids_out)
    else:
        ids_out.copy_(ids)
    for source, out in arrays:
        if source.is_cuda:
            device.gather(source, ids.to(source.device), out)
        else:
            row_gather.gather(source, ids.to(source.device), out)


def _room_for(source: Tensor, spot: Placed, data: Tensor) -> dirty_rows.Room:
    """What a kernel is told of `spot`: bytes alone, which would hide that the dtype is another."""
    if source.dtype is not torch_dtype(spot.dtype):
        raise ValueError(f"{spot.name}: dtype {source.dtype}, expected {spot.dtype}")
    return spot.room(data)


def _codes(array: Tensor, place: Placed, data: Tensor, device: DeviceDrain) -> None:
    if array.is_cuda:
        device.take(array, place.view(data))
    else:
        _copy(array, place, data)


def _copy(source: Tensor, place: Placed, data: Tensor) -> None:
    plain = source.is_cpu and source.is_contiguous() and not source.is_neg()
    if not plain or source.nbytes != place.size_bytes or place.size_bytes > SMALL_BYTES:
        place.view(data).copy_(source)
    elif place.size_bytes:
        # No thread is woken and no view made for what is usually one of many small tensors. Safe:
        # `data` is the slot's memory, of which `place` is a part, and as long as the source's.
        ctypes.memmove(data.data_ptr() + place.offset, source.data_ptr(), place.size_bytes)
