"""Copies a planned cut into its slot: rows, row states, the state tree, a sample of rows."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.format.chunk import sample_arrays
from recpoint.format.dtypes import array_bytes, item_bytes, torch_dtype
from recpoint.format.job import StagedTable
from recpoint.format.manifest import CopiedAhead, TableSpec
from recpoint.kernels import dirty_bitmap, dirty_rows, row_digest, row_gather
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.plan import (
    MarkedRows,
    Placed,
    TablePart,
    full_bytes,
    place_state,
)
from recpoint.trainer_plugin.snapshot.settle import Move
from recpoint.trainer_plugin.snapshot.staging import ALIGNMENT_BYTES, Slot

__all__ = [
    "BehindTables",
    "CopiedCut",
    "Sample",
    "Sampler",
    "StagedRows",
    "behind_tables",
    "copy_tables",
    "spread_rows",
]


# The sample: a few rows of each table, exactly as they are at a cut. The checkpoint is compared
# with it later.
#
# Some rows are drawn from the whole table, whichever checkpoint stored them, so they also show a
# change that nobody marked. The stall copies only these, at most 64 for each table. Other rows are
# drawn from those that the snapshot stages. The background thread draws them, and digests all
# staged rows (format §3.6).


#: The most rows of a table from each of the two sources, and the most bytes that they take: a
#: sample must be small compared with any increment.
_ROWS: Final = 64
_TABLE_BYTES: Final = 16 << 10
#: The most bytes over all tables, if there are many.
_TOTAL_BYTES: Final = 16 << 20

_Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedRows:
    """The rows of one table that a snapshot stages, as arrays in its slot.

    Attributes:
        ids: int64 [n], ascending; None: all rows.
        arrays: values and row states, [n, …] each.
    """

    ids: Tensor | None
    arrays: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """The sampled rows of one snapshot.

    Attributes:
        seed: derived from the attempt's name, so that every process draws the same rows.
        specs: for each table, its spec.
        first_rows: for each table, the position in the whole table of the first row held here.
            Stored positions count from the start of the whole table, all others from this row.
        ids: for each table, int64 [n], ascending: rows drawn from all rows held here.
        size_bytes: the most bytes that the sample takes in the slot.
        arrays: for each table, values and row states of these rows; filled by `copy`.
    """

    seed: int
    specs: tuple[TableSpec, ...]
    first_rows: tuple[int, ...]
    ids: tuple[Tensor, ...]
    size_bytes: int
    arrays: list[tuple[Tensor, ...]] = field(default_factory=list)

    def copy(
        self,
        sources: Sequence[Sequence[Tensor]],
        device: DeviceDrain,
        in_cache: Sequence[str | None] | None = None,
    ) -> None:
        """Copy the rows; those of a GPU or a cache arrive when `device` is drained.

        Args:
            sources: for each table, the live values and row states.
            device: brings rows to the host.
            in_cache: for each table, its name in its cache, which has the rows; None: no table is
                in a cache.
        """
        there: dict[torch.device, tuple[Tensor, ...]] = {}
        for index, (ids, arrays) in enumerate(zip(self.ids, sources, strict=True)):
            found = []
            cached = None if in_cache is None else in_cache[index]
            if cached is not None:
                found = [
                    torch.empty((len(ids), *one.shape[1:]), dtype=one.dtype, device="cpu")
                    for one in arrays
                ]
                device.fetch(cached, ids, found)
                self.arrays.append(tuple(found))
                continue
            for source in arrays:
                if source.is_cpu:
                    found.append(source.index_select(0, ids))
                    continue
                if source.device not in there:
                    # One transfer of ids serves all tables.
                    moved = torch.cat(self.ids).to(source.device)
                    there[source.device] = moved.split([len(some) for some in self.ids])
                out = torch.empty((len(ids), *source.shape[1:]), dtype=source.dtype, device="cpu")
                device.gather(source, there[source.device][index], out)
                found.append(out)
            self.arrays.append(tuple(found))

    def parts(self, staged: Sequence[StagedRows | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield name and content of each array of format §3.6; the device must be drained.

        Args:
            staged: for each table, the rows that the snapshot stages; None: no row.
        """
        for index, (spec, rows) in enumerate(zip(self.specs, staged, strict=True)):
            ids, arrays = self.ids[index], self.arrays[index]
            if rows is not None and rows.ids is not None:
                strata = _strata(len(rows.ids), _rows_of(spec, spec.rows, len(self.specs)))
                at = torch.from_numpy(_draw(*strata, self.seed + 1 + index))
                # A row drawn from both sources is the same in both, so the first copy is kept.
                both, first = np.unique(torch.cat([ids, rows.ids[at]]).numpy(), return_index=True)
                kept = torch.from_numpy(first)
                ids = torch.from_numpy(both)
                pairs = zip(arrays, rows.arrays, strict=True)
                arrays = tuple(torch.cat([live, own[at]])[kept] for live, own in pairs)
            if not len(ids):
                continue  # this rank holds no row of the table
            first_row = self.first_rows[index]
            named = zip(sample_arrays(spec, len(ids)), (ids + first_row, *arrays), strict=False)
            for name, array in named:
                yield f"sample.{index}.{name}", array
            if rows is not None:
                yield f"sample.{index}.digests", _digests(rows, first_row)


