"""Opens a window before each checkpoint that is due, so that its rows are copied before its cut."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from recpoint.embeddings.tables.marks import Tracker
from recpoint.format.dtypes import array_bytes
from recpoint.format.job import StagedTable
from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.pipeline.coming_rows import BatchIds, ComingRows, WindowRows
from recpoint.trainer_plugin.policy import ChainLink
from recpoint.trainer_plugin.ranks.row_exchange import RowsUnknown
from recpoint.trainer_plugin.schedule.ledger import CopiedRows, Ledger
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from recpoint.trainer_plugin.snapshot.window import Window

__all__ = ["Ahead"]


class Ahead:
    """Keeps the window of the next checkpoint. Used by the training thread only.

    An error here costs the window, never the checkpoint: the cut is then a plain one.

    Args:
        coming: knows the rows of coming batches; None: nobody does, so that only fulls have
            windows.
        fulls_window: without these rows: how many batches before its cut a full's window opens.
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
        *,
        fulls_window: int = 0,
        cutter: Cutter,
        trackers: Mapping[str, Tracker],
        ledger: Ledger,
        area: StagingArea,
        is_free: Callable[[], bool],
        full_bytes: Callable[[], int],
    ) -> None:
        self._coming = coming
        self._fulls_window = fulls_window
        # Without `coming`: the next checkpoint is to be an increment, so no window opens before it.
        self._is_declined = False
        self._cutter = cutter
        self._trackers = trackers
        self._ledger = ledger
        self._area = area
        self._is_free = is_free
        self._full_bytes = full_bytes
        self._no_window = _NOT_DUE if coming is None else _NOT_READ
        self._reason = self._no_window
        self._process = os.getpid()
        self.window: Window | None = None
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
            return 0 < batches_to_come <= self._fulls_window and not self._is_declined
        return self._coming.has_work(batches_done, batches_to_come)

    def step(self, batches_done: int, batches_to_come: int | None) -> None:
        """Hand rows over to the open window, or open one if a checkpoint is near.

        Args:
            batches_done: batches done, none of them cut.
            batches_to_come: as for `is_near`.
        """
        try:
            if batches_to_come is not None and self._is_due(batches_done, batches_to_come):
                if self._coming is not None:
                    # Whether or not a window opens: the others wait for what this rank tells.
                    self._coming.tell(batches_done, batches_to_come)
                if self._may_open(batches_to_come):
                    self._open(batches_done, batches_to_come)
            if self.window is not None:
                self.window.advance(batches_done)
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
            return True
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
        if self._coming is None and frozen.link.kind != "full":
            self._is_declined = True
            self._reason = (
                "it was to be an increment, and without a Lookahead only fulls are copied ahead"
            )
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

    def link_at_cut(self, link: ChainLink, tables: Sequence[LiveTable]) -> ChainLink:
        """Return the link of the checkpoint that is cut now: the window's, if it still fits.

        Args:
            link: the link of a plain cut.
            tables: the tables as they are now.
        """
        window = self.window
        if window is None or window.reason is not None:
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

    def take_copied(self, tables: Sequence[StagedTable] | None) -> CopiedRows:
        """Return what was copied for the checkpoint that was just cut; its window is over.

        Args:
            tables: the tables of the checkpoint; None: it failed.
        """
        window, reason, self.window, self._reason = self.window, self._reason, None, self._no_window
        self._is_declined = False
        if window is not None and window.copied is not None:
            return window.copied
        reason = reason if window is None or window.reason is None else window.reason
        return CopiedRows(
            rows_before=0,
            bytes_before=0,
            rows_in_stall=sum(table.row_count for table in tables or ()),
            bytes_in_stall=sum(table.row_count * _row_bytes(table) for table in tables or ()),
            why_plain=reason,
        )

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

_NOT_READ = "the coming batches were not known"
_NOT_DUE = "it was not known before that it would be taken now"


def _row_bytes(table: StagedTable) -> int:
    """Return the bytes of a row with its row states."""
    spec = table.spec
    states = sum(array_bytes(state.dtype, state.shape) for state in spec.row_states)
    return array_bytes(spec.dtype, (spec.dim,)) + states
