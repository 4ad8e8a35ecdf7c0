"""A host that has no thread left, for a moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_threads"]

#: No host has room for a stack of this size, so that it starts no thread.
_NO_ROOM = 1 << 47


@contextmanager
def no_threads() -> Iterator[None]:
    """Whoever starts a thread in the block is told that it cannot be."""
    before = threading.stack_size(_NO_ROOM)
    try:
        yield
    finally:
        threading.stack_size(before)
