"""Copies rows of a checkpoint before its cut: the window from its opening to the cut.

When a window opens, marking moves to clean bitmaps. A thread plans which row is final after which
batch (`lookahead.plan`), and gives each predicted row a place in the slot. Then it copies rows that
are final. After each batch, the training thread hands over the rows that the batch looked up last.
At the cut, the training thread copies what is left.

If the coming batches are not known, only a full can be copied before its cut, because each row of a
full has a place, equal to its id. All rows are final when the window opens, as far as the plan
knows. Once the thread has copied them, rows that were marked meanwhile are handed over again, and
again each time when half of the batches until the cut are done. The cut copies what changed since.

The plan is a hint, the marks are the truth. A row that changes after it was handed over is marked
by that change, and is copied once more at the cut. A row that is marked and has no place goes to
the tail. If anything else than marks changed, the window is void: the marks return to their
trackers, and the cut is a plain one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.staging.slot import Placed, Slot
from recpoint.embeddings.tables.marks import Dirty, Tracker
from recpoint.kernels import dirty_bitmap, row_gather
from recpoint.kernels.copy_ahead import Copier, TableAhead
from recpoint.lookahead.plan import TablePlan, plan_table
from recpoint.trainer_plugin.schedule.ledger import CopiedRows
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.copy import (
    BehindTables,
    copied_bytes,
    copy_state,
    copy_tables,
    parts_beside,
)
from recpoint.trainer_plugin.snapshot.final_places import Move, MovedTable
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.moved_memory import MovedMemory
from recpoint.trainer_plugin.snapshot.plan import (
    CutPlan,
    CutTable,
    place_state,
    place_tables,
)
from recpoint.trainer_plugin.snapshot.window_marks import OpeningState, WindowMarks, WindowTable

__all__ = ["Window"]

#: How often a window that waits for rows looks whether it is over.
_POLL_SECONDS = 0.05

#: A copy is taken to need no less.
_LEAST_SECONDS = 1e-6

_ID_BYTES = 8

#: More batches than any window has.
_FIRST_ROUND = sys.maxsize

#: The most bytes of rows without a place. More make the cut a plain one.
_TAIL_BYTES = 16 << 20


class Window:
    """A checkpoint of which rows are copied before its cut. Used by the training thread.

    Args:
        frozen: the checkpoint's link, and the tables as they are now.
        parts: the parts of all tables; an increment's with their bitmaps. Rows are counted later.
        slot: the slot that the checkpoint will take; nothing else may use it.
        trackers: trackers of the tables' dirty rows, none of them `unapplied`.
        batches: the rows that coming batches look up, by `Table.key`, in order, as soon as they are
            known. If they never are: one batch without rows, for a full.
        opened_at: number of batches done before the first of `batches`.
        least_bytes: bytes to reserve in the slot if the rows take less, for what lies behind them.
        share: the share of its time that the copying thread copies.

    Attributes:
        frozen, slot, opened_at: as given.
        reason: why the window is void; None: it is not.
        failure: why the window could not be planned; None: it was, or may still be.
        copied: the rows that were copied; None before `finish`.
        has_unmarked_changes: whether rows that were copied differed from the table at the cut,
            and nothing had marked them.
    """

    def __init__(
        self,
        *,
        frozen: OpeningState,
        parts: Sequence[CutTable],
        slot: Slot,
        trackers: Mapping[str, Tracker],
        batches: Future[Sequence[Mapping[str, Tensor]]],
        opened_at: int,
        least_bytes: int,
        share: float,
    ) -> None:
        self.frozen, self.slot, self.opened_at = frozen, slot, opened_at
        self.reason: str | None = None
        self._parts = tuple(parts)
        self._batches: Future[Sequence[Mapping[str, Tensor]]] | None = batches
        self._knows_batches = False
        self._share = share
        self._least_bytes = least_bytes
        self._lock = threading.Lock()  # held while the thread changes from planning to copying
        self._is_over = False
        self.failure: Exception | None = None
        self._copier: Copier | None = None
        self._moved_memory: MovedMemory | None = None
        self._plans: list[TablePlan] = []
        self._tails: list[_Tail] = []
        self._placed: tuple[Placed, ...] = ()
        self._end = 0
        self._marks = WindowMarks(frozen.tables, trackers)
        self._tables = self._marks.tables
        self.copied: CopiedRows | None = None
        self.has_unmarked_changes = False
        self._opened_seconds = time.monotonic()
        # How long the thread has copied, up to the last row or the end, and how many bytes; None:
        # it still copies.
        self._copy_seconds: float | None = None
        self._timed_bytes = 0
        # Of a full without known batches: how many copies of rows the thread was asked for, and at
        # how many batches before the cut it is next asked for more.
        self._asked_rows = 0
        self._next_round = _FIRST_ROUND
        self._versions = [ahead.tracker.version for ahead in self._tables]
        self._handed = [0] * len(self._tables)
        self._thread = threading.Thread(target=self._run, name="recpoint-ahead", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # from Python: "can't start new thread"
            self.void(f"no thread could be started ({error})")

    def _run(self) -> None:
        try:
            copier = self._planned()
        except Exception as error:  # told by `void`; a cut without a window meets it again
            self.failure = error
            return
        if copier is not None:
            copier.run(self._share)

    def _planned(self) -> Copier | None:
        """Plan the window and begin to copy; None: it is over already."""
        batches = self._awaited_batches()
        if batches is None:
            return None
        self._knows_batches = any(batches)
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        parts = list(self._parts)
        plans = []
        for ahead in self._tables:
            if self._is_over:
                return None
            part = parts[ahead.number]
            plan = plan_table(
                [batch.get(ahead.live.key, nothing) for batch in batches],
                rows=ahead.aside.rows,
                marked=part.bitmap,
                seen=dirty_bitmap.new(ahead.aside.rows),
            )
            is_whole = plan.first_places is None
            parts[ahead.number] = replace(
                part, row_count=plan.placed, bitmap=None if is_whole else part.bitmap
            )
            plans.append(plan)
        placed, end = place_tables(parts)
        with self._lock:
            if self._is_over:
                return None
            # Here and not in the stall: to extend a slot maps all of it anew.
            self.slot.reserve(max(end, self._least_bytes))
            self._parts, self._plans, self._placed, self._end = tuple(parts), plans, placed, end
            arrays = [array for ahead in self._tables for array in ahead.arrays]
            self._moved_memory = MovedMemory(arrays, self._stop)
            self._copier = Copier([self._ahead(ahead, plan) for ahead, plan in self._pairs()])
            return self._copier

    def _awaited_batches(self) -> Sequence[Mapping[str, Tensor]] | None:
        """Wait for the rows of the coming batches; None: the window is over before."""
        future, self._batches = self._batches, None
        assert future is not None
        while not (future.done() or self._is_over):
            wait([future], timeout=_POLL_SECONDS)
        return None if self._is_over else future.result()

    def _pairs(self) -> list[tuple[WindowTable, TablePlan]]:
        return list(zip(self._tables, self._plans, strict=True))

    def _ahead(self, table: WindowTable, plan: TablePlan) -> TableAhead:
        by_name = {spot.name: spot for spot in self._placed}
        data, index = self.slot.data, table.number
        arrays = []
        if plan.placed:
            arrays.append((table.live.weight.detach(), by_name[f"t{index}.values"].room(data)))
            for number, state in enumerate(table.live.row_states):
                spot = by_name[f"t{index}.state.{number}"]
                arrays.append((state.detach(), spot.room(data)))
        ids = by_name.get(f"t{index}.ids")
        return TableAhead(
            rows=plan.rows,
            fresh=table.fresh,
            taken=table.aside.bitmap,
            seen=plan.seen,
            uses=plan.uses,
            places=plan.places,
            first_places=plan.first_places,
            ids=None if ids is None else ids.room(data),
            arrays=tuple(arrays),
        )

    @property
    def size_bytes(self) -> int:
        """Bytes that the window takes beside its slot.

        For each table: one more bitmap of marks, the bitmap of the rows that are looked up, and
        the plan, as soon as it is made; and the ids of all rows that were copied again.
        """
        plan_bytes = sum(plan.seen.nbytes + plan.size_bytes for plan in self._plans)
        return self._marks.size_bytes + plan_bytes + _ID_BYTES * self._asked_rows

    @property
    def bytes_a_second(self) -> float:
        """How fast the thread has copied, pauses included, once the window is over; 0: no row."""
        return self._timed_bytes / max(self._copy_seconds or 0.0, _LEAST_SECONDS)

    def _note_pace(self, copier: Copier) -> None:
        """Note how long the thread has copied, the first time."""
        if self._copy_seconds is None:
            self._copy_seconds = time.monotonic() - self._opened_seconds
            _, self._timed_bytes, *_ = copier.copied()

    @property
    def _placed_rows(self) -> int:
        return sum(plan.placed for plan in self._plans)

    def advance(self, batches_done: int, batches_to_come: int | None) -> None:
        """Hand over the rows that the batches done so far looked up last.

        A row waits if its gradient may not be applied yet.

        Args:
            batches_done: number of batches done.
            batches_to_come: batches until the checkpoint is due; None: unknown.
        """
        copier = self._copier
        if copier is None or self.reason is not None:
            return
        trained = min(batches_done - self.opened_at, copier.batches)
        reason = self._marks.why_void()
        if reason is not None:
            self.void(reason)
            return
        for number, ahead in enumerate(self._tables):
            tracker = ahead.tracker
            if tracker.unapplied:
                continue  # looked up, and no step of its optimizer has followed
            if tracker.by_gradient and tracker.version == self._versions[number]:
                continue  # the same: its optimizer has not stepped since rows were handed over
            self._versions[number], self._handed[number] = tracker.version, trained
        try:
            copier.hand_over(self._handed)
            if not self._knows_batches and batches_to_come:
                self._hand_over_changed(copier, batches_to_come)
        except MemoryError as error:
            self.void(str(error))

    def _hand_over_changed(self, copier: Copier, batches_to_come: int) -> None:
        """Have the rows copied again that changed since their copy, if the thread waits for rows.

        Each round looks at all bitmaps. So the rounds lie at halves of the way to the cut: the last
        one leaves the rows of a batch or two.
        """
        rows_before, *_ = copier.copied()
        if rows_before < self._placed_rows + self._asked_rows:
            return
        self._note_pace(copier)
        if batches_to_come > self._next_round:
            return
        self._next_round = batches_to_come // 2
        for number, ahead in enumerate(self._tables):
            if not ahead.tracker.unapplied:
                self._asked_rows += copier.hand_over_marked(number)

    def void(self, reason: str) -> None:
        """End the window without a checkpoint: its marks return to their trackers.

        Args:
            reason: why, for `CopiedRows.why_plain`.
        """
        self._stop()
        self.reason = self.reason or reason
        self._marks.give_back()

    def _stop(self) -> None:
        with self._lock:
            self._is_over = True
        if self._copier is not None:
            self._copier.stop()
            self._note_pace(self._copier)
        if self._moved_memory is not None:
            self._moved_memory.close()

    def close(self) -> bool:
        """Copy the rows that are left, at the cut; `end` must follow for each table.

        Returns:
            False: the window is void.
        """
        self._stop()
        copier, tables = self._copier, self._tables
        if self.reason is None and copier is None:
            failure = self.failure
            self.void("it was not planned in time" if failure is None else str(failure))
        reason = self._marks.why_void_at_cut()
        if self.reason is None and reason is not None:
            self.void(reason)
        if self.reason is None and not self._has_slot():
            self.void("its slot was removed from the staging area")
        if self.reason is None and copier is not None and self._is_slower_than_plain(copier):
            self.void("too few rows were copied before: open its window earlier")
        if self.reason is not None or copier is None:
            return False
        try:
            copier.hand_over([copier.batches] * len(tables))
            remaining = copier.left()
            tails = [rows.unplaced for rows in remaining]
            tail_bytes = sum(
                ids.numel() * sum(array[:1].nbytes for array in ahead.arrays)
                for ahead, ids in zip(tables, tails, strict=True)
            )
            if tail_bytes > _TAIL_BYTES:
                self.void(f"rows of {tail_bytes} bytes changed that no coming batch looked up")
                return False
            copier.finish(remaining)
            self._tails = [_tail(ahead, ids) for ahead, ids in zip(tables, tails, strict=True)]
        except MemoryError as error:
            self.void(str(error))
            return False
        return True

    def _is_slower_than_plain(self, copier: Copier) -> bool:
        """Whether a plain cut copies all rows of a full faster than the copier those that are left.

        A plain cut copies tables from end to end, in half the time a row.
        """
        rows_before, *_ = copier.copied()
        return not self._knows_batches and 2 * rows_before < self._placed_rows

    def copies(self) -> Iterator[tuple[LiveTable, list[Tensor]]]:
        """Yield each table of a full with the copies of its values and row states, after `close`.

        Nothing of an increment, which has no rows that nobody marked.
        """
        by_name = {spot.name: spot for spot in self._placed}
        for ahead, plan in self._pairs() if self.frozen.link.kind == "full" else ():
            if plan.placed:
                names = ahead.array_names
                yield ahead.live, [by_name[name].view(self.slot.data) for name in names]

    def _has_slot(self) -> bool:
        """Whether the slot is still the file that rows were copied to."""
        try:
            return self.slot.is_there()
        except OSError:
            return False

    def end(self, name: str, *, keep: bool) -> Dirty | None:
        """Return the dirty rows of a table, as `Tracker.end_window`; None: it is not copied ahead.

        Args:
            name: `Table.key`.
            keep: the rows stay dirty.
        """
        return self._marks.end(name, keep=keep)

    def finish(self, plan: CutPlan, behind: BehindTables, device: DeviceDrain) -> tuple[Move, ...]:
        """Copy the tables that are not copied ahead, and everything behind the tables.

        Args:
            plan: plan of a plain cut at this moment.
            behind: what lies behind the tables.
            device: brings rows from a GPU; stays without rows here, where no table is on one.

        Returns:
            The moves of `move_to_final_places`; nothing: all lies where a plain cut would put it.

        Raises:
            StagingFull, StagingError: as `Slot.grow`.
        """
        self.slot.grow(max(self._end, plan.tables_end))
        data = self.slot.data
        other_parts = parts_beside(plan.parts, {ahead.number for ahead in self._tables})
        copy_tables(self._placed, data, other_parts, plan.marked, device, lambda: None)
        self.copied = self._counted(other_parts)
        if self._placed == plan.placed and not any(tail.ids.numel() for tail in self._tails):
            behind.write(self.slot)
            return ()
        end = max(self._end, plan.tables_end)
        state, state_end = place_state(behind.tree, behind.tensors, end)
        self.slot.grow(max(state_end, behind.slot_bytes))
        copy_state(state, self.slot.data, behind.tree, behind.tensors)
        moves = self._moves(plan)
        return (
            *moves,
            *(Move(source=a, target=b) for a, b in zip(state, behind.placed, strict=True)),
        )

    def _moves(self, plan: CutPlan) -> list[Move]:
        """Return the moves of the tables' arrays, in the order in which they lie in the slot."""
        at_first = {spot.name: spot for spot in self._placed}
        at_last = {spot.name: spot for spot in plan.placed}
        moves: dict[str, Move] = {}
        if self.frozen.link.kind == "increment":
            for (ahead, table), tail in zip(self._pairs(), self._tails, strict=True):
                index = ahead.number
                moved_table = MovedTable(
                    rows=table.rows,
                    dirty=ahead.aside.bitmap.clone(),  # training goes on to change it
                    ids=at_last.get(f"t{index}.ids"),
                    provisional_ids=at_first.get(f"t{index}.ids"),
                    tail_ids=tail.ids,
                )
                for name, rows in zip(ahead.array_names, tail.arrays, strict=True):
                    if name in at_first and name in at_last:
                        moves[name] = Move(
                            source=at_first[name],
                            target=at_last[name],
                            table=moved_table,
                            tail=rows,
                        )
                    elif name in at_last:  # every row is in the tail
                        source = at_last[name]._replace(size_bytes=0)
                        moves[name] = Move(
                            source=source, target=at_last[name], table=moved_table, tail=rows
                        )
        for name, spot in at_first.items():
            if name not in moves and name in at_last and not name.endswith(".ids"):
                moves[name] = Move(source=spot, target=at_last[name])
        return [moves[spot.name] for spot in plan.placed if spot.name in moves]

    def _counted(self, other_parts: Sequence[CutTable]) -> CopiedRows:
        assert self._copier is not None
        rows_before, bytes_before, rows_in_stall, bytes_after = self._copier.copied()
        rows_in_stall += sum(part.row_count for part in other_parts)
        bytes_after += copied_bytes(other_parts)
        for tail in self._tails:
            rows_in_stall += tail.ids.numel()
            bytes_after += sum(array.nbytes for array in tail.arrays)
        return CopiedRows(
            rows_before=rows_before,
            bytes_before=bytes_before,
            rows_in_stall=rows_in_stall,
            bytes_in_stall=bytes_after,
            why_plain=None,
        )

    def join(self) -> None:
        """Wait for the end of the thread, after the window is over."""
        if self._thread.ident is not None:
            self._thread.join()


class _Tail(NamedTuple):
    """Rows of a table without a place, copied to memory outside the slot."""

    ids: Tensor
    arrays: tuple[Tensor, ...]


def _tail(table: WindowTable, ids: Tensor) -> _Tail:
    arrays = []
    for source in table.arrays:
        out = torch.empty((ids.numel(), *source.shape[1:]), dtype=source.dtype, device="cpu")
        row_gather.gather(source.detach(), ids, out)
        arrays.append(out)
    return _Tail(ids, tuple(arrays))
