"""Opens a window before each checkpoint that is due, so that its rows are copied before its cut."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from recpoint.embeddings.tables.marks import Tracker
from recpoint.format.dtypes import array_bytes
from recpoint.format.job import StagedTable
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.pipeline.coming_rows import BatchIds, ComingRows, WindowRows
from recpoint.trainer_plugin.pipeline.lead import FullsLead
from recpoint.trainer_plugin.policy import ChainLink
from recpoint.trainer_plugin.ranks.row_exchange import RowsUnknown
from recpoint.trainer_plugin.schedule.ledger import CopiedRows, Ledger
from recpoint.trainer_plugin.snapshot.cut import Cut, Cutter
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.piece_window import PieceWindow, are_copied_in_pieces
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.snapshot.window import Window
from recpoint.trainer_plugin.snapshot.window_marks import OpeningState

__all__ = ["Ahead"]


class Ahead:
    """Keeps the window of the next checkpoint. Used by the training thread only.

    An error here costs the window, never the checkpoint: the cut is then a plain one.

    Args:
        coming: knows the rows of coming batches; None: nobody does, so that only fulls have
            windows.
        lead: without these rows, says when the window of a full opens; with them, whether fulls
            have windows.
        cutter: cuts snapshots.
        trackers: trackers of the tables, by `Table.key`.
        ledger: knows the tip, and the slots in use.
        area: the staging area.
        is_free: returns whether a slot is free for one more checkpoint.
        full_bytes: returns the bytes that a full takes in a slot.

    Attributes:
        window: the window that is open; None: there is none.
    """

    def __init__(
        self,
        coming: ComingRows | None,
        lead: FullsLead,
        *,
        cutter: Cutter,
        trackers: Mapping[str, Tracker],
        ledger: Ledger,
        area: StagingArea,
        is_free: Callable[[], bool],
        full_bytes: Callable[[], int],
    ) -> None:
        self._coming = coming
        self._lead = lead
        # No window opens before the next checkpoint, because of its kind or its tables.
        self._is_declined = False
        self._cutter = cutter
        self._trackers = trackers
        self._ledger = ledger
        self._area = area
        self._is_free = is_free
        self._full_bytes = full_bytes
        # Why no window has opened; None: none was due.
        self._reason: str | None = None
        self._process = os.getpid()
        self.window: Window | PieceWindow | None = None
        # As in `Handoff`: Python would end the thread in the middle of a call.
        atexit.register(self._at_exit)

    @property
    def size_bytes(self) -> int:
        """Bytes of the batches that are read ahead, and of the open window."""
        window, coming = self.window, self._coming
        held_bytes = 0 if coming is None else coming.held_bytes
        return held_bytes + (0 if window is None else window.size_bytes)

    def is_near(self, batches_done: int, batches_to_come: int | None) -> bool:
        """Whether `step` has something to do.

        Args:
            batches_done: batches done.
            batches_to_come: batches until the next checkpoint is due; None: unknown.
        """
        return self.window is not None or self._is_due(batches_done, batches_to_come)

    def _is_due(self, batches_done: int, batches_to_come: int | None) -> bool:
        """Whether a window may open, or other ranks are to be told of this rank's batches."""
        if batches_to_come is None:
            return False
        if self._coming is None:
            return not self._is_declined and self._lead.is_due(batches_done, batches_to_come)
        return self._coming.has_work(batches_done, batches_to_come)

    def step(self, batches_done: int, batches_to_come: int | None) -> None:
        """Hand rows over to the open window, or open one if a checkpoint is near.

        Args:
            batches_done, batches_to_come: as for `is_near`.
        """
        try:
            if batches_to_come is not None and self._is_due(batches_done, batches_to_come):
                if self._coming is not None:
                    # Whether or not a window opens: the others wait for what this rank tells.
                    self._coming.tell(batches_done, batches_to_come)
                if self._may_open(batches_to_come):
                    self._open(batches_done, batches_to_come)
            if self.window is not None:
                self.window.advance(batches_done, batches_to_come)
        except Exception as error:
            self._reason = str(error) or type(error).__name__
            if self.window is not None:
                self.window.void(self._reason)
            if came_from_handler(error):
                raise

    def _may_open(self, batches_to_come: int) -> bool:
        """Whether a window may open, after a window whose rows are not known has ended."""
        window = self.window
        if self._coming is not None and not self._coming.are_coming(batches_to_come):
            return False
        if window is None:
            return not self._is_declined
        if window.reason is not None or not isinstance(window.failure, RowsUnknown):
            return False
        window.void(str(window.failure))
        self.window = None
        return True

    def _open(self, batches_done: int, batches_to_come: int) -> None:
        if any(tracker.unapplied for tracker in self._trackers.values()):
            self._reason = "no optimizer step had followed the last lookups"
            return
        if not self._is_free():
            self._reason = "no slot was free: earlier checkpoints were not stored yet"
            return
        frozen = self._cutter.freeze(
            step=batches_done + batches_to_come,
            tip=self._ledger.tip,
            base_history=self._ledger.base_history,
        )
        declined = self._why_declined(frozen)
        if declined is not None:
            self._is_declined, self._reason = True, declined
            return
        rows = WindowRows(batches_done, _NO_ROWS)
        if self._coming is not None:
            rows = self._coming.rows(batches_done, batches_to_come)
        self.window = self._cutter.open_window(
            self._area.free_slot(self._ledger.busy_slots),
            frozen,
            rows.batches,
            opened_at=rows.batches_done,
            least_bytes=self._full_bytes(),
        )

    def _why_declined(self, frozen: OpeningState) -> str | None:
        """Return why the next checkpoint is to have no window; None: it has one."""
        is_full = frozen.link.kind == "full"
        if self._coming is not None:
            return _NO_FULLS if is_full and self._lead.batches == 0 else None
        if not is_full:
            return "it was to be an increment, and without a Lookahead only fulls are copied ahead"
        if are_copied_in_pieces(frozen.tables) and self._lead.batches is None:
            return _NOT_ASKED
        if all(tracker.all_rows for tracker in self._trackers.values()):
            return "every row of every table became dirty"
        return None

    def link_at_cut(self, link: ChainLink, tables: Sequence[LiveTable]) -> ChainLink:
        """Return the link of the checkpoint that is cut now: the window's, if it still fits.

        Args:
            link: the link of a plain cut.
            tables: the tables as they are now.
        """
        window = self.window
        if window is None or window.reason is not None:
            return link
        if self._coming is None and link.kind != "full":
            # The kind is that of a plain cut, so windows make no full more frequent.
            window.void("its policy chose an increment after all")
            return link
        reason = window.frozen.why_changed(self._ledger.tip, tables)
        if reason is not None:
            window.void(reason)
            return link
        return window.frozen.link

    def void(self, reason: str) -> None:
        """Have the checkpoint that is cut now copy all its rows in the stall."""
        if self.window is not None:
            self.window.void(reason)

    def take_copied(self, cut: Cut | None) -> CopiedRows:
        """Return what was copied for the checkpoint that was just cut; its window is over.

        Args:
            cut: the cut; None: it failed.
        """
        window, self.window = self.window, None
        copied = None if window is None else window.copied
        if copied is None:
            reason = None if window is None else window.reason
            copied = _copied_in_stall(cut, reason or self._reason or self._why_none_was_due())
        self._reason, self._is_declined = None, False
        if window is not None:
            self._lead.note_pace(window.bytes_a_second)
            if window.has_unmarked_changes:
                self._lead.refuse(
                    "rows of a full copied ahead had changed, and nothing marked them"
                )
        if cut is not None:
            self._note_stall(cut, copied)
        return copied

    def _why_none_was_due(self) -> str:
        return self._lead.reason if self._coming is None else _NOT_READ

    def _note_stall(self, cut: Cut, copied: CopiedRows) -> None:
        stall_seconds = time.monotonic() - cut.pending.cut_seconds
        if cut.snapshot.link.kind == "full":
            if copied.why_plain is None:
                self._lead.note_full_ahead(stall_seconds)
            else:
                self._lead.note_plain_full(stall_seconds, copied.bytes_in_stall)
        self._lead.note_cut(cut.snapshot.ref.step)

    def close(self) -> None:
        """End the window; its marks return to their trackers."""
        atexit.unregister(self._at_exit)
        window, self.window = self.window, None
        if window is not None:
            window.void("training ended")
            window.join()

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self.close()


#: Rows of a full without a Lookahead: one batch that looks up nothing.
_NO_ROWS: Future[BatchIds] = Future()
_NO_ROWS.set_result([{}])

_NOT_ASKED = "a table is on a device, where only a number in copy_fulls_ahead opens a window"
_NOT_READ = "the coming batches were not known"
_NO_FULLS = "Options(copy_fulls_ahead=0) has fulls copied in their stalls"


def _copied_in_stall(cut: Cut | None, why_plain: str) -> CopiedRows:
    tables = () if cut is None else cut.snapshot.tables
    return CopiedRows(
        rows_before=0,
        bytes_before=0,
        rows_in_stall=sum(table.row_count for table in tables),
        bytes_in_stall=sum(table.row_count * _row_bytes(table) for table in tables),
        why_plain=why_plain,
    )


def _row_bytes(table: StagedTable) -> int:
    """Return the bytes of a row with its row states."""
    spec = table.spec
    states = sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
    return array_bytes(spec.dtype, (spec.dim,)) + states
