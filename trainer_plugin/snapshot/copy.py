"""Copies a planned cut into its slot: rows, row states, the state tree, a sample of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.staging.sample import Sample
from recpoint.catalog.staging.slot import Placed, Slot
from recpoint.format.dtypes import torch_dtype
from recpoint.format.job import StagedTable
from recpoint.format.manifest import CopiedAhead
from recpoint.kernels import dirty_bitmap, dirty_rows, row_gather
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.final_places import Move
from recpoint.trainer_plugin.snapshot.plan import (
    CutTable,
    MarkedRows,
    full_bytes,
    place_state,
)

__all__ = [
    "BehindTables",
    "CopiedCut",
    "behind_tables",
    "copied_bytes",
    "copy_sample",
    "copy_tables",
    "parts_beside",
]


#: Up to this size, a single thread copies.
_SMALL_BYTES = 4 << 20


class BehindTables(NamedTuple):
    """The content of a slot behind the tables, and what the job says about the tables.

    Attributes:
        tree: the state tree.
        tensors: the live tensors that the tree numbers.
        placed: places of tree and tensors.
        end: first byte behind the state, where the sample starts.
        sample: sampled rows, copied to memory outside the slot.
        tables: the tables as the job describes them.
        full_bytes: bytes of this rank's part of a full, exact checkpoint.
    """

    tree: bytes
    tensors: list[Tensor]
    placed: tuple[Placed, ...]
    end: int
    sample: Sample
    tables: tuple[StagedTable, ...]
    full_bytes: int

    @property
    def slot_bytes(self) -> int:
        """First byte behind the sample, which is written later."""
        return self.end + self.sample.size_bytes

    @property
    def is_small(self) -> bool:
        """Whether the state is so small that one thread writes it."""
        return sum(tensor.nbytes for tensor in self.tensors) <= _SMALL_BYTES

    def write(self, slot: Slot) -> None:
        """Copy the state to its places and reserve room for the sample; raise like `Slot.grow`."""
        slot.grow(self.slot_bytes)
        copy_state(self.placed, slot.data, self.tree, self.tensors)


def behind_tables(
    parts: Sequence[CutTable],
    end: int,
    tree: bytes,
    tensors: list[Tensor],
    sample: Sample,
    device: DeviceDrain,
) -> BehindTables:
    """Place what comes behind tables that end at byte `end`, and copy the sampled rows.

    Args:
        parts: the parts of the tables that the snapshot holds.
        end: first byte behind the tables in the slot.
        tree: the state tree that `state_tree.flatten` returned.
        tensors: the tensors that it returned.
        sample: the sample, drawn but not copied yet.
        device: brings sampled rows from a GPU to the host.
    """
    placed, state_end = place_state(tree, tensors, end)
    with torch.no_grad():
        copy_sample(sample, parts, device)
    return BehindTables(
        tree=tree,
        tensors=tensors,
        placed=placed,
        end=state_end,
        sample=sample,
        tables=tuple(part.staged for part in parts),
        full_bytes=full_bytes(parts, tree, tensors),
    )


class CopiedCut(NamedTuple):
    """A cut that lies in its slot, or is on its way there from a GPU.

    Attributes:
        behind: the content of the slot behind the tables.
        device: brings rows from a GPU; must be drained before the slot is read.
        moves: bring the rows that were copied ahead to their places before the slot is read.
        copied_ahead: the rows that were copied before the stall and in it; None: none was before.
    """

    behind: BehindTables
    device: DeviceDrain
    moves: tuple[Move, ...] = ()
    copied_ahead: CopiedAhead | None = None


def parts_beside(parts: Sequence[CutTable], numbers: Collection[int]) -> list[CutTable]:
    """Return the parts as `copy_tables` takes them to copy no table of these numbers."""
    return [
        replace(part, row_count=0) if number in numbers else part
        for number, part in enumerate(parts)
    ]


def copied_bytes(parts: Sequence[CutTable]) -> int:
    """Return the bytes of the rows of parts that are staged as they are, with row states."""
    return sum(
        part.row_count * sum(array[:1].nbytes for array in (part.values, *part.row_states))
        for part in parts
    )


def live_rows(values: Tensor, row_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the arrays of a table as `Sample.copy` takes them."""
    return values.detach(), *(state.detach() for state in row_states)


def copy_sample(sample: Sample, parts: Sequence[CutTable], device: DeviceDrain) -> None:
    """Copy the rows of a sample that were drawn from all rows held here.

    Those of a GPU or a cache arrive when `device` is drained.
    """
    by_device: dict[torch.device, tuple[Tensor, ...]] = {}
    for index, (ids, part) in enumerate(zip(sample.ids, parts, strict=True)):
        arrays_out = []
        arrays = live_rows(part.values, part.row_states)
        if part.in_cache is not None:
            arrays_out = [
                torch.empty((len(ids), *array.shape[1:]), dtype=array.dtype, device="cpu")
                for array in part.cached_arrays
            ]
            device.fetch(part.in_cache, ids, arrays_out)
            states_here = (state.index_select(0, ids) for state in arrays[len(arrays_out) :])
            sample.arrays.append((*arrays_out, *states_here))
            continue
        for source in arrays:
            if source.is_cpu:
                arrays_out.append(source.index_select(0, ids))
                continue
            if source.device not in by_device:
                # One transfer of ids serves all tables.
                moved = torch.cat(sample.ids).to(source.device)
                by_device[source.device] = moved.split([len(ids) for ids in sample.ids])
            out = torch.empty((len(ids), *source.shape[1:]), dtype=source.dtype, device="cpu")
            device.gather(source, by_device[source.device][index], out)
            arrays_out.append(out)
        sample.arrays.append(tuple(arrays_out))