class Sampler:
    """Draws samples; computes what depends only on the tables once."""

    def __init__(self) -> None:
        self._specs: tuple[TableSpec, ...] | None = None
        self._starts = self._widths = np.empty(0, np.int64)
        self._counts: list[int] = []
        self._size_bytes = 0

    def draw(self, specs: Sequence[TableSpec], held: Sequence[range], attempt: str) -> Sample:
        """Draw rows of each table for the snapshot `attempt`.

        Args:
            specs: specs of all tables.
            held: for each table, the rows held here.
            attempt: name of the attempt, hexadecimal.
        """
        self._follow(tuple(specs), held)
        seed = int(attempt, 16)
        drawn = _draw(self._starts, self._widths, seed)
        return Sample(
            seed=seed,
            specs=tuple(specs),
            first_rows=tuple(rows.start for rows in held),
            ids=torch.from_numpy(drawn).split(self._counts),
            size_bytes=self._size_bytes,
        )

    def size_bytes(self, specs: Sequence[TableSpec], held: Sequence[range]) -> int:
        """Return the most bytes that a sample takes in a slot; arguments as for `draw`."""
        self._follow(tuple(specs), held)
        return self._size_bytes

    def _follow(self, specs: tuple[TableSpec, ...], held: Sequence[range]) -> None:
        known = self._specs
        # Compared by identity: a cutter keeps its specs, and comparing field by field takes long.
        if known and len(known) == len(specs) and all(map(operator.is_, known, specs)):
            return
        tables = [(spec, len(rows)) for spec, rows in zip(specs, held, strict=True)]
        strata = [_strata(rows, _rows_of(spec, rows, len(specs))) for spec, rows in tables]
        self._starts = np.concatenate([starts for starts, _ in strata] or [self._starts[:0]])
        self._widths = np.concatenate([widths for _, widths in strata] or [self._widths[:0]])
        self._counts = [len(starts) for starts, _ in strata]
        self._size_bytes = sum(_size_bytes(spec, rows, len(specs)) for spec, rows in tables)
        self._specs = specs


def spread_rows(rows: int, count: int, seed: int) -> Tensor:
    """Draw `count` of the positions 0 … `rows` - 1, or all of them if there are fewer.

    The positions are divided into `count` parts of nearly the same size; one is drawn from each.

    Returns:
        int64 [n], ascending.
    """
    return torch.from_numpy(_draw(*_strata(rows, count), seed))


def live_rows(values: Tensor, row_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the arrays of a table as `Sample.copy` takes them."""
    return values.detach(), *(state.detach() for state in row_states)


def _row_bytes(spec: TableSpec) -> int:
    states = sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
    return spec.dim * item_bytes(spec.dtype) + states


def _rows_of(spec: TableSpec, rows: int, tables: int) -> int:
    """Return how many of `rows` rows of a table are drawn from one source."""
    budget = min(_TABLE_BYTES, _TOTAL_BYTES // tables)
    return min(rows, _ROWS, max(1, budget // _row_bytes(spec)))


def _size_bytes(spec: TableSpec, rows: int, tables: int) -> int:
    arrays = sample_arrays(spec, min(rows, 2 * _rows_of(spec, rows, tables)))
    return sum(array_bytes(*array) + ALIGNMENT_BYTES for array in arrays.values())


def _strata(rows: int, count: int) -> tuple[_Integers, _Integers]:
    """Return starts and widths of `count` parts of nearly the same size; at most one for each row.

    One row drawn from each part gives rows that ascend, have no duplicates and spread over all.
    """
    count = min(rows, count)
    edges = np.arange(count + 1) * rows // max(count, 1)
    return edges[:-1], np.diff(edges)


def _draw(starts: _Integers, widths: _Integers, seed: int) -> _Integers:
    """Draw a position of each part by a hash of its number.

    The hash is SplitMix64 (Steele et al., OOPSLA 2014). Training waits for this, and making a numpy
    generator would take five times as long. Widths are below 2^48, so the remainder favours no
    position by more than 2^-16 of its probability.
    """
    words = np.arange(1, len(starts) + 1, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(seed % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    words ^= words >> np.uint64(31)
    return starts + (words % widths.astype(np.uint64)).astype(np.int64)


def _digests(rows: StagedRows, first_row: int) -> Tensor:
    ids: Tensor | int = first_row if rows.ids is None else rows.ids + first_row
    arrays = (rows.arrays[0][:, :0].contiguous(), *rows.arrays)
    found = [row_digest.digest(array, ids) for array in arrays]
    return torch.from_numpy(np.array(found, np.uint64).view(np.int64))


# Copying a planned cut into its slot: rows, row states, and what comes behind the tables.


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
        """Copy the state to its places and reserve room for the sample; raises like `Slot.grow`."""
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
        sample.copy(
            [live_rows(part.values, part.row_states) for part in parts],
            device,
            [part.in_cache for part in parts],
        )
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


def copy_tables(
    placed: Sequence[Placed],
    data: Tensor,
    parts: Sequence[TablePart],
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
    part: TablePart,
    by_name: Mapping[str, Placed],
    data: Tensor,
    device: DeviceDrain,
    together: dict[int, dirty_rows.Destination],
) -> None:
    """Copy the ids of a cached table's rows now; the rows themselves come after the stall."""
    assert part.in_cache is not None
    names = [f"t{index}.values", *(f"t{index}.state.{n}" for n in range(len(part.row_states)))]
    outs = [by_name[name].view(data) for name in names]
    ids = None
    if part.bitmap is not None:
        spot = by_name[f"t{index}.ids"]
        together[index] = dirty_rows.Destination(spot.room(data), ())
        ids = spot.view(data)
    device.fetch(part.in_cache, ids, outs)


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
    spot, *others = placed
    ctypes.memmove(data.data_ptr() + spot.offset, tree, len(tree))
    with torch.no_grad():
        for tensor, spot in zip(tensors, others, strict=True):
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
