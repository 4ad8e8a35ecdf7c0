"""Plans a cut: which rows of each table it holds, and where everything goes in the slot.

The planning reads marks and sizes, and writes nothing. `copy` then copies what is planned, and
`seal` describes what lies in the slot.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recpoint.catalog.staging.slot import Placed, place_behind
from recpoint.format.dtypes import Dtype, array_bytes, dtype_name, item_bytes
from recpoint.format.first_values import FirstValueRule
from recpoint.format.history import History
from recpoint.format.job import Allocation, QuantizerName, StagedTable
from recpoint.format.manifest import ChosenMethod, StateBits, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.format.squared_states import squared_states
from recpoint.kernels import dirty_bitmap, dirty_rows
from recpoint.trainer_plugin.policy import ChainLink, Tip
from recpoint.trainer_plugin.snapshot.codes import Codes
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable

__all__ = [
    "CutPlan",
    "CutRequest",
    "MarkedRows",
    "CutTable",
    "full_bytes",
    "new_attempt",
    "place_state",
    "place_tables",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class CutRequest:
    """Describes the checkpoint that a cut must make.

    Attributes:
        step: batches done.
        generation: generation of this trainer.
        attempt: name of the attempt; step, generation and attempt identify the checkpoint.
        link: as `Cutter.link` returned it, or a full.
        tables: as `Cutter.link` returned them, in the same stall.
        tip: tip of the chain before this checkpoint.
        interval_batches: batches since the checkpoint before.
        history: history of the training state.
    """

    step: int
    generation: int
    attempt: str
    link: ChainLink
    tables: tuple[LiveTable, ...]
    tip: Tip | None
    interval_batches: int
    history: History

    @property
    def ref(self) -> CheckpointRef:
        """Reference to the checkpoint that the cut becomes."""
        return CheckpointRef(step=self.step, generation=self.generation, attempt=self.attempt)


class MarkedRows:
    """Counts the marked rows of each table, and copies the rows of all tables on the CPU together.

    Args:
        bitmaps: for each table, its bitmap, on any device; None: all its rows.
        rows: for each table, its number of rows.

    Attributes:
        counts: for each table, its number of marked rows.
        ids: index of each table on a GPU -> its marked rows, int64, ascending, on the GPU. For
            tables on the CPU, the copy itself finds the rows.
    """

    def __init__(self, bitmaps: Sequence[Tensor | None], rows: Sequence[int]) -> None:
        on_cpu = {i: bitmap for i, bitmap in enumerate(bitmaps) if bitmap is not None}
        on_device = {i: on_cpu.pop(i) for i in list(on_cpu) if not on_cpu[i].is_cpu}
        self._on_cpu = tuple(on_cpu)
        self._tally = dirty_rows.count(tuple(on_cpu.values()), rows=[rows[i] for i in on_cpu])
        self.counts = list(rows)
        self.ids: dict[int, Tensor] = {}
        for device in {bitmap.device for bitmap in on_device.values()}:
            of_device = {i: bitmap for i, bitmap in on_device.items() if bitmap.device == device}
            # This waits once for each device, however many tables it has.
            ids_found = dirty_bitmap.collect_many(
                [*of_device.values()], rows=[rows[i] for i in of_device]
            )
            self.ids.update(zip(of_device, ids_found, strict=True))
        for i, ids in self.ids.items():
            self.counts[i] = ids.numel()
        for i, count in zip(on_cpu, self._tally.counts, strict=True):
            self.counts[i] = count

    def copy(
        self, destinations: Mapping[int, dirty_rows.Destination], meanwhile: Callable[[], None]
    ) -> None:
        """Copy the marked rows of the tables on the CPU that have a destination.

        Args:
            destinations: index of the table -> where its rows go.
            meanwhile: called once, while other threads copy, if there are other threads.
        """
        cpu_destinations = [destinations.get(i) for i in self._on_cpu]
        sources = [
            source for destination in destinations.values() for source, _ in destination.arrays
        ]
        versions_before = [0 if source.is_inference() else source._version for source in sources]
        self._tally.copy(cpu_destinations, meanwhile=meanwhile)
        if versions_before != [
            0 if source.is_inference() else source._version for source in sources
        ]:
            # A `state_dict` in `meanwhile` may change a table for a while; copy what it left there.
            self._tally.copy(cpu_destinations)


@dataclass(frozen=True, kw_only=True, eq=False)
class CutTable:
    """The part of one table that one snapshot holds.

    Attributes:
        spec: the table as it is stored.
        held: the rows of the table that this rank stores; positions count from its start.
        values: the live weight [len(held), dim]; of a cached table, its slots.
        row_states: live row states, in the order of `spec.row_states`.
        bitmap: the rows to store, on the weight's device; None: all rows.
        row_count: number of rows to store.
        bits: bits of each stored value.
        quantizer: the quantizer, if the rows are quantized.
        state_bits: bits of element-wise row states; None: they are kept exactly.
        ids: the rows to store, int64 [row_count], ascending, on the weight's device; None: all
            rows, or the rows are found while they are copied.
        method: method of the quantizer; None: the agent chooses it, if the rows are quantized.
        codes: the rows as codes, if this process quantized them; None: `values` are staged.
        in_cache: name of the table in its cache, which has the rows; None: `values` has them.
        states_here: how many of `row_states`, the last of them, have an entry for each row here,
            although a cache has the rows; 0 without a cache.
        at_servers: embedding servers stage the rows; the slot has none of them.
        residual: whether the agent stores the rows as residuals (format §3.7).
        allocation: how the agent chooses a width for each row; None: all rows have `bits`.
        first_values: the rule of rows that nothing has changed, which the agent leaves out; None:
            it leaves none out.
    """

    spec: TableSpec
    held: range
    values: Tensor
    row_states: tuple[Tensor, ...]
    bitmap: Tensor | None
    row_count: int
    bits: int
    quantizer: QuantizerName
    state_bits: StateBits | None
    ids: Tensor | None = None
    method: ChosenMethod | None = None
    codes: Codes | None = None
    in_cache: str | None = None
    states_here: int = 0
    at_servers: bool = False
    residual: bool = False
    allocation: Allocation | None = None
    first_values: FirstValueRule | None = None

    @property
    def cached_arrays(self) -> tuple[Tensor, ...]:
        """Values and row states that have an entry for each slot of the cache."""
        return (self.values, *self.row_states[: len(self.row_states) - self.states_here])

    @property
    def is_quantized(self) -> bool:
        """Whether its rows are stored in fewer bits than their dtype has."""
        return self.bits < 8 * item_bytes(self.spec.dtype)

    @property
    def may_be_residual(self) -> bool:
        """Whether the form of its rows allows residuals to a full."""
        return self.spec.dtype != "F64" and self.is_quantized

    @property
    def rows_here(self) -> int:
        """How many rows this rank stages."""
        return 0 if self.at_servers else self.row_count

    @property
    def staged(self) -> StagedTable:
        """The table as the job describes it."""
        shard_range = range(0) if self.at_servers else self.held
        return StagedTable(
            spec=self.spec,
            first_row=shard_range.start,
            shard_rows=len(shard_range),
            row_count=self.rows_here,
            all_rows=self.bitmap is None and len(shard_range) > 0,
            bits=self.bits,
            quantizer=self.quantizer,
            state_bits=self.state_bits,
            second_moments=self._second_moments,
            method=self.method,
            codes=self.codes is not None,
            residual=True if self.residual else None,
            allocation=self.allocation,
            first_values=self.first_values,
        )

    @property
    def _second_moments(self) -> tuple[int, ...] | None:
        return squared_states(self.spec) if self.state_bits == 8 else None

    @property
    def staged_at_servers(self) -> StagedTable:
        """The table as the job of an embedding server describes it before it has rows."""
        return StagedTable(
            spec=self.spec,
            first_row=0,
            shard_rows=0,
            row_count=0,
            all_rows=False,
            bits=self.bits,
            quantizer=self.quantizer,
            state_bits=self.state_bits,
            second_moments=self._second_moments,
            method=None,  # the agent of the server's host chooses
            codes=False,
            scattered=True if self.at_servers else None,
            residual=True if self.residual else None,
            allocation=self.allocation,
            first_values=self.first_values,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CutPlan:
    """Says what goes where in the slot.

    Attributes:
        parts: for each table, the part that the snapshot holds.
        marked: the marked rows of `parts`; copies them.
        placed: places of the tables' arrays.
        tables_end: first byte behind these arrays. State and sample come behind the tables
            (`place_state`) once their sizes are known.
        state: state tree and live tensors of everything outside the tables, if they had to be
            captured before the marks were counted; None: they are captured while rows are copied.
    """

    parts: tuple[CutTable, ...]
    marked: MarkedRows
    placed: tuple[Placed, ...]
    tables_end: int
    state: tuple[bytes, list[Tensor]] | None


def new_attempt() -> str:
    """Return a new identity for a checkpoint.

    It comes from the system, so that no random generator of the training advances.
    """
    return os.urandom(16).hex()


def full_bytes(parts: Sequence[CutTable], tree: bytes, tensors: Sequence[Tensor]) -> int:
    """Return the bytes of this rank's part of a full, exact checkpoint."""
    total = len(tree) + sum(tensor.nbytes for tensor in tensors)
    for part in parts:
        spec = part.spec
        row = spec.dim * item_bytes(spec.dtype)
        row += sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
        total += 0 if part.at_servers else len(part.held) * row
    return total


def place_tables(parts: Sequence[CutTable]) -> tuple[tuple[Placed, ...], int]:
    """Return the places of the tables' arrays, and the byte behind them (format §7, segments)."""
    placed: list[Placed] = []
    end = 0

    def add(name: str, dtype: Dtype, shape: tuple[int, ...]) -> None:
        nonlocal end
        placed.append(place_behind(name, dtype, shape, end))
        end = placed[-1].end

    for index, part in enumerate(parts):
        rows = part.rows_here
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
    """Return the places of the state behind tables that end at byte `end`, and its own end."""
    placed = [place_behind("tree", "U8", (len(tree),), end)]
    for number, tensor in enumerate(tensors):
        name, dtype = f"tensor.{number}", dtype_name(tensor.dtype)
        placed.append(place_behind(name, dtype, tuple(tensor.shape), placed[-1].end))
    return tuple(placed), placed[-1].end
