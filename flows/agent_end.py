"""How an agent ends: on a signal, and then soon."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

__all__ = ["leave_soon", "stopped_by_signals"]

_LEAVE_SECONDS: Final = 3.0


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop`; only the main thread can be told of signals.

    Args:
        stop: called between any two steps of the main thread, which may hold any lock there: it
            must take none, nor set a `threading.Event`, which has one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def call_stop(number: int, frame: FrameType | None) -> None:
        stop()

    before = {
        number: signal.signal(number, call_stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_soon(*, at_once: bool, status: int = 0) -> None:
    """End the process in a few seconds, unless it ends by itself.

    Python waits at its end for the threads of an upload, which may take hours, and Prefect for an
    API that hangs. Both may be stopped anywhere: what is not committed stays staged.

    Args:
        at_once: end it here, since a thread still works. Python's own end takes from it what it
            works with, piece by piece, and what that leads to would look like a fault of its job.
        status: of the process, where this ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    leave = threading.Timer(_LEAVE_SECONDS, os._exit, (status,))
    leave.daemon = True
    try:
        leave.start()
    except RuntimeError:  # no thread is left on this host
        os._exit(status)
    if at_once:
        logging.shutdown()  # which may wait, for no longer than the timer
        sys.stdout.flush()
        os._exit(status)
