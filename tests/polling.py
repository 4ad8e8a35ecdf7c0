"""Waiting for something to become true, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE_SECONDS", "SERVER_SECONDS", "until"]

T = TypeVar("T")

#: How long what comes true in a second is waited for: a test that passes never waits so long, and
#: a machine that does ten other things at once may be that slow.
PATIENCE_SECONDS = 240.0

#: How often a Prefect server is asked: an answer takes it longer than the usual pause, and one that
#: is asked again at once has no core left for what the question is about.
SERVER_SECONDS = 0.3

_SHORTEST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.02


def until(
    look: Callable[[], T | None],
    *,
    seconds: float = PATIENCE_SECONDS,
    longest_pause: float = _LONGEST_PAUSE_SECONDS,
) -> T:
    """What `look` returns, once that is something other than None or False.

    Args:
        look: asked at once, and again after pauses that grow.
        seconds: after which it is given up.
        longest_pause: in seconds; for what takes its time to answer.

    Raises:
        TimeoutError: it does not become that in time.
    """
    deadline = time.monotonic() + seconds
    pause = _SHORTEST_PAUSE_SECONDS
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{look} did not come true in {seconds:.0f} s")
        time.sleep(pause)
        pause = min(1.5 * pause, longest_pause)
