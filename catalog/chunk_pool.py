"""Reading ahead with bounded memory: work in threads, results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Self, TypeVar

__all__ = ["ChunkPool"]

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
_READ_AHEAD = 2  # results that wait while the one before them is being used


class ChunkPool:
    """Threads that read chunks. Leaving the context waits for what is under way.

    Args:
        threads: how many chunks are read at once.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="recpoint-read")
        self._window = threads + _READ_AHEAD

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def in_order(
        self, jobs: Iterable[_Job], work: Callable[[_Job], _Result]
    ) -> Iterator[tuple[_Job, Future[_Result]]]:
        """Do `work` for each job, and hand out the outcomes in the order of the jobs.

        At most `threads` + 2 results exist or are being made at any time, the one handed out
        included, however many jobs there are. A caller that stops early drops what is not begun.
        """
        waiting = iter(jobs)
        under_way: deque[tuple[_Job, Future[_Result]]] = deque()
        try:
            for job in islice(waiting, self._window):
                under_way.append((job, self._pool.submit(work, job)))
            while under_way:
                yield under_way.popleft()
                for job in islice(waiting, 1):
                    under_way.append((job, self._pool.submit(work, job)))
        finally:
            for _, outcome in under_way:
                outcome.cancel()
