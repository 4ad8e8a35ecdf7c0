"""Says whether a checkpoint can be staged now, and what happens to a due one if it cannot."""

from __future__ import annotations

import logging
import time

from recpoint.trainer_plugin.pipeline.handoff import Handoff
from recpoint.trainer_plugin.pipeline.outcomes import Outcomes
from recpoint.trainer_plugin.schedule.ledger import Ledger, Statistics
from recpoint.trainer_plugin.settings import Staging
from recpoint.trainer_plugin.snapshot.staging import StagingArea

__all__ = ["BusyStaging"]

_log = logging.getLogger("recpoint")


class BusyStaging:
    """Keeps to the number of checkpoints that may wait in the staging area.

    Args:
        staging: says how many may wait, and what happens when there are as many.
        area: the staging area.
        ledger: has the checkpoints that wait.
        handoff: has the agent drop checkpoints.
        outcomes: learns the outcomes of checkpoints.
        statistics: counts waits.
    """

    def __init__(
        self,
        staging: Staging,
        area: StagingArea,
        ledger: Ledger,
        handoff: Handoff,
        outcomes: Outcomes,
        statistics: Statistics,
    ) -> None:
        self._staging = staging
        self._area = area
        self._ledger = ledger
        self._handoff = handoff
        self._outcomes = outcomes
        self._statistics = statistics
        # A due checkpoint waits for the agent to drop an earlier one until this monotonic time.
        self._due_until: float | None = None
        # `outcomes.last_safe` at the last cancel.
        self._cancelled_at: int | None = None

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint must be taken as soon as the agent has dropped the earlier one."""
        return self._due_until is not None

    @property
    def is_free(self) -> bool:
        """Whether another checkpoint may be staged."""
        return not self._outcomes.superseded and len(self._ledger) < self._staging.jobs

    def end_wait(self) -> None:
        """Wait no longer for the agent to drop an earlier checkpoint."""
        self._due_until = None

    def has_room(self) -> bool:
        """Whether a checkpoint can be cut now, after doing what `when_busy` says if it cannot."""
        if self.is_free:
            return True
        staging = self._staging
        if staging.when_busy == "wait":
            self._statistics.waited += 1
            deadline = time.monotonic() + staging.busy_wait_seconds
            self._outcomes.wait(deadline, until_below=staging.jobs, for_agent_seconds=0.0)
            return self.is_free
        if self._due_until is not None:
            if time.monotonic() >= self._due_until:
                self._due_until = None
        elif staging.when_busy == "cancel" and self._cancelled_at != self._outcomes.last_safe:
            self._cancel()
        return False

    def _cancel(self) -> None:
        """Ask the agent to drop the checkpoint that is on its way; only once until one is stored.

        Otherwise, if the store is slower than the interval, each checkpoint would be dropped for
        the next.
        """
        if not self._area.agent_is_running():
            return
        for ref in self._ledger.pending:
            _log.info("the agent is asked to drop the checkpoint of %s for a newer one", ref)
            self._handoff.cancel(ref)
        self._cancelled_at = self._outcomes.last_safe
        self._due_until = time.monotonic() + self._staging.busy_wait_seconds
