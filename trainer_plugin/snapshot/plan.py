"""Plans a cut: which rows of each table it holds, and where everything goes in the slot.

Reads marks and sizes, and writes nothing. `copy` copies what is planned, `seal` describes
what lies in the slot then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from recpoint.format.dtypes import Dtype, array_bytes, dtype_name, item_bytes, torch_dtype
from recpoint.format.history import History
from recpoint.format.job import QuantizerName, StagedTable
from recpoint.format.manifest import ChosenMethod, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.kernels import dirty_bitmap, dirty_rows
from recpoint.trainer_plugin.policy import Link, Tip
from recpoint.trainer_plugin.snapshot.codes import Codes
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.staging import ALIGNMENT_BYTES, array_view

__all__ = [
    "CutPlan",
    "CutRequest",
    "MarkedRows",
    "Placed",
    "TablePart",
    "full_bytes",
    "new_attempt",
    "place_behind",
    "place_state",
    "place_tables",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class CutRequest:
    """The checkpoint that a cut is to make.

    Attributes:
        step: batches done.
        generation: of this trainer.
        attempt: what it is called; with step and generation, what it becomes.
        link: as `Cutter.link` returned it, or a full.
        tables: as `Cutter.link` returned them, in the same stall.
        tip: of the chain, before it.
        interval_batches: since the checkpoint before.
        history: of the state.
    """

    step: int
    generation: int
    attempt: str
    link: Link
    tables: tuple[LiveTable, ...]
    tip: Tip | None
    interval_batches: int
    history: History

    @property
    def ref(self) -> CheckpointRef:
        """What it becomes."""
        return CheckpointRef(step=self.step, generation=self.generation, attempt=self.attempt)


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
class CutPlan:
    """What goes where in the slot.

    Attributes:
        parts: what the snapshot holds of each table.
        marked: the rows of `parts`, and the way to copy them.
        placed: where the arrays of the tables go.
        tables_end: where these end. State and sample come behind them (`place_state`), once it is
            known how long they are.
        state: tree and live tensors of all that is not tables, where that had to be asked for
            before the marks were counted; None: it is asked for while rows are copied.
    """

    parts: tuple[TablePart, ...]
    marked: MarkedRows
    placed: tuple[Placed, ...]
    tables_end: int
    state: tuple[bytes, list[Tensor]] | None


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
        placed.append(place_behind(name, dtype, shape, end))
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
    placed = [place_behind("tree", "U8", (len(tree),), end)]
    for number, tensor in enumerate(tensors):
        name, dtype = f"tensor.{number}", dtype_name(tensor.dtype)
        placed.append(place_behind(name, dtype, tuple(tensor.shape), placed[-1].end))
    return tuple(placed), placed[-1].end


def place_behind(name: str, dtype: Dtype, shape: tuple[int, ...], end: int) -> Placed:
    """The next place for an array behind `end`, in bytes."""
    offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    size = array_bytes(dtype, shape)
    return Placed(name=name, dtype=dtype, shape=shape, offset=offset, size_bytes=size)
