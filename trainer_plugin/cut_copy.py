"""Copies a planned cut into its slot: rows, row states, and what comes behind the tables."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.format.dtypes import torch_dtype
from recpoint.format.job import StagedTable
from recpoint.kernels import dirty_bitmap, dirty_rows, row_gather
from recpoint.trainer_plugin.cut_plan import (
    MarkedRows,
    Placed,
    TablePart,
    full_bytes,
    place_state,
)
from recpoint.trainer_plugin.device_drain import DeviceDrain
from recpoint.trainer_plugin.sample import Sample, live_rows
from recpoint.trainer_plugin.slot import Slot

__all__ = ["BehindTables", "CopiedCut", "behind_tables", "copy_state", "copy_tables"]

#: Up to this size one thread copies.
_SMALL_BYTES = 4 << 20


class BehindTables(NamedTuple):
    """What a slot holds besides the tables, and what the job says of both.

    Attributes:
        tree: the state tree.
        tensors: those that it numbers, the live ones.
        placed: where both go.
        end: of the state, behind which the sample comes.
        sample: sampled rows, copied, but not into the slot.
        tables: the tables as the job describes them.
        full_bytes: of a full, exact checkpoint.
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
        """Where the sample, which is written later, will end."""
        return self.end + self.sample.size_bytes

    @property
    def is_small(self) -> bool:
        """Whether one thread is to write it."""
        return sum(tensor.nbytes for tensor in self.tensors) <= _SMALL_BYTES

    def write(self, slot: Slot) -> None:
        """Copy it to its places, but for the sample; raises as `Slot.grow` does."""
        slot.grow(self.slot_bytes)
        copy_state(self.placed, slot.data, self.tree, self.tensors)


def behind_tables(
    parts: Sequence[TablePart],
    end: int,
    tree: bytes,
    tensors: list[Tensor],
    sample: Sample,
    device: DeviceDrain,
) -> BehindTables:
    """What comes behind tables that end at `end`; copies the sampled rows.

    Args:
        parts: the tables.
        end: in the slot, in bytes.
        tree: as `state_tree.flatten` returned it, with its tensors.
        sample: drawn, and not copied yet.
        device: takes charge of sampled rows that are on one.
    """
    placed, state_end = place_state(tree, tensors, end)
    with torch.no_grad():
        sample.copy([live_rows(part.values, part.row_states) for part in parts], device)
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
    """A cut that lies in its slot, or is on its way there from a device.

    Attributes:
        behind: what lies behind the tables.
        device: has to be drained before the slot can be read.
    """

    behind: BehindTables
    device: DeviceDrain


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
    if not plain or source.nbytes != place.size_bytes or place.size_bytes > _SMALL_BYTES:
        place.view(data).copy_(source)
    elif place.size_bytes:
        # No thread is woken and no view made for what is usually one of many small tensors. Safe:
        # `data` is the slot's memory, of which `place` is a part, and as long as the source's.
        ctypes.memmove(data.data_ptr() + place.offset, source.data_ptr(), place.size_bytes)