def copy_tables(
    placed: Sequence[Placed],
    data: Tensor,
    parts: Sequence[CutTable],
    marked: MarkedRows,
    device: DeviceDrain,
    meanwhile: Callable[[], None],
) -> None:
    """Copy the tables to their places.

    Args:
        placed: as `place_tables` returned it for the same parts.
        data: the slot's reserved bytes, uint8 [n].
        parts: the parts of the tables that the snapshot holds.
        marked: the parts' marked rows.
        device: brings rows from a GPU or a cache; must be drained before they are there.
        meanwhile: called once, while other threads copy, if there are other threads.
    """
    by_name = {spot.name: spot for spot in placed}
    together: dict[int, dirty_rows.Destination] = {}
    with torch.no_grad():
        for index, part in enumerate(parts):
            if part.row_count == 0:
                continue
            if part.in_cache is not None:
                _from_cache(index, part, by_name, data, device, together)
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
    marked.copy(together, meanwhile)


def _from_cache(
    index: int,
    part: CutTable,
    by_name: Mapping[str, Placed],
    data: Tensor,
    device: DeviceDrain,
    together: dict[int, dirty_rows.Destination],
) -> None:
    """Copy the ids of a cached table's rows now, and row states that are here.

    The rows themselves come after the stall.
    """
    assert part.in_cache is not None
    if part.at_servers:
        device.stage(part.in_cache, _ids_of(index, part, together))
        return
    names = [f"t{index}.values", *(f"t{index}.state.{n}" for n in range(len(part.row_states)))]
    cached_count = len(part.cached_arrays)
    states_here = [
        (state.detach(), by_name[name])
        for state, name in zip(
            part.row_states[cached_count - 1 :], names[cached_count:], strict=True
        )
    ]
    outs = [by_name[name].view(data) for name in names[:cached_count]]
    ids = None
    if part.bitmap is not None:
        spot = by_name[f"t{index}.ids"]
        rooms = tuple((state, _room_for(state, room, data)) for state, room in states_here)
        together[index] = dirty_rows.Destination(spot.room(data), rooms)
        ids = spot.view(data)
    else:
        for state, room in states_here:
            _copy(state, room, data)
    device.fetch(part.in_cache, ids, outs)


def _ids_of(
    index: int, part: CutTable, together: dict[int, dirty_rows.Destination]
) -> Tensor | None:
    """Return memory that the ids of a table's marked rows will be copied to; None: all rows."""
    if part.bitmap is None:
        return None
    if part.ids is not None:
        return part.ids.cpu()
    ids = torch.empty(part.row_count, dtype=torch.int64, device="cpu")
    room = dirty_rows.Room(ids.data_ptr(), ids.nbytes, ids)
    together[index] = dirty_rows.Destination(room, ())
    return ids


def copy_state(
    placed: Sequence[Placed], data: Tensor, tree: bytes, tensors: Sequence[Tensor]
) -> None:
    """Copy the state to the places that `place_state` chose for it.

    Args:
        placed: places of the tree and of the tensors.
        data: the slot's reserved bytes, uint8 [n].
        tree: the state tree.
        tensors: the tensors that the tree numbers.
    """
    spot, *spots = placed
    ctypes.memmove(data.data_ptr() + spot.offset, tree, len(tree))
    with torch.no_grad():
        for tensor, spot in zip(tensors, spots, strict=True):
            _copy(tensor, spot, data)


def _rows(
    ids: Tensor, ids_out: Tensor, arrays: Sequence[tuple[Tensor, Tensor]], device: DeviceDrain
) -> None:
    """Copy rows with known ids: arrays on a GPU, or beside codes that were placed already."""
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
    """Return `spot` as bytes for a kernel, after checking the dtype, which bytes do not show."""
    if source.dtype is not torch_dtype(spot.dtype):
        raise ValueError(f"{spot.name}: found dtype {source.dtype}, expected {spot.dtype}")
    return spot.room(data)


def _codes(array: Tensor, place: Placed, data: Tensor, device: DeviceDrain) -> None:
    if array.is_cuda:
        device.take(array, place.view(data))
    else:
        _copy(array, place, data)


def _copy(source: Tensor, place: Placed, data: Tensor) -> None:
    plain = source.is_cpu and source.is_contiguous() and not source.is_neg()
    if not plain or source.nbytes != place.size_bytes or place.size_bytes > _SMALL_BYTES:
        place.view(data).copy_(source)
    elif place.size_bytes:
        # This is usually one of many small tensors, so avoid waking threads and making views. Safe:
        # `data` is the slot's memory, `place` lies inside it, and has the length of the source.
        ctypes.memmove(data.data_ptr() + place.offset, source.data_ptr(), place.size_bytes)
