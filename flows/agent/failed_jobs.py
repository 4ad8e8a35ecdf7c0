"""Has failed jobs tried again later, or rejects one that always fails.

Persisting has already rejected jobs that are themselves broken. The errors that arrive here are
faults of the store or the host, which may pass, or unexpected errors.
"""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Final

from recpoint.catalog.persist.persist import reject_job
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import RecpointError, StagingError, StoreThrottled
from recpoint.flows.agent.runs import SHORTEST_SHARE, RunState

__all__ = [
    "postpone",
    "postpone_or_reject",
]


_Log = logging.LoggerAdapter[logging.Logger]

#: A job is rejected when it has failed with an unexpected error so often in a row.
_TRIES_UNFORESEEN: Final = 5

#: Texts of the RuntimeErrors of Python and torch when the host has no thread or no memory left.
_SHORTAGES: Final = ("can't start new thread", "can't allocate memory")


def postpone(state: RunState, error: BaseException, log: _Log) -> None:
    """Have the run wait before its next try, and log and note the error."""
    heals = not isinstance(error, RecpointError) or error.retryable
    pause = state.pause_seconds(heals=heals)
    if isinstance(error, StoreThrottled):
        pause *= 2
    pause *= random.uniform(SHORTEST_SHARE, 2 - SHORTEST_SHARE)
    state.failures += 1
    state.facts.failed(error)
    state.retry_at = time.monotonic() + pause
    # With the error's type, by which docs/how-to says what to do.
    state.last_error = f"{type(error).__name__}: {error}"
    state.last_error_ms = now_ms()
    log.warning("stays staged, next try in %.0f s: %s", pause, state.last_error)


def postpone_or_reject(state: RunState, job_file: Path, error: Exception, log: _Log) -> bool:
    """Postpone a job, or reject it after several unexpected errors in a row.

    One unexpected error may be due to the host. If each try ends with one, the job is at fault, and
    it would block all jobs that are staged after it.

    Returns:
        Whether the job was rejected.
    """
    if _may_pass(error):
        state.unforeseen = 0
        postpone(state, error, log)
        return False
    state.unforeseen += 1
    log.error("failed with an unexpected error", exc_info=error)
    if state.unforeseen < _TRIES_UNFORESEEN:
        postpone(state, error, log)
        return False
    try:
        _reject(job_file, error)
    except OSError as failed:
        postpone(state, failed, log)
        return False
    log.error("rejected after %d unexpected errors in a row", state.unforeseen)
    state.unforeseen = 0
    return True


def _may_pass(error: Exception) -> bool:
    """Whether an error may pass: a fault of the store, or a shortage on this host."""
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
