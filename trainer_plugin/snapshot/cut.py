"""Cuts snapshots in three steps: plan what goes where, copy it into a slot, seal the slot.

`Cutter.cut` takes the three steps in one stall. `Cutter.open_window` has rows copied before it. If
a cut fails, all rows that were dirty are dirty again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from recpoint.catalog.staging.sample import Sampler
from recpoint.catalog.staging.slot import Slot
from recpoint.catalog.store.contract import now_ms
from recpoint.embeddings.cache.cache import Cache
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.server.served_part import part_of
from recpoint.embeddings.tables.marks import Dirty, Tracker
from recpoint.embeddings.tables.optimizers import OptimizerWatch
from recpoint.format import state_tree
from recpoint.format.dtypes import item_bytes
from recpoint.format.history import ChosenPrecision
from recpoint.format.manifest import CODE_BITS, CacheUse, CopiedAhead, Quantizer
from recpoint.kernels import dirty_bitmap
from recpoint.trainer_plugin.policy import BaseHistory, ChainLink, Tip, next_link
from recpoint.trainer_plugin.ranks.sharding import StoredShard
from recpoint.trainer_plugin.schedule.ledger import CopiedRows, Pending
from recpoint.trainer_plugin.schedule.outlook import in_bits, table_widths
from recpoint.trainer_plugin.settings import Settings
from recpoint.trainer_plugin.snapshot import staging
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain, RowsToCode, TableQuantizer
from recpoint.trainer_plugin.snapshot.copy import (
    BehindTables,
    CopiedCut,
    behind_tables,
    copy_tables,
)
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable, LiveTables
from recpoint.trainer_plugin.snapshot.plan import (
    CutPlan,
    CutRequest,
    CutTable,
    MarkedRows,
    place_state,
    place_tables,
)
from recpoint.trainer_plugin.snapshot.seal import ServedTables, Snapshot
from recpoint.trainer_plugin.snapshot.unmarked_rows import UnmarkedRows
from recpoint.trainer_plugin.snapshot.warm_up import compile_kernels
from recpoint.trainer_plugin.snapshot.window import OpeningState, Window
from recpoint.trainer_plugin.state import rng
from recpoint.trainer_plugin.state.training_state import TrainingState

__all__ = ["Cut", "CutMoment", "Cutter"]


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

    Attributes:
        rule: whether the width of any table is chosen anew for each cut.
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
    ) -> None:
        self._shards = tuple(shards)
        self._cache = cache
        self._used = CacheStats() if cache is None else cache.stats  # at the cut before
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
        self._at_servers = settings.staging.at_servers
        self._at_home: frozenset[str] = frozenset()  # cached tables that servers stage at this cut
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
                staging.advise([live.weight, *live.row_states])
        self._follow_row_states(tables)
        self.unmarked.check(tables, self._trackers)
        self._quantizer.prepare(self._widths)
        compile_kernels(tables)

    def remember_quantizers(self, stored: Pending, quantizers: Sequence[Quantizer]) -> None:
        """Remember the quantizers of the tables of a checkpoint that is stored."""
        own_quantizers = [quantizer for quantizer in quantizers if quantizer.rank == self._rank]
        self._quantizer.remember(stored, own_quantizers)

    def size_bytes(self) -> int:
        """Return the bytes that a full of the present state takes in a slot.

        Optimizer state is included only after the first step has created it; the reader's state is
        never included. See `memory_bound`.

        Raises:
            SettingsError: part of the state cannot be stored; the message names its path.
        """
        # An extra may draw random numbers here; a restarted training would then draw others.
        with rng.untouched():
            tree, tensors = state_tree.flatten(self._state.capture_fixed())
        self.state_bytes = (len(tree), *(tensor.nbytes for tensor in tensors))
        tables = self._live.tables(None)
        parts = [self._part(live, len(live.held)) for live in tables]
        if self._at_servers:
            # Those that no step has changed yet will be there when a full is cut.
            parts = [replace(part, at_servers=part.in_cache is not None) for part in parts]
        sample_bytes = self._sampler.size_bytes(
            [live.spec for live in tables], [live.held for live in tables]
        )
        return place_state(tree, tensors, place_tables(parts)[1])[1] + sample_bytes

    def parts_of_full(
        self, tables: Sequence[LiveTable] | None, precision: ChosenPrecision | None
    ) -> list[CutTable]:
        """Return the parts of this rank in a full; embedding servers stage theirs.

        Args:
            tables: the tables; None: as they are now.
            precision: decision of the rule; None: the fewest bits that it may choose.
        """
        live_tables = self._live.tables(None) if tables is None else tables
        parts = []
        for live in live_tables:
            part = self._part(live, len(live.held), None, precision)
            if precision is None and live.table is not None and self._widths[live.key] is None:
                part = replace(part, bits=min(CODE_BITS))
            parts.append(replace(part, at_servers=self._at_servers and part.in_cache is not None))
        return parts

    def marked_counts(self, tables: Sequence[LiveTable]) -> list[int]:
        """Count the rows that are marked in each table; waits for the devices of the tables.

        While rows are copied before a cut, marks are in several places, so all rows count.
        """
        if any(tracker.aside is not None for tracker in self._trackers.values()):
            return [len(live.held) for live in tables]
        dirty = {name: tracker.marked() for name, tracker in self._trackers.items()}
        return _marked(tables, dirty).counts

    @property
    def staging_servers(self) -> int:
        """How many embedding servers stage their own rows; 0: none do."""
        if self._cache is None or not self._at_servers:
            return 0
        return self._cache.home.staging_servers

    @property
    def at_servers(self) -> tuple[bool, ...]:
        """Whether embedding servers stage the rows of each table."""
        return tuple(
            self._at_servers and shard.table is not None and shard.table.cached
            for shard in self._shards
        )

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
        batches: Sequence[Mapping[str, Tensor]],
        *,
        opened_at: int,
        least_bytes: int,
    ) -> Window:
        """Begin to copy rows of a coming checkpoint.

        Args:
            slot: a free slot, which the checkpoint will take.
            frozen: link and tables, as `link` returned them now.
            batches: the rows that coming batches look up, by table name, in order.
            opened_at: batches done.
            least_bytes: bytes to reserve in the slot, if the rows take less.
        """
        is_full = frozen.link.kind == "full"
        parts = []
        for live in frozen.tables:
            part = self._part(live, len(live.held))
            tracker = self._trackers.get(live.key)
            if tracker is not None:
                tracker.check_version()
                if not (is_full or tracker.all_rows):  # the window counts the rows
                    part = replace(part, bitmap=tracker.bitmap)
            parts.append(part)
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

    def announce(self) -> None:
        """Say that this rank takes a checkpoint next, or ends training; see `Cache.announce_cut`.

        Raises:
            RanksDiffer: ranks that share rows do different things.
        """
        if self._cache is not None:
            self._cache.announce_cut()

    def settle(self) -> Callable[[], None]:
        """Prepare for a cut, which must follow before training goes on.

        With several ranks, each must call it, also if its own cut then fails.

        Returns:
            What to call at the end of the stall, also after an error; see `Cache.settle`.

        Raises:
            HomeError: rows of a cached table cannot be written to their home.
            RankLost: a rank does not answer.
        """
        if self._cache is None:
            return lambda: None
        cache = self._cache
        self._at_home = frozenset(
            name for name in cache.tables if self._at_servers and cache.stages_at_home(name)
        )
        return cache.settle(writes_back=self._at_servers)

    def cut(
        self, slot: Slot, request: CutRequest, *, started_ns: int, window: Window | None = None
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

    def _cut_ahead(self, window: Window, request: CutRequest, moment: CutMoment) -> Cut | None:
        """Cut a checkpoint of which rows were copied before; None: the window is void.

        Raises:
            StagingFull, StagingError, SettingsError: as `cut`.
        """
        dirty_rows: dict[str, Dirty] = {}
        try:
            # First, because a `state_dict` that changes tables or looks rows up must not do so
            # after their marks were taken. This takes longer than to copy the rows that are left.
            state = self._captured(request.step)
            if not window.close():
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
            device = DeviceDrain()  # stays empty: no table is on a GPU
            specs, held_rows = (
                [part.spec for part in plan.parts],
                [part.held for part in plan.parts],
            )
            sample = self._sampler.draw(specs, held_rows, request.attempt)
            behind = behind_tables(plan.parts, plan.tables_end, *state, sample, device)
            self._has_large_state = not behind.is_small
            moves = window.finish(plan, behind)
            copied = CopiedCut(behind, device, moves, _copied_ahead(window.copied))
            return self.seal(plan, request, copied, window.slot, dirty_rows, moment)
        except BaseException:
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
        device = DeviceDrain(None if self._cache is None else self._cache.view())

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
            cache=self._cache_use(),
            full_bytes=behind.full_bytes,
            interval_batches=request.interval_batches,
            history=request.history,
            served=self._served(plan.parts, ref.attempt),
        )
        return Cut(snapshot, pending)

    def _served(self, parts: Sequence[CutTable], attempt: str) -> ServedTables | None:
        """Return what embedding servers stage of the checkpoint; None: nothing, on all ranks."""
        cache = self._cache
        if cache is None or not self._at_home:
            return None
        indexes = {
            part.in_cache: position
            for position, part in enumerate(parts)
            if part.in_cache is not None
        }
        part = part_of(cache.home, indexes, attempt)
        return ServedTables(part=part, tables=tuple(part.staged_at_servers for part in parts))

    def _cache_use(self) -> CacheUse | None:
        """Return what the cache did since the cut before."""
        if self._cache is None:
            return None
        previous, now = self._used, self._cache.stats
        self._used = now
        return CacheUse(
            hits=now.hits - previous.hits,
            misses=now.misses - previous.misses,
            fetched_rows=now.fetched_rows - previous.fetched_rows,
            fetched_bytes=now.fetched_bytes - previous.fetched_bytes,
            written_rows=now.written_rows - previous.written_rows,
            written_bytes=now.written_bytes - previous.written_bytes,
            wait_us=round(1e6 * (now.wait_seconds - previous.wait_seconds)),
            window=now.window,
        )

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

    def _part(
        self,
        live: LiveTable,
        row_count: int,
        dirty: Dirty | None = None,
        precision: ChosenPrecision | None = None,
    ) -> CutTable:
        width: int = 8 * item_bytes(live.spec.dtype)
        if live.table is not None:
            chosen = in_bits(self._widths[live.key], precision)
            # Exact means the width of the present dtype: `model.half()` may have changed it.
            width = chosen if chosen in CODE_BITS else width
        in_cache = None if live.table is None else live.table.name_in_cache
        return CutTable(
            spec=live.spec,
            held=live.held,
            values=live.weight,
            row_states=live.row_states,
            bitmap=dirty.bitmap if dirty is not None and row_count < len(live.held) else None,
            row_count=row_count,
            bits=width,
            quantizer=self._precision.quantizer,
            state_bits=None if self._precision.state == "lossless" else 16,
            in_cache=in_cache,
            at_servers=in_cache in self._at_home,
        )

    def _name_methods(self, parts: list[CutTable], link: ChainLink, step: int) -> None:
        """Set the method of each part whose quantization method is known."""
        for index, (shard, part) in enumerate(zip(self._shards, parts, strict=True)):
            if shard.table is not None:
                method = self._quantizer.method(shard.table, part.bits, base=link.base, step=step)
                if method is not None:
                    parts[index] = replace(part, method=method)

    def _quantize(self, parts: list[CutTable]) -> None:
        """Give parts codes instead of values if their rows are quantized in this process."""
        requests: dict[int, RowsToCode] = {}
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
            requests[index] = RowsToCode(table, part.bits, part.method, ids, part.row_count)
        for index, codes in zip(requests, self._quantizer.codes([*requests.values()]), strict=True):
            parts[index] = replace(parts[index], codes=codes)


def _marked(tables: Sequence[LiveTable], dirty: Mapping[str, Dirty]) -> MarkedRows:
    """Count the rows to store: the dirty rows, or all rows of a table not in `dirty`.

    Waits for the devices of the tables.
    """
    bitmaps: list[Tensor | None] = []
    for live in tables:
        dirty_rows = dirty.get(live.key)
        bitmaps.append(None if dirty_rows is None or dirty_rows.all_rows else dirty_rows.bitmap)
    return MarkedRows(bitmaps, [len(live.held) for live in tables])


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
