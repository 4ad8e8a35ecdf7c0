"""Tells the reader how far it may read, and what happens where it stops."""

from __future__ import annotations

import math
import time

from recpoint.trainer_plugin.pipeline.pipeline import Pipeline
from recpoint.trainer_plugin.state.reader import announce

__all__ = ["Pace"]


class Pace:
    """Grants batches to the reader; a checkpoint is due only where a grant ends.

    Where no reader counts on a grant, it ends as soon as the clock says that one is due.

    After a checkpoint was skipped the interval is granted in parts: where one ends, the checkpoint
    is taken late if the earlier one is stored by now, so that what a fault would cost is little
    again long before the next one is due, and the reader can still read ahead.
    """

    def __init__(self, reader: object, pipeline: Pipeline) -> None:
        self._reader = reader
        self._pipeline = pipeline
        self._granted_from = self._granted_until = 0  # batches done
        self._ends_by = math.inf  # monotonic; the grant is over then, whatever is left of it

    def restart(self, batches_done: int) -> None:
        """An interval begins: training does, or a checkpoint was taken."""
        now = time.monotonic()
        self._pipeline.statistics.interval_begins(now)
        in_parts = self._pipeline.is_overdue
        self._grant(self._pipeline.schedule.restart(now, in_parts=in_parts), batches_done)

    def is_over(self, batches_done: int) -> bool:
        """Whether the grant has ended, so that `step` has something to do."""
        return batches_done >= self._granted_until or time.monotonic() >= self._ends_by

    def step(self, batches_done: int) -> None:
        """Where the grant has ended, take a checkpoint if one is due."""
        if self.is_over(batches_done):
            self._decide(batches_done)

    def take(self, batches_done: int) -> bool:
        """Take a checkpoint, whether one is due or not, and grant more; whether it was cut."""
        cut = self._pipeline.take(batches_done)
        if self._pipeline.is_due:
            # It is taken where a grant ends, so grants are short until there is room for it.
            self._grant(1, batches_done)
        else:
            self.restart(batches_done)
        return cut

    def _decide(self, batches_done: int) -> None:
        more = 0
        if not self._pipeline.is_due:
            used = batches_done - self._granted_from
            more = self._pipeline.schedule.extend(time.monotonic(), batches=used)
        if more <= 0:
            self.take(batches_done)
        elif self._pipeline.is_overdue and self._pipeline.take(batches_done, late=True):
            self.restart(batches_done)
        else:
            self._grant(more, batches_done)

    def _grant(self, batches: int, batches_done: int) -> None:
        self._granted_from, self._granted_until = batches_done, batches_done + batches
        told = True
        try:
            told = announce(self._reader, batches)
        except Exception as error:
            # The reader is the user's code, called for the checkpoint's sake: its failure here is
            # one of the checkpoint path and must not end training.
            self._pipeline.outcomes.note_failure(error)
        self._ends_by = math.inf if told else self._pipeline.schedule.due_seconds
