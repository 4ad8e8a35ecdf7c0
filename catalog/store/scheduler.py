"""Schedules the reads and writes of a store: several at once, with bounded memory.

`ReadScheduler` reads ahead of a caller that takes results in order. `WriteScheduler` writes in the
background while its caller goes on. Both use threads and end with the caller: leaving their context
drops calls that have not begun and waits for calls under way. `requests_at_once` does the same on
an event loop, for the requests of one read or write.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import Any, Final, Self, TypeVar

from recpoint.closing import Closing
from recpoint.interrupts import came_from_handler

__all__ = [
    "READ_SMALL_BYTES",
    "ReadScheduler",
    "WHOLE_CHUNK_BYTES",
    "WriteBudget",
    "WriteScheduler",
    "requests_at_once",
]


_Job = TypeVar("_Job")
_Result = TypeVar("_Result")

#: The size that a read or write of unknown size counts as: the size of chunks that a persist makes.
WHOLE_CHUNK_BYTES: Final = 32 << 20

_RESULTS_AHEAD: Final = 2
#: Small reads mostly wait for an answer, so more of them run at once, together as large as a chunk.
_SMALL_AT_ONCE: Final = 16
READ_SMALL_BYTES: Final = WHOLE_CHUNK_BYTES // _SMALL_AT_ONCE

#: Records are small too; with these bounds a slow record keeps few others waiting.
_RECORDS_AT_ONCE: Final = 8
_RECORDS_AHEAD: Final = 24


def _submit(pool: ThreadPoolExecutor, call: Callable[[], _Result]) -> Future[_Result]:
    """Submit `call` to `pool`; raise an exception of a signal's handler unchanged.

    Python turns such an exception into a RuntimeError while it starts a thread, as if no thread
    were left. `start_thread` would avoid that, but takes longer than a small read.
    """
    try:
        return pool.submit(call)
    except RuntimeError as error:
        raised = error.__context__
        if raised is not None and came_from_handler(raised):
            raise raised from None
        raise


class ReadScheduler(Closing):
    """Reads in threads, ahead of a caller that takes the results in order.

    At most `threads` + `read_ahead` results, and 16 small results behind them, exist or are being
    read at a time, including the result that the caller holds. Together they take at most
    (`threads` + `read_ahead` + 1) · `WHOLE_CHUNK_BYTES`; a result larger than this is read alone.

    Args:
        threads: how many reads run at once, not counting small ones.
        read_ahead: how many results wait while the caller uses one.
        name: the start of the threads' names.
    """

    def __init__(
        self, threads: int, *, read_ahead: int = _RESULTS_AHEAD, name: str = "recpoint-read"
    ) -> None:
        # Both pools start threads only when they have work.
        self._large = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._small = ThreadPoolExecutor(_SMALL_AT_ONCE, thread_name_prefix=f"{name}-small")
        self._window = threads + read_ahead
        self._budget_bytes = (self._window + 1) * WHOLE_CHUNK_BYTES

    @classmethod
    def of_records(cls) -> Self:
        """Return a scheduler for records: it reads 8 at once and keeps at most 32."""
        return cls(_RECORDS_AT_ONCE, read_ahead=_RECORDS_AHEAD)

    def close(self) -> None:
        """Wait for the reads under way, and give up the others."""
        for pool in (self._large, self._small):
            pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, read: Callable[[], _Result]) -> Future[_Result]:
        """Begin one read and return its future; it occupies one of the threads."""
        return _submit(self._large, read)

    def in_order(
        self,
        jobs: Iterable[_Job],
        work: Callable[[_Job], _Result],
        *,
        size_bytes: Callable[[_Job], int] | None = None,
    ) -> Iterator[tuple[_Job, Future[_Result]]]:
        """Do `work` for each job, and yield (job, its future) in the order of the jobs.

        An error stays in its job's future, and the other jobs go on. If the caller stops early,
        jobs that have not begun are dropped.

        Args:
            jobs: each job is taken when there is room for it; with `size_bytes`, one job earlier.
            work: called in a thread.
            size_bytes: the bytes that a job's result takes; None: a whole chunk each. Results of at
                most `READ_SMALL_BYTES` are small.
        """
        waiting = iter(jobs)
        next_jobs: list[_Job] = []
        under_way: deque[tuple[_Job, Future[_Result]]] = deque()
        sizes: deque[int] = deque()  # bytes of each job under way
        room_bytes = self._budget_bytes
        most = self._window + (0 if size_bytes is None else _SMALL_AT_ONCE)
        try:
            while True:
                while len(under_way) < most:
                    next_jobs = next_jobs or list(islice(waiting, 1))
                    if not next_jobs:
                        break
                    size = WHOLE_CHUNK_BYTES if size_bytes is None else size_bytes(next_jobs[0])
                    small = size <= READ_SMALL_BYTES
                    if not small and len(under_way) >= self._window:
                        break
                    if under_way and size > room_bytes:
                        break
                    pool = self._small if small else self._large
                    job = next_jobs.pop()
                    under_way.append((job, _submit(pool, partial(work, job))))
                    sizes.append(size)
                    room_bytes -= size
                if not under_way:
                    return
                yield under_way.popleft()  # without a reference here that would keep the result
                room_bytes += sizes.popleft()
        finally:
            for _, outcome in under_way:
                outcome.cancel()

    def results(self, jobs: Iterable[_Job], work: Callable[[_Job], _Result]) -> Iterator[_Result]:
        """As `in_order`, but yield only the results; raise the first error in this order."""
        for _, outcome in self.in_order(jobs, work):
            yield outcome.result()


class WriteBudget:
    """Bounds how many writes are under way at once, and their bytes together.

    Several schedulers may share a budget, from several threads; they get room in the order in which
    they ask. A write that is larger than the whole budget runs alone.

    Args:
        at_once: how many writes.
        budget_bytes: bytes of all writes together; None: `at_once` whole chunks.
        most_at_once: how many writes `allow` may allow; None: `at_once`.
    """

    def __init__(
        self, at_once: int, *, budget_bytes: int | None = None, most_at_once: int | None = None
    ) -> None:
        self.at_once = at_once
        self.most_at_once = at_once if most_at_once is None else most_at_once
        self._budget_bytes = at_once * WHOLE_CHUNK_BYTES if budget_bytes is None else budget_bytes
        self._changed = threading.Condition()
        self._asking: deque[object] = deque()
        self._held_bytes: list[tuple[object, int]] = []

    @property
    def is_full(self) -> bool:
        """Whether as many writes are under way as there may be."""
        with self._changed:
            return len(self._held_bytes) >= self.at_once

    def allow(self, at_once: int) -> None:
        """Allow so many writes from now on, at most `most_at_once`; those under way go on."""
        with self._changed:
            self.at_once = min(at_once, self.most_at_once)
            self._changed.notify_all()

    def take(self, holder: object, size_bytes: int, *, given_up: Callable[[], bool]) -> bool:
        """Wait for room and take it; return False if `given_up` became true before."""
        ticket = object()
        with self._changed:
            self._asking.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: given_up() or (self._asking[0] is ticket and self._has_room(size_bytes))
                )
                if given_up():
                    return False
                self._held_bytes.append((holder, size_bytes))
                return True
            finally:
                self._asking.remove(ticket)
                self._changed.notify_all()

    def give_back(self, holder: object, size_bytes: int) -> None:
        """Give back the room of one write; does nothing if it was given back before."""
        with self._changed:
            if (holder, size_bytes) in self._held_bytes:
                self._held_bytes.remove((holder, size_bytes))
            self._changed.notify_all()

    def give_all_back(self, holder: object) -> None:
        """Give back all room of `holder`, which must have no write under way."""
        with self._changed:
            self._held_bytes = [entry for entry in self._held_bytes if entry[0] is not holder]
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        taken_bytes = sum(size for _, size in self._held_bytes)
        return not self._held_bytes or (
            len(self._held_bytes) < self.at_once and taken_bytes + size_bytes <= self._budget_bytes
        )


class WriteScheduler(Closing):
    """Writes in threads, in the background, while its caller goes on.

    After the first error no other write is begun, and the caller's next call raises that error.

    Args:
        budget: bounds the writes under way; other schedulers may share it.
        on_written: called with the size in bytes of each finished write, in the order in which the
            writes were begun, from the caller's thread during one of its calls.
        name: the start of the threads' names.
    """

    def __init__(
        self,
        budget: WriteBudget,
        *,
        on_written: Callable[[int], object] | None = None,
        name: str = "recpoint-write",
    ) -> None:
        self._budget = budget
        self._on_written = on_written
        self._pool = ThreadPoolExecutor(budget.most_at_once, thread_name_prefix=name)
        self._running: deque[tuple[Future[None], int]] = deque()
        self._errors: list[BaseException] = []

    def close(self) -> None:
        """Wait for the writes under way, and give up the others."""
        try:
            self._pool.shutdown(wait=True, cancel_futures=True)
        finally:
            self._budget.give_all_back(self)

    def reserve(self, size_bytes: int) -> int:
        """Wait until there is room for a write of so many bytes, and take the room.

        Call this before the bytes are made, so that the budget covers them while they wait.

        Returns:
            `size_bytes`, for `begin`.

        Raises:
            BaseException: the first error of an earlier write.
        """
        while self._running and self._running[0][0].done():
            self._account()
        if not self._budget.take(self, size_bytes, given_up=lambda: bool(self._errors)):
            raise self._errors[0]
        return size_bytes

    def begin(self, room: int, write: Callable[[], object]) -> None:
        """Begin a write in the room that `reserve` returned; does not wait for the write."""
        try:
            self._running.append((_submit(self._pool, partial(self._run, room, write)), room))
        except BaseException as error:  # no thread started; the queued write must not run later
            self._errors.append(error)
            raise

    def finish(self) -> None:
        """Wait until all writes are done.

        Raises:
            BaseException: the first error of a write.
        """
        while self._running:
            self._account()
        if self._errors:
            raise self._errors[0]

    def _account(self) -> None:
        outcome, size_bytes = self._running.popleft()
        outcome.result()
        if self._errors:
            raise self._errors[0]
        if self._on_written is not None:
            self._on_written(size_bytes)

    def _run(self, room: int, write: Callable[[], object]) -> None:
        try:
            if not self._errors:
                write()
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._budget.give_back(self, room)


async def requests_at_once(
    requests: Iterable[Callable[[], Coroutine[Any, Any, _Result]]], *, at_once: int
) -> list[_Result]:
    """Return the results of all requests, in order; a failure or cancellation ends all of them."""
    turn = asyncio.Semaphore(at_once)

    async def in_turn(request: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        async with turn:
            return await request()

    tasks = [asyncio.ensure_future(in_turn(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
