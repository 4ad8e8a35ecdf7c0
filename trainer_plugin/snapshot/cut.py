"""Cuts snapshots in three steps: plan what goes where, copy it into a slot, seal the slot.

`Cutter.cut` takes the three steps in one stall. `Cutter.open_window` has rows copied before it. If
a cut fails, all rows that were dirty are dirty again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from recpoint.catalog.staging.sample import Sampler
from recpoint.catalog.staging.slot import Slot
from recpoint.catalog.store.contract import now_ms
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.home.initial import Initial
from recpoint.embeddings.tables.marks import Dirty, Tracker
from recpoint.embeddings.tables.optimizers import OptimizerWatch
from recpoint.format import state_tree
from recpoint.format.history import ChosenPrecision
from recpoint.format.keyed_use import KeyedUse
from recpoint.format.manifest import CopiedAhead
from recpoint.trainer_plugin.policy import BaseHistory, ChainLink, Tip, next_link
from recpoint.trainer_plugin.ranks.sharding import StoredShard
from recpoint.trainer_plugin.schedule.ledger import CopiedRows, Pending
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot import large_pages
from recpoint.trainer_plugin.snapshot.cache_at_cut import CacheAtCut
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.copy import (
    BehindTables,
    CopiedCut,
    behind_tables,
    copy_tables,
)
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable, LiveTables
from recpoint.trainer_plugin.snapshot.piece_window import PieceWindow, are_copied_in_pieces
from recpoint.trainer_plugin.snapshot.plan import (
    CutPlan,
    CutRequest,
    CutTable,
    MarkedRows,
    place_state,
    place_tables,
)
from recpoint.trainer_plugin.snapshot.seal import Snapshot
from recpoint.trainer_plugin.snapshot.table_parts import PricesBits, TableParts
from recpoint.trainer_plugin.snapshot.unmarked_rows import UnmarkedRows
from recpoint.trainer_plugin.snapshot.warm_up import compile_kernels
from recpoint.trainer_plugin.snapshot.window import Window
from recpoint.trainer_plugin.snapshot.window_marks import OpeningState
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = ["Cut", "CutMoment", "Cutter"]

#: Room in a slot for state that nobody announces: the reader's, and numbers that get longer. It is
#: a share of the slot, so that a small slot has no room that it does not need.
_ROOM_SHARE = 64
_MOST_ROOM_BYTES = 1 << 20


class Cut(NamedTuple):
    """A finished cut.

    Attributes:
        snapshot: the copied bytes and their description.
        pending: the checkpoint that waits for its outcome.
    """

    snapshot: Snapshot
    pending: Pending


class CutMoment(NamedTuple):
    """The time of a cut.

    Attributes:
        snapshot_ms: wall-clock time, in milliseconds since the epoch.
        cut_seconds: `time.monotonic`.
        started_ns: `time.perf_counter_ns` when the stall began.
    """

    snapshot_ms: int
    cut_seconds: float
    started_ns: int


class Cutter:
    """Cuts snapshots of one model, or of the part of it that this rank holds.

    Args:
        shards: all tables of the job, in the order in which they are stored.
        trackers: `Table.key` -> tracker of the table's dirty rows, for tables that this rank
            stores.
        watch: watches the optimizers' steps.
        state: the training state outside the tables.
        settings: how rows and row states are stored, and how long a chain may be.
        rank: rank of this process.
        cache: has the rows of cached tables; None: no table is cached.
        prices: gives rows their widths; None: all rows of a table have one width.
        rules: returns how new rows of a grown table began, by its name; None: it has not grown.

    Attributes:
        cache: the cache at the cut.
        parts: describes the tables as they are stored.
        unmarked: compares rows that nothing has marked.
        state_bytes: bytes of the state tree and of each of its tensors when `size_bytes` was last
            called.

    Raises:
        SettingsError: `Precision.tables` names a table that does not exist or is not trained.
    """

    def __init__(
        self,
        *,
        shards: Sequence[StoredShard],
        trackers: Mapping[str, Tracker],
        watch: OptimizerWatch,
        state: TrainingState,
        settings: Settings,
        rank: int = 0,
        cache: Cache | None = None,
        prices: PricesBits | None = None,
        rules: Callable[[str], Initial | None] = lambda _: None,
    ) -> None:
        self._trackers = trackers
        self._watch = watch
        self._state = state
        self.cache = CacheAtCut(cache, at_servers=settings.staging.at_servers)
        self.parts = TableParts(shards, settings, self.cache, rank, prices, rules)
        self._policy = settings.policy
        self._sampler = Sampler()
        self._live = LiveTables(shards, state.optimizers)
        self.unmarked = UnmarkedRows(settings.options.verify_unmarked_rows)
        self._copy_share = settings.options.copy_share
        self.state_bytes: tuple[int, ...] = ()
        self._has_large_state = False  # whether the state outside tables was large at the last cut

    def prepare_tables(self) -> None:
        """Move large tables to large pages, and compile GPU kernels. Called before training.

        Large pages make lookups faster, too. Existing row states are moved, and row states that
        optimizers create later are not.
        """
        tables = self._live.tables(None)
        for live in tables:
            if live.table is not None:
                large_pages.advise([live.weight, *live.row_states])
        self._follow_row_states(tables)
        self.unmarked.check(tables, self._trackers)
        self.parts.prepare()
        compile_kernels(tables)

    def size_bytes(self) -> int:
        """Return the bytes that a full of the present state takes in a slot, and room for a little
        more: to extend a slot maps all of it anew, which would take most of the first stall.

        Optimizer state is included only after the first step has created it; of the reader's state,
        only what fits into that room. See `memory_bound`.

        Raises:
            SettingsError: part of the state cannot be stored; the message names its path.
        """
        # An extra may draw random numbers here; a restarted training would then draw others.
        with rng.untouched():
            tree, tensors = state_tree.flatten(self._state.capture_fixed())
        self.state_bytes = (len(tree), *(tensor.nbytes for tensor in tensors))
        tables = self._live.tables(None)
        parts = [self.parts.whole(live) for live in tables]
        sample_bytes = self._sampler.size_bytes(
            [live.spec for live in tables], [live.held for live in tables]
        )
        planned_bytes = place_state(tree, tensors, place_tables(parts)[1])[1] + sample_bytes
        return planned_bytes + min(_MOST_ROOM_BYTES, planned_bytes // _ROOM_SHARE)

    def base_bytes(self) -> int:
        """Return the bytes that the agent keeps of a full's rows for residuals to them."""
        return self.parts.base_bytes(self._live.tables(None))

    def parts_of_full(
        self, tables: Sequence[LiveTable] | None, precision: ChosenPrecision | None
    ) -> list[CutTable]:
        """Return the parts of this rank in a full; embedding servers stage theirs.

        Args:
            tables: the tables; None: as they are now.
            precision: decision of the rule; None: the fewest bits that it may choose.
        """
        live_tables = self._live.tables(None) if tables is None else tables
        return self.parts.of_full(live_tables, precision)

    def marked_counts(self, tables: Sequence[LiveTable]) -> list[int]:
        """Count the rows that are marked in each table; waits for the devices of the tables.

        While rows are copied before a cut, marks are in several places, so all rows count.
        """
        if any(tracker.aside is not None for tracker in self._trackers.values()):
            return [len(live.held) for live in tables]
        dirty = {name: tracker.marked() for name, tracker in self._trackers.items()}
        return _marked(tables, dirty).counts

    def link(
        self, *, step: int, tip: Tip | None, base_history: BaseHistory | None
    ) -> tuple[ChainLink, tuple[LiveTable, ...]]:
        """Return the link of a checkpoint that is cut now, and the tables that it holds.

        Args:
            step: batches done.
            tip: tip of the chain; None: there is no chain to extend.
            base_history: the checkpoints on the tip's base.
        """
        frozen = self.freeze(step=step, tip=tip, base_history=base_history)
        self.unmarked.check(frozen.tables, self._trackers)
        return frozen.link, frozen.tables

    def freeze(
        self, *, step: int, tip: Tip | None, base_history: BaseHistory | None
    ) -> OpeningState:
        """Return link and tables as `link` does, for a checkpoint at `step`, which may be later."""
        self._state.optimizers.begin_entries()
        for tracker in self._trackers.values():
            tracker.follow_weight()
        self._watch.follow_groups()
        tables = self._live.tables(tip)
        self._follow_row_states(tables)
        specs = [live.spec for live in tables]
        link = next_link(tip, base_history, step=step, tables=specs, policy=self._policy)
        return OpeningState(link, tip, tables)

    def open_window(
        self,
        slot: Slot,
        frozen: OpeningState,
        batches: Future[Sequence[Mapping[str, Tensor]]],
        *,
        opened_at: int,
        least_bytes: int,
    ) -> Window | PieceWindow:
        """Begin to copy rows of a coming checkpoint.

        Args:
            slot: a free slot, which the checkpoint will take.
            frozen: link and tables, as `link` returned them now.
            batches: the rows that coming batches look up, as for `Window`.
            opened_at: batches done before the first of `batches`.
            least_bytes: bytes to reserve in the slot, if the rows take less.
        """
        is_full = frozen.link.kind == "full"
        parts = []
        for live in frozen.tables:
            part = self.parts.part(live, len(live.held))
            tracker = self._trackers.get(live.key)
            if tracker is not None:
                tracker.check_version()
                if not (is_full or tracker.all_rows):  # the window counts the rows
                    part = replace(part, bitmap=tracker.bitmap)
            parts.append(part)
        if are_copied_in_pieces(frozen.tables):
            return PieceWindow(
                frozen=frozen,
                parts=parts,
                slot=slot,
                trackers=self._trackers,
                least_bytes=least_bytes,
            )
        return Window(
            frozen=frozen,
            parts=parts,
            slot=slot,
            trackers=self._trackers,
            batches=batches,
            opened_at=opened_at,
            least_bytes=least_bytes,
            share=self._copy_share,
        )

    def cut(
        self,
        slot: Slot,
        request: CutRequest,
        *,
        started_ns: int,
        window: Window | PieceWindow | None = None,
    ) -> Cut:
        """Copy one consistent state into `slot`.

        Afterwards no row is dirty. After a cumulative increment, or a cut that fails, the same rows
        are dirty as before.

        Args:
            slot: a free slot; the window's, if there is one.
            request: the checkpoint to cut; its tables were read in this same stall.
            started_ns: `time.perf_counter_ns` when the stall began.
            window: has copied rows of this checkpoint; it is over afterwards.

        Raises:
            StagingFull: there is no room for it.
            StagingError: the slot cannot be used.
            SettingsError: part of the state cannot be stored.
        """
        moment = CutMoment(now_ms(), time.monotonic(), started_ns)
        if window is not None:
            sealed = self._cut_ahead(window, request, moment)
            if sealed is not None:
                return sealed
        keep = self._keeps_marks(request.link)
        dirty: dict[str, Dirty] = {}
        unmarked = {} if keep else dirty
        try:
            for name, tracker in self._trackers.items():
                dirty[name] = tracker.marked() if keep else tracker.take()
            plan = self.plan(request, dirty)
            copied = self.copy(plan, request, slot)
            return self.seal(plan, request, copied, slot, unmarked, moment)
        except BaseException:
            for name, rows in unmarked.items():
                self._trackers[name].merge_back(rows)
            raise

    def _cut_ahead(
        self, window: Window | PieceWindow, request: CutRequest, moment: CutMoment
    ) -> Cut | None:
        """Cut a checkpoint of which rows were copied before; None: the window is void.

        Raises:
            StagingFull, StagingError, SettingsError: as `cut`.
        """
        dirty_rows: dict[str, Dirty] = {}
        device = DeviceDrain()
        try:
            # First, because a `state_dict` that changes tables or looks rows up must not do so
            # after their marks were taken. This takes longer than to copy the rows that are left.
            state = self._captured(request.step)
            if not window.close():
                return None
            if self.unmarked.differ(window.copies()):
                window.has_unmarked_changes = True
                window.void("rows that were copied before had changed, and nothing marked them")
                return None
            keep = self._keeps_marks(request.link)
            dirty: dict[str, Dirty] = {}
            for name, tracker in self._trackers.items():
                marked_rows = window.end(name, keep=keep)
                if marked_rows is None:
                    marked_rows = tracker.marked() if keep else tracker.take()
                dirty[name] = marked_rows
                if not keep:
                    dirty_rows[name] = marked_rows
            plan = self.plan(request, dirty, state)
            specs, held_rows = (
                [part.spec for part in plan.parts],
                [part.held for part in plan.parts],
            )
            sample = self._sampler.draw(specs, held_rows, request.attempt)
            behind = behind_tables(plan.parts, plan.tables_end, *state, sample, device)
            self._has_large_state = not behind.is_small
            moves = window.finish(plan, behind, device)
            device.release_training()
            copied = CopiedCut(behind, device, moves, _copied_ahead(window.copied))
            return self.seal(plan, request, copied, window.slot, dirty_rows, moment)
        except BaseException:
            device.release()
            window.void("the cut failed")
            for name, rows in dirty_rows.items():
                self._trackers[name].merge_back(rows)
            raise

    def plan(
        self,
        request: CutRequest,
        dirty: Mapping[str, Dirty],
        state: tuple[bytes, list[Tensor]] | None = None,
    ) -> CutPlan:
        """Plan what goes where in the slot; writes nothing.

        Args:
            request: the checkpoint to cut.
            dirty: the rows that an increment must hold, by `LiveTable.key`; a table that is not
                named is stored whole.
            state: the state outside tables, if it has been captured.

        Raises:
            SettingsError: part of the state cannot be stored.
        """
        tables, link = request.tables, request.link
        # The state is captured now in two cases. If bitmaps stay in use, a `state_dict` that looks
        # rows up marks them, which must not happen after they are counted. If the state is large, a
        # `state_dict` may clone much, and here torch can use all its threads.
        if state is None and (self._keeps_marks(link) or self._has_large_state):
            state = self._captured(request.step)
        marked = _marked(tables, dirty if link.kind == "increment" else {})
        parts = [
            self.parts.part(live, count, dirty.get(live.key), request.history.precision)
            for live, count in zip(tables, marked.counts, strict=True)
        ]
        for index, ids in marked.ids.items():
            if parts[index].bitmap is not None:
                parts[index] = replace(parts[index], ids=ids)
        self.parts.quantize(parts, link, request.step)
        placed, end = place_tables(parts)
        return CutPlan(
            parts=tuple(parts), marked=marked, placed=placed, tables_end=end, state=state
        )

    def copy(self, plan: CutPlan, request: CutRequest, slot: Slot) -> CopiedCut:
        """Copy what is planned into the slot; rows of a GPU may still be on their way on return.

        Raises:
            StagingFull: there is no room for it.
            StagingError: the slot cannot be used.
            SettingsError: part of the state cannot be stored.
        """
        # Reserve only the tables. To also guess the size of the rest from the last cut could fail
        # for lack of room, although the rest may be smaller now.
        slot.reserve(plan.tables_end)
        behind_list: list[BehindTables] = []
        device = DeviceDrain(self.cache.view())

        def look_behind() -> None:
            # This is Python with cold caches and takes most of a millisecond. Meanwhile other
            # threads copy the dirty rows. Neither side changes what the other reads.
            tree, tensors = plan.state or self._captured(request.step)
            specs = tuple([part.spec for part in plan.parts])
            held_rows = [part.held for part in plan.parts]
            sample = self._sampler.draw(specs, held_rows, request.attempt)
            behind = behind_tables(plan.parts, plan.tables_end, tree, tensors, sample, device)
            if behind.is_small:
                behind.write(slot)
            behind_list.append(behind)

        try:
            copy_tables(plan.placed, slot.data, plan.parts, plan.marked, device, look_behind)
            (behind,) = behind_list
            if not behind.is_small:
                behind.write(slot)  # here torch may use as many threads as it likes
            self._has_large_state = not behind.is_small
            device.release_training()
        except BaseException:
            device.release()
            raise
        return CopiedCut(behind, device)

    def seal(
        self,
        plan: CutPlan,
        request: CutRequest,
        copied: CopiedCut,
        slot: Slot,
        dirty_rows: Mapping[str, Dirty],
        moment: CutMoment,
    ) -> Cut:
        """Describe what was copied; `seal.seal` then completes it in the background.

        Args:
            plan: plan of what lies in the slot.
            request: the checkpoint to cut.
            copied: as `copy` returned it.
            slot: the slot that holds the copy.
            dirty_rows: marks that become dirty again if the checkpoint fails.
            moment: time of the cut.
        """
        ref, link, behind = request.ref, request.link, copied.behind
        specs = [part.spec for part in plan.parts]
        pending = Pending(
            ref=ref,
            link=link,
            dirty=dirty_rows,
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
            moves=copied.moves,
            sample=behind.sample,
            quantized_on=frozenset(
                part.values.device.type for part in plan.parts if part.codes is not None
            ),
            snapshot_ms=moment.snapshot_ms,
            stall_us=(time.perf_counter_ns() - moment.started_ns) // 1_000,
            copied_ahead=copied.copied_ahead,
            loss=self.parts.measured_loss,
            keyed=_keyed_uses(request.tables),
            cache=self.cache.take_use(),
            full_bytes=behind.full_bytes,
            interval_batches=request.interval_batches,
            history=request.history,
            served=self.cache.served(plan.parts, ref.attempt),
        )
        return Cut(snapshot, pending)

    def _keeps_marks(self, link: ChainLink) -> bool:
        """Whether the rows that a cut at this link holds stay dirty."""
        return link.kind == "increment" and self._policy.cumulative

    def _captured(self, step: int) -> tuple[bytes, list[Tensor]]:
        """Return the state tree and the live tensors of everything outside the tables."""
        return state_tree.flatten(self._state.capture(step))

    def _follow_row_states(self, tables: Sequence[LiveTable]) -> None:
        for live in tables:
            if live.table is not None:
                self._trackers[live.key].follow_row_states(live.row_states)


