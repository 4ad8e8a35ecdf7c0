"""The end that SIGTERM asks for: at one batch for all ranks, with a last checkpoint before it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from recpoint.trainer_plugin.ranks import Ranks
from recpoint.trainer_plugin.termination import TerminationNotice

__all__ = ["AgreedEnd"]

_log = logging.getLogger("recpoint")


class AgreedEnd:
    """Whether this process is to end, and when.

    Args:
        ranks: all of them; those that were not told learn it from those that were.
        wait_seconds: how long the ranks may take to find a batch that none has passed.
    """

    def __init__(self, ranks: Ranks, *, wait_seconds: float) -> None:
        self._ranks = ranks
        self._wait_seconds = wait_seconds
        self._notice = TerminationNotice()
        self._ends_by: float | None = None  # monotonic
        self._over = False

    def watch(self) -> None:
        """Take SIGTERM from now on, and hear of other ranks that got one."""
        self._notice.install()
        self._ranks.watch()

    @property
    def is_due(self) -> bool:
        """Whether this process is to end; `end_if_last` says at which batch."""
        # Once: a handler of the user's may let training go on.
        return not self._over and (self._notice.requested or self._ranks.announced)

    @property
    def is_done(self) -> bool:
        """Whether `end_if_last` has done everything, and nobody has handed the signal on yet."""
        return self._over and not self._notice.redelivered

    def end_if_last(self, batches_done: int, finish: Callable[[int], None]) -> None:
        """The process is to end: do it after this batch, if it is the one that all ranks stop at.

        Args:
            batches_done: so far.
            finish: takes the last checkpoint; given the batches.
        """
        self._ranks.announce()
        last = self._ranks.meet(batches_done)
        now = time.monotonic()
        if self._ends_by is None:
            self._ends_by = now + self._wait_seconds
        late = now > self._ends_by  # never at the first time, when others cannot have said yet
        if not late and (last is None or batches_done < last):
            return  # other ranks have not noticed yet, and go on with this one for a batch or two
        if batches_done == last:
            _log.warning("SIGTERM at batch %d: taking a final checkpoint", batches_done)
            finish(batches_done)
        else:
            _log.error(
                "SIGTERM at batch %d: no final checkpoint, since the ranks found no batch to stop "
                "at together. Next: nothing; training goes on from the newest checkpoint",
                batches_done,
            )
        self._over = True

    def hand_on(self) -> None:
        """Give the signal to the handler that was there before; by default the process ends."""
        self._notice.redeliver()

    def close(self) -> None:
        """Training is over: give the signal back, and hand on one that nobody has acted on."""
        if self._notice.requested or self.is_done:
            self.hand_on()
        self._notice.remove()
