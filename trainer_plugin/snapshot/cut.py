"""Cuts snapshots in three steps: plan what goes where, copy it into a slot, seal the slot.

`Cutter.cut` takes them in one stall. A failure leaves no trace: what was dirty is dirty again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from recpoint.catalog.store.contract import now_ms
from recpoint.embeddings.marks import Dirty, Tracker
from recpoint.embeddings.optimizers import OptimizerWatch
from recpoint.format import state_tree
from recpoint.format.dtypes import item_bytes
from recpoint.format.history import ChosenPrecision
from recpoint.format.manifest import CODE_BITS, Quantizer
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.policy import BaseHistory, Link, Tip, next_link
from recpoint.trainer_plugin.ranks.sharding import Shard
from recpoint.trainer_plugin.schedule.ledger import Pending
from recpoint.trainer_plugin.schedule.outlook import in_bits, table_widths
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot import staging
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain, RowsToCode, TableQuantizer
from recpoint.trainer_plugin.snapshot.copy import (
    BehindTables,
    CopiedCut,
    Sampler,
    behind_tables,
    copy_tables,
)
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable, LiveTables
from recpoint.trainer_plugin.snapshot.plan import (
    CutPlan,
    CutRequest,
    MarkedRows,
    TablePart,
    place_state,
    place_tables,
)
from recpoint.trainer_plugin.snapshot.seal import Snapshot
from recpoint.trainer_plugin.snapshot.staging import Slot
from recpoint.trainer_plugin.snapshot.unmarked_rows import UnmarkedRows
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = ["Cut", "CutMoment", "Cutter"]


class Cut(NamedTuple):
    """A finished cut: the bytes, and what they are good for."""

    snapshot: Snapshot
    pending: Pending


class CutMoment(NamedTuple):
    """When a cut was made.

    Attributes:
        snapshot_ms: wall-clock time.
        cut_seconds: monotonic time.
        started_ns: `time.perf_counter_ns` when the stall began.
    """

    snapshot_ms: int
    cut_seconds: float
    started_ns: int


class Cutter:
    """Cuts snapshots of one model, or of the part of it that this rank holds.

    Args:
        shards: all tables of the job, in the order in which they are stored.
        trackers: `Table.key` -> its dirty rows; of those that this rank stores.
        watch: the optimizers' steps.
        state: everything else.
        settings: how rows and row states are to be stored, and how long a chain may be.
        rank: of this process.

    Attributes:
        rule: whether the width of any table is chosen anew for each cut.
        unmarked: compares rows that nothing has marked.

    Raises:
        SettingsError: `Precision.tables` names a table that there is not, or that is not trained.
    """

    def __init__(
        self,
        *,
        shards: Sequence[Shard],
        trackers: Mapping[str, Tracker],
        watch: OptimizerWatch,
        state: TrainingState,
        settings: Settings,
        rank: int = 0,
    ) -> None:
        self._shards = tuple(shards)
        self._trackers = trackers
        self._watch = watch
        self._state = state
        self._rank = rank
        names = {shard.name for shard in shards}
        self._widths = table_widths(
            [shard.table for shard in shards if shard.table is not None],
            settings.precision,
            names=names,
        )
        self.rule = None in self._widths.values()
        self._precision = settings.precision
        self._policy = settings.policy
        self._sampler = Sampler()
        self._quantizer = TableQuantizer([shard.table for shard in shards], settings.precision)
        self._live = LiveTables(shards, state.optimizers)
        self.unmarked = UnmarkedRows(settings.options.verify_unmarked_rows)
        self._has_large_state = False  # besides tables; at the last cut

    def prepare_tables(self) -> None:
        """Move large tables, and the row states that are there, to large pages: before training.

        Lookups gain from it too. States that optimizers create later stay where they are.
        """
        tables = self._live.tables(None)
        for live in tables:
            if live.table is not None:
                staging.advise([live.weight, *live.row_states])
        self._follow_row_states(tables)
        self.unmarked.check(tables, self._trackers)
        self._quantizer.prepare(self._widths)

    def remember_quantizers(self, stored: Pending, quantizers: Sequence[Quantizer]) -> None:
        """A checkpoint is stored: this is what its tables were quantized with."""
        own = [quantizer for quantizer in quantizers if quantizer.rank == self._rank]
        self._quantizer.remember(stored, own)

    def size_bytes(self) -> int:
        """Bytes that a full of the state as it is now takes in a slot.

        State that optimizers make at their first step is not in it before that, and a reader's
        never is; see `memory_bound`.

        Raises:
            SettingsError: something in the state cannot be stored; its path is named.
        """
        with rng.untouched():  # of an extra that draws: a life more would draw others
            tree, tensors = state_tree.flatten(self._state.capture_fixed())
        tables = self._live.tables(None)
        parts = [self._part(live, len(live.held)) for live in tables]
        sample_bytes = self._sampler.size_bytes(
            [live.spec for live in tables], [live.held for live in tables]
        )
        return place_state(tree, tensors, place_tables(parts)[1])[1] + sample_bytes

    def link(
        self, *, step: int, tip: Tip | None, base_history: BaseHistory | None
    ) -> tuple[Link, tuple[LiveTable, ...]]:
        """Where a checkpoint that is cut now stands in its chain, and the tables it holds."""
        for tracker in self._trackers.values():
            tracker.follow_weight()
        self._watch.follow_groups()
        tables = self._live.tables(tip)
        self._follow_row_states(tables)
        self.unmarked.check(tables, self._trackers)
        specs = [live.spec for live in tables]
        link = next_link(tip, base_history, step=step, tables=specs, policy=self._policy)
        return link, tables

    def cut(self, slot: Slot, request: CutRequest, *, started_ns: int) -> Cut:
        """Copy one consistent state into `slot`.

        Nothing is dirty afterwards, but after a cumulative increment, or when it fails: then
        everything is as dirty as it was.

        Args:
            slot: a free one.
            request: what is to be cut; its tables were looked at in this same stall.
            started_ns: `time.perf_counter_ns` when the stall began.

        Raises:
            StagingFull: no room for it.
            StagingError: the slot cannot be used.
            SettingsError: something in the state cannot be stored.
        """
        moment = CutMoment(now_ms(), time.monotonic(), started_ns)
        keep = self._keeps_marks(request.link)
        dirty: dict[str, Dirty] = {}
        taken = {} if keep else dirty
        try:
            for name, tracker in self._trackers.items():
                dirty[name] = tracker.marked() if keep else tracker.take()
            plan = self.plan(request, dirty)
            copied = self.copy(plan, request, slot)
            return self.seal(plan, request, copied, slot, taken, moment)
        except BaseException:
            for name, rows in taken.items():
                self._trackers[name].merge_back(rows)
            raise

    def plan(self, request: CutRequest, dirty: Mapping[str, Dirty]) -> CutPlan:
        """What goes where; writes nothing.

        Args:
            request: what is to be cut.
            dirty: the rows that an increment is to hold, by `LiveTable.key`; of a table that is
                not named, all.

        Raises:
            SettingsError: something in the state cannot be stored.
        """
        tables, link = request.tables, request.link
        # Now, where bitmaps stay in use: a `state_dict` that looks rows up marks them, which
        # must not happen once they are counted. And where a `state_dict` may have much to
        # clone: for that torch has all its threads here.
        early = self._keeps_marks(link) or self._has_large_state
        state = self._captured(request.step) if early else None
        marked = _marked(tables, dirty if link.kind == "increment" else {})
        parts = [
            self._part(live, count, dirty.get(live.key), request.history.precision)
            for live, count in zip(tables, marked.counts, strict=True)
        ]
        for index, ids in marked.ids.items():
            if parts[index].bitmap is not None:
                parts[index] = replace(parts[index], ids=ids)
        self._name_methods(parts, link, request.step)
        if self._quantizer.wanted:
            self._quantize(parts)
        placed, end = place_tables(parts)
        return CutPlan(
            parts=tuple(parts), marked=marked, placed=placed, tables_end=end, state=state
        )

    def copy(self, plan: CutPlan, request: CutRequest, slot: Slot) -> CopiedCut:
        """Copy what is planned into the slot; what is on a device may still be on its way.

        Raises:
            StagingFull: no room for it.
            StagingError: the slot cannot be used.
            SettingsError: something in the state cannot be stored.
        """
        # No more on a guess: what came behind them last time may be less by now, and room for
        # it may be what there is none of.
        slot.reserve(plan.tables_end)
        found: list[BehindTables] = []

        def look_behind(device: DeviceDrain) -> None:
            # Python that runs out of cold caches, most of a millisecond of it: meanwhile other
            # threads copy the dirty rows. Neither changes what the other reads.
            tree, tensors = plan.state or self._captured(request.step)
            specs = tuple([part.spec for part in plan.parts])
            held = [part.held for part in plan.parts]
            sample = self._sampler.draw(specs, held, request.attempt)
            behind = behind_tables(plan.parts, plan.tables_end, tree, tensors, sample, device)
            if behind.is_small:
                behind.write(slot)
            found.append(behind)

        device = copy_tables(plan.placed, slot.data, plan.parts, plan.marked, look_behind)
        (behind,) = found
        if not behind.is_small:
            behind.write(slot)  # by as many threads as torch likes
        self._has_large_state = not behind.is_small
        device.release_training()
        return CopiedCut(behind, device)

    def seal(
        self,
        plan: CutPlan,
        request: CutRequest,
        copied: CopiedCut,
        slot: Slot,
        taken: Mapping[str, Dirty],
        moment: CutMoment,
    ) -> Cut:
        """Describe what was copied; `seal.seal` goes on from there in the background.

        Args:
            plan: of what lies in the slot.
            request: what was to be cut.
            copied: as `copy` returned it.
            slot: where it lies.
            taken: marks that come back if the checkpoint comes to nothing.
            moment: of the cut.
        """
        ref, link, behind = request.ref, request.link, copied.behind
        specs = [part.spec for part in plan.parts]
        pending = Pending(
            ref=ref,
            link=link,
            dirty=taken,
            tip_before=request.tip,
            tip_after=link.tip(ref, specs, before=request.tip, policy=self._policy),
            slot=slot.path.name,
            cut_seconds=moment.cut_seconds,
            bits=tuple([part.bits for part in plan.parts]),
        )
        snapshot = Snapshot(
            ref=ref,
            link=link,
            policy=self._policy.name,
            tables=behind.tables,
            slot=slot,
            placed=plan.placed + behind.placed,
            slot_bytes=behind.end,
            device=copied.device,
            sample=behind.sample,
            quantized_on=frozenset(
                part.values.device.type for part in plan.parts if part.codes is not None
            ),
            snapshot_ms=moment.snapshot_ms,
            stall_us=(time.perf_counter_ns() - moment.started_ns) // 1_000,
            full_bytes=behind.full_bytes,
            interval_batches=request.interval_batches,
            history=request.history,
        )
        return Cut(snapshot, pending)

    def _keeps_marks(self, link: Link) -> bool:
        """Whether what a cut at this link holds stays dirty."""
        return link.kind == "increment" and self._policy.cumulative

    def _captured(self, step: int) -> tuple[bytes, list[Tensor]]:
        """All state but the tables; its tensors are the live ones."""
        return state_tree.flatten(self._state.capture(step))

    def _follow_row_states(self, tables: Sequence[LiveTable]) -> None:
        for live in tables:
            if live.table is not None:
                self._trackers[live.key].follow_row_states(live.row_states)

    def _part(
        self,
        live: LiveTable,
        row_count: int,
        dirty: Dirty | None = None,
        precision: ChosenPrecision | None = None,
    ) -> TablePart:
        width: int = 8 * item_bytes(live.spec.dtype)
        if live.table is not None:
            chosen = in_bits(self._widths[live.key], precision)
            # Exact is what the dtype has now: `model.half()` may have changed it.
            width = chosen if chosen in CODE_BITS else width
        return TablePart(
            spec=live.spec,
            held=live.held,
            values=live.weight,
            row_states=live.row_states,
            bitmap=dirty.bitmap if dirty is not None and row_count < len(live.held) else None,
            row_count=row_count,
            bits=width,
            quantizer=self._precision.quantizer,
            state_bits=None if self._precision.state == "lossless" else 16,
        )

    def _name_methods(self, parts: list[TablePart], link: Link, step: int) -> None:
        """Say of each part with what it is quantized, where that is known."""
        for index, (shard, part) in enumerate(zip(self._shards, parts, strict=True)):
            if shard.table is not None:
                method = self._quantizer.method(shard.table, part.bits, base=link.base, step=step)
                if method is not None:
                    parts[index] = replace(part, method=method)

    def _quantize(self, parts: list[TablePart]) -> None:
        """Give parts codes in place of values, where they are to have them."""
        wanted: dict[int, RowsToCode] = {}
        for index, (shard, part) in enumerate(zip(self._shards, parts, strict=True)):
            table = shard.table
            if table is None or part.method is None or part.row_count == 0:
                continue
            if not self._quantizer.may(table, part.bits):
                continue
            ids = part.ids
            if ids is None and part.bitmap is not None:
                ids = dirty_bitmap.collect(part.bitmap, rows=len(part.held))
                parts[index] = replace(part, ids=ids)
            wanted[index] = RowsToCode(table, part.bits, part.method, ids, part.row_count)
        for index, codes in zip(wanted, self._quantizer.codes([*wanted.values()]), strict=True):
            parts[index] = replace(parts[index], codes=codes)


def _marked(tables: Sequence[LiveTable], dirty: Mapping[str, Dirty]) -> MarkedRows:
    """Counts the rows to store; all of a table that is not in `dirty`, or is dirty as a whole.

    Waits for the devices of the tables.
    """
    bitmaps: list[Tensor | None] = []
    for live in tables:
        taken = dirty.get(live.key)
        bitmaps.append(None if taken is None or taken.all_rows else taken.bitmap)
    return MarkedRows(bitmaps, [len(live.held) for live in tables])
