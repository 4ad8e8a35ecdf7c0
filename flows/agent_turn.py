"""The turn of an agent: after a sweep or drain, which end by themselves, and beside no other agent.

An agent that ended instead would leave all runs of its host without one until somebody starts it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recpoint.catalog.agent_lock import AgentLock, AtWork
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
    stop = threading.Event()
    told: AtWork | None = None
    with stopped_by_signals(stop.set):
        while (other := lock.take()) is not None:
            if not other.ends_by_itself:
                raise lock.refused(other)
            if other != told:
                told = other
                _LOG.info("waiting for process %s, %s, which ends by itself", other.process, other)
            if stop.wait(_POLL_SECONDS):
                break
    return not stop.is_set()
