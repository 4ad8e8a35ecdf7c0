"""Cutting a snapshot: what belongs in it, where it goes, and that a failure leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from recpoint.format import state_tree
from recpoint.format.dtypes import dtype_name
from recpoint.format.manifest import RowStateSpec, TableSpec
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin import huge_pages
from recpoint.trainer_plugin.ledger import Pending
from recpoint.trainer_plugin.optimizer_watch import OptimizerWatch
from recpoint.trainer_plugin.policy import Tip, next_link
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.slot import Slot
from recpoint.trainer_plugin.snapshot import (
    MarkedRows,
    Snapshot,
    TablePart,
    fill,
    full_bytes,
    new_attempt,
    now_ms,
    place,
)
from recpoint.trainer_plugin.tables import Table
from recpoint.trainer_plugin.tracking import Dirty, Tracker
from recpoint.trainer_plugin.training_state import TrainingState

__all__ = ["Cut", "Cutter"]


class Cut(NamedTuple):
    """A finished cut: the bytes, what they are good for, and the chain after it."""

    snapshot: Snapshot
    pending: Pending
    tip: Tip


class Cutter:
    """Cuts snapshots of one model.

    Args:
        tables: all tables, in the order in which they are stored.
        trackers: table name -> its dirty rows.
        watch: the optimizers' steps.
        state: everything else.
        widths: table name -> bits of a stored value.
        settings: how rows and row states are to be stored, and how long a chain may be.
    """

    def __init__(
        self,
        *,
        tables: Sequence[Table],
        trackers: Mapping[str, Tracker],
        watch: OptimizerWatch,
        state: TrainingState,
        widths: Mapping[str, int],
        settings: Settings,
    ) -> None:
        self._tables = tuple(tables)
        self._trackers = trackers
        self._watch = watch
        self._state = state
        self._widths = widths
        self._settings = settings
        self._specs: dict[str, tuple[object, TableSpec]] = {}

    def settle(self) -> None:
        """Move large tables, and the row states that are there, to large pages: before training.

        Lookups gain from it too. States that optimizers create later stay where they are.
        """
        for table in self._tables:
            states = self._state.optimizers.row_states(table).tensors
            huge_pages.advise([table.weight, *states.values()])
        self._follow_row_states()

    def size_bytes(self) -> int:
        """Bytes that a full of the state as it is now takes in a slot.

        Row states that optimizers create at their first step are not in it yet.

        Raises:
            SettingsError: something in the state cannot be stored; its path is named.
        """
        tree, tensors = state_tree.flatten(self._state.capture_fixed())
        parts = [self._part(table, self._spec(table), table.rows) for table in self._tables]
        return place(parts, tree, tensors)[1]

    def cut(
        self, slot: Slot, *, step: int, generation: int, tip: Tip | None, interval_batches: int
    ) -> Cut:
        """Copy one consistent state into `slot`; nothing is dirty afterwards.

        When it fails, everything is as dirty as it was.

        Raises:
            StagingFull: no room for it.
            StagingError: the slot cannot be used.
            SettingsError: something in the state cannot be stored.
        """
        started_ns = time.perf_counter_ns()
        snapshot_ms, cut_seconds = now_ms(), time.monotonic()
        for tracker in self._trackers.values():
            tracker.follow_weight()
        self._watch.follow_groups()
        self._follow_row_states()
        specs = tuple(self._spec(table) for table in self._tables)
        link = next_link(tip, step=step, tables=specs, full_every=self._settings.full_every)
        dirty = {name: tracker.take() for name, tracker in self._trackers.items()}
        try:
            tree, tensors = state_tree.flatten(self._state.capture(step))
            marked = self._marked(dirty if link.kind == "increment" else {})
            parts = [
                self._part(table, spec, count, dirty[table.name])
                for table, spec, count in zip(self._tables, specs, marked.counts, strict=True)
            ]
            placed, slot_bytes = place(parts, tree, tensors)
            slot.reserve(slot_bytes)
            device = fill(placed, slot.data, parts, marked, tree, tensors)
        except BaseException:
            for name, tracker in self._trackers.items():
                tracker.merge_back(dirty[name])
            raise
        ref = CheckpointRef(step=step, generation=generation, attempt=new_attempt())
        snapshot = Snapshot(
            ref=ref,
            link=link,
            tables=tuple(part.staged for part in parts),
            slot=slot,
            placed=placed,
            slot_bytes=slot_bytes,
            device=device,
            snapshot_ms=snapshot_ms,
            stall_us=(time.perf_counter_ns() - started_ns) // 1_000,
            full_bytes=full_bytes(specs, tree, tensors),
            interval_batches=interval_batches,
        )
        pending = Pending(
            ref=ref,
            link=link,
            dirty=dirty,
            tip_before=tip,
            slot=slot.path.name,
            cut_seconds=cut_seconds,
        )
        return Cut(snapshot, pending, link.tip(ref, specs))

    def _follow_row_states(self) -> None:
        for table in self._tables:
            states = self._state.optimizers.row_states(table).tensors
            self._trackers[table.name].follow_row_states(list(states.values()))

    def _marked(self, dirty: Mapping[str, Dirty]) -> MarkedRows:
        """Counts the rows to store; all of a table that is not in `dirty`, or is dirty as a whole.

        Waits for the devices of the tables.
        """
        bitmaps: list[Tensor | None] = []
        for table in self._tables:
            taken = dirty.get(table.name)
            bitmaps.append(None if taken is None or taken.all_rows else taken.bitmap)
        return MarkedRows(bitmaps, [table.rows for table in self._tables])

    def _part(
        self, table: Table, spec: TableSpec, row_count: int, dirty: Dirty | None = None
    ) -> TablePart:
        states = self._state.optimizers.row_states(table).tensors
        return TablePart(
            spec=spec,
            values=table.weight,
            row_states=tuple(states.values()),
            bitmap=dirty.bitmap if dirty is not None and row_count < table.rows else None,
            row_count=row_count,
            bits=self._widths[table.name],
            quantizer=self._settings.quantizer,
            state_bits=None if self._settings.state_bits == "lossless" else 16,
        )

    def _spec(self, table: Table) -> TableSpec:
        """Built anew only when something differs: checked models take long in a stall."""
        found = self._state.optimizers.row_states(table)
        form = [(name, t.dtype, tuple(t.shape[1:])) for name, t in found.tensors.items()]
        key = (table.rows, table.dim, table.dtype, found.optimizer, tuple(form))
        known = self._specs.get(table.name)
        if known is not None and known[0] == key:
            return known[1]
        states = tuple(
            RowStateSpec(
                name=name, dtype=dtype_name(dtype), shape=shape, optimizer=found.optimizer or 0
            )
            for name, dtype, shape in form
        )
        spec = TableSpec(
            name=table.name,
            rows=table.rows,
            dim=table.dim,
            dtype=table.dtype,
            row_states=states,
        )
        self._specs[table.name] = (key, spec)
        return spec
