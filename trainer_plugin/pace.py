"""How far the reader may read, and what happens where it stops."""

from __future__ import annotations

import time

from recpoint.trainer_plugin.pipeline import Pipeline
from recpoint.trainer_plugin.reader import announce

__all__ = ["Pace"]

#: Into so many parts an interval is divided while a checkpoint that was skipped is overdue.
_LATE_PARTS = 8


class Pace:
    """Grants batches to the reader; a checkpoint is due only where a grant ends.

    After a checkpoint was skipped the interval is granted in parts: where one ends, the checkpoint
    is taken late if the earlier one is stored by now, so that what a fault would cost is little
    again long before the next one is due, and the reader can still read ahead.

    Attributes:
        left: batches of the grant that are left; the training loop counts it down.
    """

    def __init__(self, reader: object, pipeline: Pipeline) -> None:
        self._reader = reader
        self._pipeline = pipeline
        self.left = self._granted = 0
        self._kept_back = 0  # of the schedule's grant, batches that the reader was not told of yet

    def restart(self) -> None:
        """An interval begins: training does, or a checkpoint was taken."""
        now = time.monotonic()
        self._pipeline.statistics.interval_begins(now)
        self._grant(self._pipeline.schedule.restart(now))

    def decide(self, batches_done: int) -> None:
        """The grant is used up: take a checkpoint if one is due, and grant more."""
        if self._kept_back:
            if self._pipeline.take(batches_done, late=True):
                self.restart()
            else:
                self._tell(self._kept_back)
            return
        if not self._pipeline.is_due:
            more = self._pipeline.schedule.extend(time.monotonic(), batches=self._granted)
            if more > 0:
                self._grant(more)
                return
        self.take(batches_done)

    def take(self, batches_done: int) -> bool:
        """Take a checkpoint, whether one is due or not, and grant more; whether it was cut."""
        cut = self._pipeline.take(batches_done)
        if self._pipeline.is_due:
            # It is taken where a grant ends, so grants are short until there is room for it.
            self._grant(1)
        else:
            self.restart()
        return cut

    def _grant(self, batches: int) -> None:
        self._granted = batches
        self._tell(batches)

    def _tell(self, batches: int) -> None:
        """Have the reader read so many batches, or the first of them while one is overdue."""
        part = batches
        if self._pipeline.is_overdue:
            part = min(batches, -(-self._granted // _LATE_PARTS))
        self.left, self._kept_back = part, batches - part
        try:
            announce(self._reader, part)
        except Exception as error:
            # The reader is the user's code, called for the checkpoint's sake: its failure here is
            # one of the checkpoint path and must not end training.
            self._pipeline.outcomes.note_failure(error)
