"""Splitting the rows of a kernel over threads.

Not numba's own parallel loops: their work queue ends the process when two threads enter it, and
their OpenMP layer ends a forked child (a DataLoader worker) that uses it. A pool of Python threads
over kernels that release the GIL has neither problem and costs some 50 microseconds a call. Every
kernel that is split writes each output from one row alone, so the parts never change a result.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from array import array
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Final, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numba.np.numpy_support import carray

from recpoint.kernels.intrinsics import call_for_long, call_with, compiled_team_work, pointer

__all__ = ["as_team", "over_rows", "prepare", "team_size"]

#: Below this many bytes of traffic handing a part to another thread costs more than it saves.
SPLIT_BYTES: Final = 1 << 20
#: Taking a part costs microseconds; a core that is busy elsewhere costs milliseconds.
PARTS_PER_THREAD: Final = 4

T = TypeVar("T")

_pool: tuple[int, ThreadPoolExecutor] | None = None
_is_forked_child = False


def _forget_pool() -> None:
    # A forked child has the pool's object but none of its threads: waiting on it would hang. So it
    # does on the threads of OpenMP.
    global _pool, _is_forked_child
    _pool = None
    _is_forked_child = True
    _openmp.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def _workers(count: int) -> ThreadPoolExecutor:
    global _pool
    if _pool is None or _pool[0] < count:
        # An outgrown pool is left to whoever still waits on it; its idle threads end with it.
        _pool = (count, ThreadPoolExecutor(count, thread_name_prefix="recpoint-kernel"))
    return _pool[1]


def team_size(pieces: int, traffic_bytes: int) -> int:
    """How many threads pay for so many pieces of work, 1 or more."""
    return max(1, min(torch.get_num_threads(), traffic_bytes // SPLIT_BYTES + 1, pieces))


def as_team(
    work: int, data: int, *, threads: int, meanwhile: Callable[[], None] | None = None
) -> None:
    """Call the C function `void work(void *data)` in so many threads at once, or fewer.

    Uses the OpenMP threads of torch where there are any. After each operation of torch they go on
    looking for work for milliseconds, which keeps other threads from the cores and makes these the
    only ones that start at once: the difference is a third of a snapshot's stall.

    Args:
        work: address of a compiled function that takes what is to be done piece by piece. All is
            done when those calls have returned that were begun, however many there are.
        data: address of what it works on.
        threads: `team_size` of it.
        meanwhile: is called once by the calling thread, while others are at work where they can
            be; then that thread takes part. What it has torch do is done by this thread alone.

    Raises:
        BaseException: what `meanwhile` raised; the work is done nevertheless.
    """
    if threads > 1 and (openmp := _openmp()) is not None:
        if meanwhile is None:
            openmp.parallel(work, data, threads, 0)
        else:
            _led(openmp, work, data, threads, meanwhile)
        return
    call = _WORK(work)
    if meanwhile is None:
        _together(lambda: call(data), threads=threads)
        return
    try:
        meanwhile()
    finally:
        _together(lambda: call(data), threads=threads)


def prepare() -> None:
    """Compile what leads a team, before it is needed."""
    _lead_or_work()


_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

# Fields of what a led team is called with.
_WHO_AM_I: Final = 0  # address of pthread_self
_LEADER: Final = 1  # what it returns in the calling thread
_LEAD: Final = 2  # address of what that thread calls first
_WORK_AT: Final = 3
_DATA: Final = 4
_ORDERS: Final = 5


@compiled_team_work
def _lead_or_work(data: int) -> None:
    """One thread of a led team: the calling one leads before it works."""
    orders = carray(pointer(data), _ORDERS, np.int64)
    if call_for_long(orders[_WHO_AM_I]) == orders[_LEADER]:
        call_with(orders[_LEAD], 0)
    call_with(orders[_WORK_AT], orders[_DATA])


def _led(
    openmp: _OpenMP, work: int, data: int, threads: int, meanwhile: Callable[[], None]
) -> None:
    ended: list[BaseException | None] = []
    told: list[int] = []  # how many threads torch is to have from now on

    def lead() -> Generator[None, object, None]:
        try:
            # A function would be left by what a handler of a signal raises before its first line;
            # what one raises on the way into this comes here.
            yield
            before = torch.get_num_threads()
            try:
                meanwhile()
            finally:
                if (after := torch.get_num_threads()) != before:
                    told.append(after)
            ended.append(None)
        except BaseException as error:
            # It must not leave a callback, which drops errors: raised below, once all have worked.
            ended.append(error)
        yield

    leading = lead()
    next(leading)
    callback = _WORK(leading.send)
    lead_at = cast(int, ctypes.cast(callback, ctypes.c_void_p).value)
    orders = array("q", (openmp.who_am_i, openmp.own_name(), lead_at, work, data))
    orders_at, _ = orders.buffer_info()
    openmp.parallel(_lead_or_work(), orders_at, threads, 0)
    for number in told:
        torch.set_num_threads(number)  # OpenMP forgets with a team what it was told there
    if not ended:
        # A handler of a signal raised while what an earlier one had raised was being caught.
        raise KeyboardInterrupt
    if (error := ended.pop()) is not None:
        try:
            raise error
        finally:
            del error  # its traceback has this frame: the two would keep each other, and buffers


class _OpenMP(NamedTuple):
    """What there is of OpenMP, and what tells its threads apart.

    parallel: `GOMP_parallel(function, data, threads, flags)`: GNU's interface, LLVM's has it too.
    own_name: `pthread_self()`, not OpenMP's numbers: of two OpenMPs in a process, as scikit-learn
        brings a second one, the one that is asked for a number may not be the one at work.
    who_am_i: its address.
    """

    parallel: Callable[[int, int, int, int], None]
    own_name: Callable[[], int]
    who_am_i: int


@cache
def _openmp() -> _OpenMP | None:
    """Looked up among the libraries in the process: torch has brought one, or there is none.

    It stays usable as long as the process lives, and only in this one: see `_forget_pool`.
    """
    if _is_forked_child:
        return None
    try:
        process = ctypes.CDLL(None)
        parallel, own_name = process.GOMP_parallel, process.pthread_self
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    own_name.argtypes, own_name.restype = (), ctypes.c_long
    return _OpenMP(parallel, own_name, cast(int, ctypes.cast(own_name, ctypes.c_void_p).value))


def _together(work: Callable[[], T], *, threads: int) -> list[T]:
    """Call `work` in up to `threads` threads at once, the calling one among them; their results.

    Everything has to be done once any of the calls has returned: a thread that no core was free
    for until then is not waited for, and its call never happens.

    Args:
        work: takes what is to be done piece by piece; releases the GIL.
        threads: 1 or more.
    """
    waiting: list[Future[T]] = []
    busy: list[Lock] = []  # one of each other thread that has begun; it holds it until its end
    over: list[bool] = []

    def join() -> T:
        own = Lock()
        with own:
            busy.append(own)
            # After that: whoever says that it is over looks for the busy ones then.
            if over:
                raise CancelledError
            return work()

    try:
        if threads > 1:
            try:
                pool = _workers(threads - 1)
                for _ in range(threads - 1):
                    waiting.append(pool.submit(join))
            except RuntimeError:
                # The interpreter is shutting down and starts no threads any more (a final
                # checkpoint on the way out): what was not handed over is done here.
                pass
        results = [work()]
        started = [future for future in waiting if not future.cancel()]
        for error in [future.exception() for future in started]:
            if error is not None:
                raise error
        return results + [future.result() for future in started]
    except BaseException as error:
        interrupt: BaseException | None = None
        # The caller's buffers must outlive every thread that writes to them: also after an error,
        # and after Ctrl-C, at whichever of these lines it comes and however often.
        while True:
            try:
                over.append(True)
                for other in list(busy):
                    with other:
                        pass
                break
            except BaseException as another:
                interrupt = another
        if interrupt is not None:
            raise interrupt from error
        raise


def over_rows(part: Callable[[int, int], T], rows: int, *, row_bytes: int) -> list[T]:
    """Call `part(start, stop)` so that the parts cover 0 … rows once; results in ascending order.

    Uses up to `torch.get_num_threads()` threads, the calling one among them.

    Args:
        part: what to run; releases the GIL.
        rows: how many rows there are.
        row_bytes: bytes read and written for one row, to judge whether a split pays.
    """
    threads = team_size(rows, rows * row_bytes)
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

    _together(work, threads=threads)
    return [results[index] for index in range(parts)]
