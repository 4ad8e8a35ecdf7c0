"""The turn of an agent: after a sweep or drain, which end by themselves, and beside no other agent.

An agent that ended instead would leave all runs of its host without one until somebody starts it.
Its lock may be lost while it serves (`host_lock.is_lost`). Then nothing would tell trainers that
there is an agent, nor keep another one from starting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recpoint.catalog.staging.agent_lock import AgentLock, AtWork
from recpoint.errors import StagingError
from recpoint.flows.agent_end import stopped_by_signals

__all__ = ["Turn", "turn_of"]

_LOG = logging.getLogger("recpoint.agent")

_POLL_SECONDS = 0.2


class Turn:
    """The lock of an agent that serves.

    Args:
        lock: which it holds.
    """

    def __init__(self, lock: AgentLock) -> None:
        self._lock = lock
        self._lost_to: AtWork | None = None
        self._told = ""

    def keep(self) -> bool:
        """Take the lock anew where its file was removed; False: another agent has it by now.

        Beside a sweep or drain that has come meanwhile, and ends by itself, it is tried again, as
        where there is no directory to make it in.
        """
        try:
            other = self._lock.keep()
        except StagingError as error:
            if str(error) != self._told:
                self._told = str(error)
                _LOG.warning("the lock of this agent is lost: %s", error)
            return True
        self._told = ""
        if other is None or other.ends_by_itself:
            return True
        self._lost_to = other
        return False

    def require_kept(self) -> None:
        """Raise where another agent has it.

        Raises:
            StagingError: naming it.
        """
        if self._lost_to is not None:
            raise self._lock.refused(self._lost_to)


@contextmanager
def turn_of(who: AtWork, staging: Path) -> Iterator[Turn | None]:
    """Hold the lock of a staging area once no sweep or drain does.

    Yields:
        The turn; None: SIGTERM or SIGINT has ended the waiting.

    Raises:
        StagingError: another agent holds it, or the staging area may not be used.
    """
    lock = AgentLock(staging, who)
    try:
        yield Turn(lock) if _wait_for(lock) else None
    finally:
        lock.release()


def _wait_for(lock: AgentLock) -> bool:
    stopped = False
    told: AtWork | None = None

    def stop() -> None:
        nonlocal stopped
        stopped = True

    with stopped_by_signals(stop):
        while not stopped and (other := lock.take()) is not None:
            if not other.ends_by_itself:
                raise lock.refused(other)
            if other != told:
                told = other
                _LOG.info("waiting for process %s, %s, which ends by itself", other.process, other)
            time.sleep(_POLL_SECONDS)
    return not stopped
