"""Splitting the rows of a kernel over threads.

Not numba's own parallel loops: their work queue ends the process when two threads enter it, and
their OpenMP layer ends a forked child (a DataLoader worker) that uses it. A pool of Python threads
over kernels that release the GIL has neither problem and costs some 50 microseconds a call. Every
kernel that is split writes each output from one row alone, so the parts never change a result.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import torch

__all__ = ["over_rows"]

#: Below this many bytes of traffic handing a part to another thread costs more than it saves.
SPLIT_BYTES: Final = 1 << 20
#: Taking a part costs microseconds; a core that is busy elsewhere costs milliseconds.
PARTS_PER_THREAD: Final = 4

T = TypeVar("T")

_pool: tuple[int, ThreadPoolExecutor] | None = None


def _forget_pool() -> None:
    # A forked child has the pool's object but none of its threads: waiting on it would hang.
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _workers(count: int) -> ThreadPoolExecutor:
    global _pool
    if _pool is None or _pool[0] < count:
        # An outgrown pool is left to whoever still waits on it; its idle threads end with it.
        _pool = (count, ThreadPoolExecutor(count, thread_name_prefix="recpoint-kernel"))
    return _pool[1]


def over_rows(part: Callable[[int, int], T], rows: int, *, row_bytes: int) -> list[T]:
    """Call `part(start, stop)` so that the parts cover 0 … rows once; results in ascending order.

    Uses up to `torch.get_num_threads()` threads, the calling one among them.

    Args:
        part: what to run; releases the GIL.
        rows: how many rows there are.
        row_bytes: bytes read and written for one row, to judge whether a split pays.
    """
    threads = min(torch.get_num_threads(), rows * row_bytes // SPLIT_BYTES + 1, max(rows, 1))
    if threads <= 1:
        return [part(0, rows)]
    # More parts than threads: one that is late, or slow, holds the others up by a part at most.
    parts = min(threads * PARTS_PER_THREAD, rows)
    edges = [rows * index // parts for index in range(parts + 1)]
    results: dict[int, T] = {}
    turns = itertools.count()  # next() on it is one step under the GIL: each part is taken once

    def work() -> None:
        while (index := next(turns)) < parts:
            results[index] = part(edges[index], edges[index + 1])

    waiting: list[Future[None]] = []
    try:
        pool = _workers(threads - 1)
        waiting.extend(pool.submit(work) for _ in range(threads - 1))
    except RuntimeError:
        # The interpreter is shutting down and starts no threads any more (a final checkpoint on
        # the way out): what was not handed over is done here.
        pass
    try:
        work()
    finally:
        # Also after an error: the caller's buffers must outlive every thread that writes to them.
        # A thread that no core was free for has nothing left to do and is not waited for.
        errors = [future.exception() for future in waiting if not future.cancel()]
    for error in errors:
        if error is not None:
            raise error
    return [results[index] for index in range(parts)]
