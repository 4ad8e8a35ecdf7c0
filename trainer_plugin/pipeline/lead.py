"""Says when the window of a full opens, where the coming batches are not known.

If nobody has set a number of batches, it follows from what this process has measured: the stall of
its last full that was copied in the stall, how fast the copying thread copies, and how long a batch
takes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["FullsLead"]

_log = logging.getLogger("recpoint")

#: Fulls that stall training for longer are copied ahead, if nobody has set that.
_LONG_STALL_SECONDS = 0.05

#: The most batches before a cut at which a measured window opens.
_MOST_BATCHES = 10_000

#: How fast a thread copies rows, assumed until that is measured.
_ASSUMED_BYTES_A_SECOND = 1e9

#: A window opens earlier than measured by this factor, because the next batches may be faster, and
#: the copy slower.
_MARGIN = 1.5

#: A window that opened too late may have met a busy moment. So it makes the assumed pace at most
#: this many times slower, and each full that had no time for a window makes it faster by
#: `_RETRY_FACTOR`, until a window is tried again.
_SLOWER_FACTOR = 2
_RETRY_FACTOR = 1.25

_NOT_DUE = "it was not known before that it would be taken now"


class _PlainFull(NamedTuple):
    """A full that was copied in its stall.

    Attributes:
        stall_seconds: how long its copy took.
        row_bytes: bytes of the rows of its tables, with their row states.
    """

    stall_seconds: float
    row_bytes: int


class FullsLead:
    """Chooses the lead of a full: how long before its cut its window opens.

    Args:
        batches: lead in batches; 0: fulls have no windows; None: it is measured.
        share: the share of its time that the copying thread copies.
        batches_done: batches done at the start.
        clock: returns monotonic seconds.

    Attributes:
        batches: as given.
    """

    def __init__(
        self,
        batches: int | None,
        *,
        share: float,
        batches_done: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batches = batches
        self._clock = clock
        self._plain: _PlainFull | None = None
        self._bytes_a_second = _ASSUMED_BYTES_A_SECOND * share
        # Batches done and seconds at the last two cuts, or at the start: batches are measured from
        # the older one, because the first batches after a cut may be fast.
        self._cuts_at = deque([(batches_done, clock())], maxlen=2)
        # Since the last cut: whether a window was due, and whether the last look came too late.
        self._was_due = self._is_too_late = False
        self._is_told = False
        self._refusal: str | None = None

    @property
    def reason(self) -> str:
        """Why a full that is cut without a window has none."""
        if self.batches is not None:
            return _NOT_DUE
        if self._refusal is not None:
            return self._refusal
        if self._plain is None:
            return "the stall of no full that is copied in it was measured yet"
        if self._copy_seconds is None:
            return (
                f"the last full stalled for {1e3 * self._plain.stall_seconds:.3g} ms, and only "
                f"fulls that stall for more than {1e3 * _LONG_STALL_SECONDS:g} ms are copied ahead"
            )
        if self._had_no_time:
            return "too little time was left to copy half of its rows before"
        return _NOT_DUE

    @property
    def _had_no_time(self) -> bool:
        return self._is_too_late and not self._was_due

    @property
    def _copy_seconds(self) -> float | None:
        """How long the thread takes to copy a full; None: fulls are not copied ahead."""
        plain = self._plain
        if plain is None or plain.stall_seconds <= _LONG_STALL_SECONDS or self._refusal is not None:
            return None
        return plain.row_bytes / self._bytes_a_second

    def is_due(self, batches_done: int, batches_to_come: int) -> bool:
        """Whether the window of a full opens now.

        A measured window stays closed if less than half of the full would be copied until the cut.

        Args:
            batches_done: batches done.
            batches_to_come: batches until the next checkpoint is due.
        """
        if self.batches is not None:
            return 0 < batches_to_come <= self.batches
        copy_seconds = self._copy_seconds
        batches_before, before_seconds = self._cuts_at[0]
        if copy_seconds is None or not 0 < batches_to_come <= _MOST_BATCHES:
            return False
        if batches_done <= batches_before:
            return False
        batch_seconds = (self._clock() - before_seconds) / (batches_done - batches_before)
        seconds_to_come = batches_to_come * batch_seconds
        self._is_too_late = 2 * seconds_to_come < copy_seconds
        is_due = not self._is_too_late and seconds_to_come <= _MARGIN * copy_seconds
        self._was_due |= is_due
        return is_due

    def note_cut(self, batches_done: int) -> None:
        """Note that a checkpoint has been cut: the time of batches is measured between cuts."""
        self._cuts_at.append((batches_done, self._clock()))
        self._was_due = self._is_too_late = False

    def note_plain_full(self, stall_seconds: float, row_bytes: int) -> None:
        """Note the stall of a full that copied all rows in it, before `note_cut`.

        Args:
            stall_seconds: how long its copy took.
            row_bytes: bytes of its rows, with their row states.
        """
        if self._had_no_time:
            self._bytes_a_second *= _RETRY_FACTOR
        self._plain = _PlainFull(stall_seconds, row_bytes)
        if self.batches is None and self._copy_seconds is not None and not self._is_told:
            self._is_told = True
            _log.info(
                "a full stalled training for %.3g ms: from now on, a thread copies the rows of "
                "fulls before they are due. Options(copy_fulls_ahead=0) turns that off",
                1e3 * stall_seconds,
            )

    def note_full_ahead(self, stall_seconds: float) -> None:
        """Note the stall of a full that was copied ahead.

        If it is no shorter than that of a plain full, the next full is copied in its stall, and
        measured anew.
        """
        if self._plain is not None and stall_seconds >= self._plain.stall_seconds:
            self._plain = None

    def note_pace(self, bytes_a_second: float) -> None:
        """Note how fast the thread of a window has copied, pauses included."""
        self._bytes_a_second = max(bytes_a_second, self._bytes_a_second / _SLOWER_FACTOR)

    def refuse(self, reason: str) -> None:
        """Have no measured window open any more; one that is set still does."""
        self._refusal = reason
