"""A thread that does calls one after another, and that need not be waited for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

__all__ = ["CallThread"]

_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class CallThread:
    """Does calls one after another, in a thread of its own.

    When the process ends, the thread of an executor is waited for. This one may wait for a step
    that has failed, or for another rank, and whoever uses it decides how long to wait.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        # It knows the queue and not this object, so that this can be dropped.
        self._thread = threading.Thread(
            target=_do_calls, args=(self._calls,), name=name, daemon=True
        )
        self._thread.start()
        self._has_ended = False
        weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Have the thread do a call.

        Raises:
            RuntimeError: the thread has ended.
        """
        if self._has_ended:
            raise RuntimeError("the cache was closed")
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def end(self, *, within_seconds: float | None = None) -> bool:
        """End the thread after the calls that it has to do. It can be called again.

        Args:
            within_seconds: how long to wait for that; None: without limit.

        Returns:
            Whether it has ended.
        """
        self._has_ended = True
        self._calls.put(None)
        self._thread.join(within_seconds)
        return not self._thread.is_alive()


def _do_calls(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del item, future, call  # the next call may come much later
