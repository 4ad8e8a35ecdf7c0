"""Reading ahead with bounded memory: work in threads, results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Self, TypeVar

__all__ = ["SMALL_BYTES", "ChunkPool"]

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
_READ_AHEAD = 2
#: Small jobs are mostly waited for, so more of them are done at once: together as large as a chunk.
_SMALL_AT_ONCE = 16
SMALL_BYTES = (32 << 20) // _SMALL_AT_ONCE


class ChunkPool:
    """Threads that read chunks. Leaving the context waits for what is under way.

    Args:
        threads: how many chunks are read at once, not counting small ones.
        read_ahead: how many results wait while the one before them is being used.
    """

    def __init__(self, threads: int, *, read_ahead: int = _READ_AHEAD) -> None:
        name = "recpoint-read"  # both start threads when there is work for them
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._small = ThreadPoolExecutor(_SMALL_AT_ONCE, thread_name_prefix=f"{name}-small")
        self._window = threads + read_ahead

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pool in (self._pool, self._small):
            pool.shutdown(wait=True, cancel_futures=True)

    def in_order(
        self,
        jobs: Iterable[_Job],
        work: Callable[[_Job], _Result],
        *,
        is_small: Callable[[_Job], bool] | None = None,
    ) -> Iterator[tuple[_Job, Future[_Result]]]:
        """Do `work` for each job, and hand out the outcomes in the order of the jobs.

        At most `threads` + `read_ahead` results exist or are being made at any time, the one
        handed out included, however many jobs there are; and behind those up to 16 small ones. A
        caller that stops early drops what is not begun.

        Args:
            jobs: taken when there is room for them; with `is_small` one is taken before.
            work: called in a thread.
            is_small: whether a job's result takes at most `SMALL_BYTES`; None: none does.
        """
        waiting = iter(jobs)
        taken: list[_Job] = []
        under_way: deque[tuple[_Job, Future[_Result]]] = deque()
        most = self._window + (0 if is_small is None else _SMALL_AT_ONCE)
        try:
            while True:
                while len(under_way) < most:
                    taken = taken or list(islice(waiting, 1))
                    if not taken:
                        break
                    small = is_small is not None and is_small(taken[0])
                    if not small and len(under_way) >= self._window:
                        break
                    pool = self._small if small else self._pool
                    job = taken.pop()
                    under_way.append((job, pool.submit(work, job)))
                if not under_way:
                    return
                yield under_way.popleft()
        finally:
            for _, outcome in under_way:
                outcome.cancel()
