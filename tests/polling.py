"""Waits for a condition to become true, with a deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["PATIENCE_SECONDS", "SERVER_SECONDS", "stop_process", "until"]

T = TypeVar("T")

#: How long to wait for a condition that usually comes true within a second: a passing test never
#: waits so long, but a busy machine may be that slow.
PATIENCE_SECONDS = 240.0

#: The pause between two requests to a Prefect server. Its answer takes longer than the usual pause,
#: and a server that is asked again at once has no core left for its real work.
SERVER_SECONDS = 0.3

_SHORTEST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.02


def until(
    look: Callable[[], T | None],
    *,
    seconds: float = PATIENCE_SECONDS,
    longest_pause: float = _LONGEST_PAUSE_SECONDS,
) -> T:
    """Poll `look` until it returns something other than None or False, and return that.

    Args:
        look: called at once, and again after growing pauses.
        seconds: after which to give up.
        longest_pause: in seconds; longer for a `look` that takes long.

    Raises:
        TimeoutError: `look` still returns None or False after `seconds`.
    """
    deadline = time.monotonic() + seconds
    pause = _SHORTEST_PAUSE_SECONDS
    while True:
        value = look()
        if value is not None and value is not False:
            return value
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{look} did not come true in {seconds:.0f} s")
        time.sleep(pause)
        pause = min(1.5 * pause, longest_pause)


def stop_process(pid: int) -> None:
    """Stop a process with SIGSTOP, and wait until each of its threads has stopped.

    `kill` returns before that: on a busy machine a thread may still answer a call.
    """
    os.kill(pid, signal.SIGSTOP)

    def has_stopped() -> bool:
        stats = Path(f"/proc/{pid}/task").glob("*/stat")
        try:
            return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)
        except (FileNotFoundError, ProcessLookupError):  # a thread has ended meanwhile
            return False

    until(has_stopped)
