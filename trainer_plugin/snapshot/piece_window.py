"""Copies a full before its cut where tables are on a GPU: the window from its opening to the cut.

A GPU runs later what training calls now, on streams whose order only training knows. So the window
relies on no order between streams, but on two moments at which each device has nothing to do:

1. **Opening.** Marks go to clean bitmaps, and then training waits for the devices. All changes that
   training has called are made, and each change that it calls later is marked in these bitmaps.
2. **After each batch** a piece or two are copied (`piece_copier`), at any time that suits the
   device. So a copy holds a row as it was at the opening or later, or torn between two changes.
3. **The cut.** Training waits for the devices again: all copies, changes and marks are made. The
   rows in the clean bitmaps are copied again. All other rows have not changed since the opening.

If anything else than marked rows changed, the window is void: the marks return to their trackers,
and the cut is a plain one. The staged bytes are those of a plain cut in any case.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from recpoint.catalog.staging.slot import Placed, Slot
from recpoint.embeddings.tables.marks import Dirty, Tracker
from recpoint.kernels import dirty_bitmap
from recpoint.kernels.arguments import require_dense
from recpoint.trainer_plugin.schedule.ledger import CopiedRows
from recpoint.trainer_plugin.snapshot.codes import DeviceDrain
from recpoint.trainer_plugin.snapshot.copy import (
    BehindTables,
    copied_bytes,
    copy_tables,
    parts_beside,
)
from recpoint.trainer_plugin.snapshot.device_copies import DeviceCopies, copies_of
from recpoint.trainer_plugin.snapshot.final_places import Move
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.piece_copier import PieceBuffers, PieceCopier, TableRoom
from recpoint.trainer_plugin.snapshot.plan import CutPlan, CutTable, place_tables
from recpoint.trainer_plugin.snapshot.window_marks import OpeningState, WindowMarks, WindowTable

__all__ = ["PieceWindow", "are_copied_in_pieces"]


def are_copied_in_pieces(tables: Sequence[LiveTable]) -> bool:
    """Whether a window of these tables is a `PieceWindow`: one of them is on a device."""
    return not all(live.weight.is_cpu for live in tables)


class PieceWindow:
    """A full whose rows are copied in pieces before its cut. Used by the training thread.

    Args:
        frozen: the checkpoint's link, and the tables as they are now.
        parts: the parts of all tables.
        slot: the slot that the checkpoint will take; nothing else may use it.
        trackers: trackers of the tables' dirty rows, none of them `unapplied`.
        least_bytes: bytes to reserve in the slot if the rows take less, for what lies behind them.

    Attributes:
        frozen, slot: as given.
        reason: why the window is void; None: it is not.
        failure: None; the window needs no plan.
        copied: the rows that were copied; None before `finish`.
        has_unmarked_changes: whether rows that were copied differed from the table at the cut,
            and nothing had marked them.

    Raises:
        ValueError: the checkpoint is no full.
    """

    def __init__(
        self,
        *,
        frozen: OpeningState,
        parts: Sequence[CutTable],
        slot: Slot,
        trackers: Mapping[str, Tracker],
        least_bytes: int,
    ) -> None:
        if frozen.link.kind != "full":
            raise ValueError(f"kind: {frozen.link.kind}, expected a full")
        self.frozen, self.slot = frozen, slot
        self.reason: str | None = None
        self.failure: Exception | None = None
        self.copied: CopiedRows | None = None
        self.has_unmarked_changes = False
        self._placed, self._end = place_tables(parts)
        self._thread = ThreadPoolExecutor(1, "recpoint-ahead")
        self._opened_seconds = time.monotonic()
        self._copy_seconds: float | None = None
        # Rows and bytes that were copied before the stall, and in it.
        self._rows_before = self._bytes_before = 0
        self._rows_in_stall = self._bytes_in_stall = 0
        self._devices: dict[torch.device, DeviceCopies] = {}
        self._buffers: dict[torch.device, PieceBuffers] = {}
        self._copiers: dict[torch.device, PieceCopier] = {}
        self._by_device: dict[torch.device, list[WindowTable]] = {}
        self._marks = WindowMarks(frozen.tables, trackers)
        try:
            for table in self._marks.tables:
                for array in table.arrays:
                    _require_on(table, array)
                if table.aside.rows:
                    self._by_device.setdefault(table.live.weight.device, []).append(table)
            self._devices = {device: copies_of(device) for device in self._by_device}
            for device, tables in self._by_device.items():
                self._buffers[device] = PieceBuffers(
                    self._devices[device], [table.arrays for table in tables]
                )
            # A slot that is extended is mapped anew, which takes too long for training to wait.
            self._room: Future[None] = self._thread.submit(
                slot.reserve, max(self._end, least_bytes)
            )
            self._wait_for_devices()
        except (RuntimeError, MemoryError, ValueError) as error:
            # Not raised: a window that is void is not opened again in the next batch.
            self.void(str(error))

    def _wait_for_devices(self) -> None:
        for copies in self._devices.values():
            copies.wait_for_all()

    @property
    def size_bytes(self) -> int:
        """Bytes that the window takes beside its slot: bitmaps of marks, and buffers."""
        buffers = sum(buffers.size_bytes for buffers in self._buffers.values())
        return self._marks.size_bytes + buffers

    @property
    def bytes_a_second(self) -> float:
        """How fast rows were copied before the cut, from the opening on; 0: none was."""
        return self._bytes_before / self._copy_seconds if self._copy_seconds else 0.0

    @property
    def _rows(self) -> int:
        """Rows of all tables that are copied."""
        return sum(table.aside.rows for tables in self._by_device.values() for table in tables)

    def advance(self, batches_done: int, batches_to_come: int | None) -> None:
        """Begin to copy the next pieces, after a batch.

        Args:
            batches_done, batches_to_come: as for `Window`; the pieces do not depend on them.
        """
        if self.reason is not None:
            return
        reason = self._marks.why_void()
        if reason is not None:
            self.void(reason)
        elif self._room.done():
            self._begin()
            for copier in self._copiers.values():
                copier.step()
            self._note_pace()

    def _begin(self) -> None:
        """Plan the pieces, once the slot is reserved."""
        if self._copiers:
            return
        self._room.result()  # raises why there is no room
        by_name = {spot.name: spot for spot in self._placed}
        for device, tables in self._by_device.items():
            rooms = [TableRoom(self._arrays(table, by_name)) for table in tables]
            self._copiers[device] = PieceCopier(self._buffers[device], rooms, self._thread)

    def _arrays(
        self, table: WindowTable, by_name: Mapping[str, Placed]
    ) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return each array of a table with its room in the slot, both as bytes."""
        data = self.slot.data
        pairs = []
        for name, source in zip(table.array_names, table.arrays, strict=True):
            spot = by_name[name]
            room = data[spot.offset : spot.end].view(table.aside.rows, -1)
            pairs.append((_bytes_of_rows(source.detach()), room))
        return tuple(pairs)

    def _note_pace(self) -> None:
        copiers = self._copiers.values()
        self._rows_before = sum(copier.rows_copied for copier in copiers)
        self._bytes_before = sum(copier.bytes_copied for copier in copiers)
        if self._copy_seconds is None and self._rows_before >= self._rows:
            self._copy_seconds = time.monotonic() - self._opened_seconds

    def void(self, reason: str) -> None:
        """End the window without a checkpoint: its marks return to their trackers.

        Args:
            reason: why, for `CopiedRows.why_plain`.
        """
        self.reason = self.reason or reason
        for copier in self._copiers.values():
            copier.give_up()
        self._thread.shutdown(cancel_futures=True)  # the slot is the plain cut's from here on
        # Bitmaps are merged on one stream, and training may mark on others: before it and after it,
        # no mark is under way.
        self._settle_marks()
        self._marks.give_back()
        self._settle_marks()
        self._copiers.clear()
        self._buffers.clear()

    def _settle_marks(self) -> None:
        """Wait for the devices; if one has failed, no mark on it counts."""
        try:
            self._wait_for_devices()
        except RuntimeError as error:
            for table in self._marks.tables:
                table.tracker.give_up(error)

    def close(self) -> bool:
        """Copy the rows that are left, at the cut; `end` must follow for each table.

        Returns:
            False: the window is void.
        """
        reason = self._marks.why_void_at_cut()
        if self.reason is None and reason is not None:
            self.void(reason)
        if self.reason is None and not (self._room.done() and self._room.exception() is None):
            failure = self._room.exception() if self._room.done() else None
            self.void("it was not planned in time" if failure is None else str(failure))
        if self.reason is None and not self._has_slot():
            self.void("its slot was removed from the staging area")
        if self.reason is not None:
            return False
        try:
            self._begin()
            # The copies of a CUDA stream are among all that a device has been given.
            self._wait_for_devices()
            for copier in self._copiers.values():
                copier.settle()
            self._note_pace()
            self._copy_seconds = self._copy_seconds or time.monotonic() - self._opened_seconds
            if 2 * self._rows_before < self._rows:
                # A plain cut would be as fast, and copies no row twice.
                self.void("too few rows were copied before: open its window earlier")
                return False
            self._copy_rest()
        except (RuntimeError, MemoryError, ValueError) as error:
            self.void(str(error))
            return False
        self._thread.shutdown()
        return True

    def _has_slot(self) -> bool:
        """Whether the slot is still the file that rows were copied to."""
        try:
            return self.slot.is_there()
        except OSError:
            return False

    def _copy_rest(self) -> None:
        """Copy what was not copied before, then the rows that have changed; move their marks."""
        for device, copier in self._copiers.items():
            tables = self._by_device[device]
            rows_before, bytes_before = copier.rows_copied, copier.bytes_copied
            copied_before = copier.finish()
            self._rows_in_stall += copier.rows_copied - rows_before
            self._bytes_in_stall += copier.bytes_copied - bytes_before
            marked = dirty_bitmap.collect_many(
                [table.fresh for table in tables], rows=[table.aside.rows for table in tables]
            )
            for number, (marked_ids, rows) in enumerate(zip(marked, copied_before, strict=True)):
                ids = marked_ids.cpu()
                # Ids ascend, and rows that were copied just now need no second copy.
                changed_ids = ids[: int(torch.searchsorted(ids, rows))]
                self._bytes_in_stall += copier.copy_again(number, changed_ids)
                self._rows_in_stall += changed_ids.numel()
            for table in tables:
                dirty_bitmap.merge(table.aside.bitmap, table.fresh)
                dirty_bitmap.clear(table.fresh)
        # Training may mark on another stream than the one on which the bitmaps were cleared.
        self._wait_for_devices()

    def copies(self) -> Iterator[tuple[LiveTable, list[Tensor]]]:
        """Yield each table with the copies of its values and row states, after `close`."""
        by_name = {spot.name: spot for spot in self._placed}
        for table in self._marks.tables:
            if table.aside.rows:
                yield (
                    table.live,
                    [by_name[name].view(self.slot.data) for name in table.array_names],
                )

    def end(self, name: str, *, keep: bool) -> Dirty | None:
        """Return the dirty rows of a table, as `WindowMarks.end`."""
        return self._marks.end(name, keep=keep)

    def finish(self, plan: CutPlan, behind: BehindTables, device: DeviceDrain) -> tuple[Move, ...]:
        """Copy the tables that are not copied ahead, and everything behind the tables.

        Args:
            plan: plan of a plain cut at this moment.
            behind: what lies behind the tables.
            device: brings rows of other tables from a GPU.

        Returns:
            No move: all lies where a plain cut would put it.

        Raises:
            StagingFull, StagingError: as `Slot.grow`.
            ValueError: a plain cut would put rows elsewhere.
        """
        if plan.placed != self._placed:
            raise ValueError(f"places: {plan.placed}, expected {self._placed}")
        self.slot.grow(plan.tables_end)
        other_parts = parts_beside(plan.parts, {table.number for table in self._marks.tables})
        copy_tables(self._placed, self.slot.data, other_parts, plan.marked, device, lambda: None)
        self.copied = CopiedRows(
            rows_before=self._rows_before,
            bytes_before=self._bytes_before,
            rows_in_stall=self._rows_in_stall + sum(part.row_count for part in other_parts),
            bytes_in_stall=self._bytes_in_stall + copied_bytes(other_parts),
            why_plain=None,
        )
        behind.write(self.slot)
        return ()

    def join(self) -> None:
        """Do nothing: a window that is over has no thread."""


def _require_on(table: WindowTable, array: Tensor) -> None:
    """Refuse an array on another device than its table, or whose rows do not lie in order."""
    device, name = table.live.weight.device, table.live.spec.name
    if array.device != device:
        raise ValueError(f"table {name!r}: a row state on {array.device}, expected {device}")
    require_dense(f"table {name!r}", array)


def _bytes_of_rows(array: Tensor) -> Tensor:
    """Return a view of the bytes of an array [rows, …]: uint8 [rows, n]."""
    return array.view(-1).view(torch.uint8).view(array.shape[0], -1)
