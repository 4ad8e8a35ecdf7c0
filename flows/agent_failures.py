"""What becomes of a job that failed: it is tried again later, or rejected once that is in vain.

What is wrong with the job itself persisting has found, and rejected it. All that comes here is the
store's or the host's, which may pass, or something that nobody foresaw.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Final

from recpoint.catalog.persist.persist import reject_job
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.errors import RecpointError, StagingError, StoreThrottled
from recpoint.flows.agent_runs import SHORTEST_SHARE, RunState

__all__ = ["postpone", "postpone_or_reject"]

_Log = logging.LoggerAdapter[logging.Logger]

#: So often in a row a job may fail in a way that nobody foresaw, before it is rejected.
_TRIES_UNFORESEEN: Final = 5
#: What Python and torch say as a RuntimeError where the host has no thread or no memory left.
_SHORTAGES: Final = ("can't start new thread", "can't allocate memory")


def postpone(state: RunState, error: BaseException, log: _Log) -> None:
    """Have the run wait before its next try, and say why."""
    heals = not isinstance(error, RecpointError) or error.retryable
    pause = state.pause_seconds(heals=heals)
    if isinstance(error, StoreThrottled):
        pause *= 2
    pause *= random.uniform(SHORTEST_SHARE, 2 - SHORTEST_SHARE)
    state.failures += 1
    state.facts.failed(error)
    state.retry_at = time.monotonic() + pause
    # The kind of error says what to do about it: docs/operations.md goes by its name.
    state.last_error = f"{type(error).__name__}: {error}"
    state.last_error_ms = now_ms()
    log.warning("stays staged, next try in %.0f s: %s", pause, state.last_error)


def postpone_or_reject(state: RunState, job_file: Path, error: Exception, log: _Log) -> bool:
    """As `postpone`, but reject what fails each time in a way that nobody foresaw.

    Once, it may be the host's doing. Each time, it is the job's, and keeps all that is staged after
    it.

    Returns:
        Whether the job was rejected.
    """
    if _may_pass(error):
        state.unforeseen = 0
        postpone(state, error, log)
        return False
    state.unforeseen += 1
    log.error("fails in a way that nobody foresaw", exc_info=error)
    if state.unforeseen < _TRIES_UNFORESEEN:
        postpone(state, error, log)
        return False
    try:
        _reject(job_file, error)
    except OSError as failed:
        postpone(state, failed, log)
        return False
    log.error("rejected, since it has failed so %d times in a row", state.unforeseen)
    state.unforeseen = 0
    return True


def _may_pass(error: Exception) -> bool:
    """Whether it is the store's, or that of a host which is short of something."""
    if isinstance(error, RecpointError | OSError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(says in str(error) for says in _SHORTAGES)


def _reject(job_file: Path, error: Exception) -> None:
    reject_job(
        job_file,
        StagingError(
            str(job_file),
            found=f"{type(error).__name__}: {error}",
            expected="a job that can be persisted",
            next_step="report it, with the agent's log",
        ),
    )
