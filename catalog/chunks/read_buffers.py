"""Memory for large objects that are read one after another: used again, not asked for again.

An allocator keeps what each thread has freed for that thread: glibc up to two blocks of the largest
size for each, so that readers in several threads hold twice what they use. Memory that goes to the
system and comes back is cleared each time, which takes longer than reading. What is lent here comes
back by itself with the last view of it, and is lent to the next thread that reads.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any, Final

import numpy as np

__all__ = ["ReadBuffers"]

#: Objects that differ by less have buffers of one size.
_GRAIN_BYTES: Final = 1 << 20
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class ReadBuffers:
    """As many buffers as are lent at once at most; they go with it and the last view of each.

    May be used from several threads: a list's `append` and `pop` are whole in themselves, and
    nothing else is shared. A lock would not do: memory may come back while one is held.
    """

    def __init__(self) -> None:
        self._free: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def lend(self, size_bytes: int) -> memoryview:
        """Memory of so many bytes, which hold anything; the borrower's as long as any view of it
        lives."""
        if size_bytes < 1:
            return memoryview(bytearray())
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = None
        if buffer is None or len(buffer) < size_bytes:
            buffer = None  # too small a one goes before its successor comes
            grains = -(-size_bytes // _GRAIN_BYTES)
            buffer = np.frombuffer(mmap.mmap(-1, grains * _GRAIN_BYTES, flags=_PRIVATE), np.uint8)
        lent: Any = buffer[:size_bytes]
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return memoryview(lent)
