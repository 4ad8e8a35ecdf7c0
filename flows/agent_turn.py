"""The turn of an agent: after a sweep or drain, which end by themselves, and beside no other agent.

An agent that ended instead would leave all runs of its host without one until somebody starts it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recpoint.catalog.staging.agent_lock import AgentLock, AtWork
from recpoint.flows.agent_end import stopped_by_signals

__all__ = ["turn_of"]

_LOG = logging.getLogger("recpoint.agent")

_POLL_SECONDS = 0.2


@contextmanager
def turn_of(who: AtWork, staging: Path) -> Iterator[bool]:
    """Hold the lock of a staging area once no sweep or drain does.

    Yields:
        Whether it is held; False: SIGTERM or SIGINT has ended the waiting.

    Raises:
        StagingError: another agent holds it, or the staging area may not be used.
    """
    lock = AgentLock(staging, who)
    try:
        yield _wait_for(lock)
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
