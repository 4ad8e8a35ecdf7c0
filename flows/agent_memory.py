"""Giving back to the system what an agent has freed.

glibc keeps what is freed for who asks next, in an arena for each of a few threads, and gives back
only what lies behind the last block that is still used. So an agent whose blocks in use stay the
same grows nevertheless, a little with each checkpoint, for as long as it lives.
"""

from __future__ import annotations

import ctypes
import time
from typing import Final

__all__ = ["FreedMemory"]

#: It takes milliseconds, in which threads that allocate wait for each other.
_EVERY_SECONDS: Final = 60.0


class FreedMemory:
    """What this process has freed and not given back.

    Args:
        every_seconds: not more often than that.
    """

    def __init__(self, *, every_seconds: float = _EVERY_SECONDS) -> None:
        # Of glibc alone: others give back by themselves, or cannot be asked.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._every_seconds = every_seconds
        self._given_at = time.monotonic()
        self._done = 0

    def give_back(self, done: int) -> bool:
        """Give it back if something was done since the last time.

        Args:
            done: how much was done so far, in any unit that only grows.

        Returns:
            Whether it was time, and the system's library can do it.
        """
        now = time.monotonic()
        if self._trim is None or done == self._done or now - self._given_at < self._every_seconds:
            return False
        self._given_at, self._done = now, done
        self._trim(ctypes.c_size_t(0))
        return True
