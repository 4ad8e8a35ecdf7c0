"""Grants batches to the reader, and takes a checkpoint at the end of a grant if one is due."""

from __future__ import annotations

import math
import time

from recpoint.trainer_plugin.pipeline.pipeline import Pipeline
from recpoint.trainer_plugin.state.reader import announce

__all__ = ["Pace"]


class Pace:
    """Grants batches to the reader; a checkpoint is taken only where a grant ends.

    If the reader does not take grants, a grant ends as soon as a checkpoint is due by the clock.

    After a checkpoint was skipped, the next interval is granted in parts. At the end of each part,
    the checkpoint is taken late if the earlier one is stored by then. A fault then costs little
    long before the next checkpoint is due, and the reader can still read ahead.

    Args:
        reader: the Checkpointer's reader, or None.
        pipeline: takes the checkpoints.
    """

    def __init__(self, reader: object, pipeline: Pipeline) -> None:
        self._reader = reader
        self._pipeline = pipeline
        self._granted_from = self._granted_until = 0  # batches done
        self._ends_by = math.inf  # monotonic seconds; the grant ends then even if batches are left

    def restart(self, batches_done: int) -> None:
        """Begin an interval, at the start of training or after a checkpoint was taken."""
        now = time.monotonic()
        self._pipeline.statistics.interval_begins(now)
        in_parts = self._pipeline.is_overdue
        self._grant(self._pipeline.schedule.restart(now, in_parts=in_parts), batches_done)

    def is_over(self, batches_done: int) -> bool:
        """Whether the grant has ended, so that `step` must act."""
        return batches_done >= self._granted_until or time.monotonic() >= self._ends_by

    def left(self, batches_done: int) -> int | None:
        """Return after how many batches a checkpoint is due; None: not known yet."""
        return self._pipeline.schedule.batches_left(
            time.monotonic(), batches=batches_done - self._granted_from
        )

    def step(self, batches_done: int) -> None:
        """If the grant has ended, take a checkpoint if one is due, and grant more batches."""
        if self.is_over(batches_done):
            self._decide(batches_done)

    def take(self, batches_done: int) -> bool:
        """Take a checkpoint now, due or not, and grant more batches.

        Returns:
            Whether the checkpoint was cut.
        """
        cut = self._pipeline.take(batches_done)
        if self._pipeline.busy.is_due:
            # It can only be taken at the end of a grant, so grants are short until there is room.
            self._grant(1, batches_done)
        else:
            self.restart(batches_done)
        return cut

    def _decide(self, batches_done: int) -> None:
        more = 0
        if not self._pipeline.busy.is_due:
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
        is_announced = True
        try:
            is_announced = announce(self._reader, batches)
        except Exception as error:
            # The reader is the user's code, called here only for checkpoints: its failure counts as
            # a failed checkpoint and must not end training.
            self._pipeline.outcomes.note_failure(error)
        self._ends_by = math.inf if is_announced else self._pipeline.schedule.due_seconds
