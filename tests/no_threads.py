"""Simulates a host on which no thread can be started, for a moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_threads"]

#: No host has room for a stack of this size, so no thread can be started with it.
_NO_ROOM = 1 << 47


@contextmanager
def no_threads() -> Iterator[None]:
    """Make every start of a thread in the block fail."""
    old_size = threading.stack_size(_NO_ROOM)
    try:
        yield
    finally:
        threading.stack_size(old_size)