def _marked(tables: Sequence[LiveTable], dirty: Mapping[str, Dirty]) -> MarkedRows:
    """Count the rows to store: the dirty rows, or all rows of a table not in `dirty`.

    Waits for the devices of the tables.
    """
    bitmaps: list[Tensor | None] = []
    for live in tables:
        dirty_rows = dirty.get(live.key)
        bitmaps.append(None if dirty_rows is None or dirty_rows.all_rows else dirty_rows.bitmap)
    return MarkedRows(bitmaps, [len(live.held) for live in tables])


def _keyed_uses(tables: Sequence[LiveTable]) -> tuple[KeyedUse, ...] | None:
    """Return the figures of keyed tables as records have them; None: there is no such table."""
    uses = [
        KeyedUse(table=index, **live.table.key_counts)
        for index, live in enumerate(tables)
        if live.table is not None and live.table.key_counts is not None
    ]
    return tuple(uses) or None


def _copied_ahead(copied: CopiedRows | None) -> CopiedAhead | None:
    """Return the figures as records have them; None: no row was copied before the stall."""
    if copied is None or copied.rows_before == 0:
        return None
    return CopiedAhead(
        rows_before=copied.rows_before,
        bytes_before=copied.bytes_before,
        rows_in_stall=copied.rows_in_stall,
        bytes_in_stall=copied.bytes_in_stall,
    )
