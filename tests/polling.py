"""Waiting for something to become true, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["until"]

T = TypeVar("T")


def until(look: Callable[[], T | None], *, seconds: float = 60.0) -> T:
    """What `look` returns, once that is something other than None or False.

    Raises:
        TimeoutError: it does not become that in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look()
        if found is not None and found is not False:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"{look} did not come true in {seconds:.0f} s")
