"""Runs a Prefect server on SQLite, with garbage collected in a separate thread.

    python -m recpoint.flows.prefect_server_process prefect server start --port 4200

Prefect's threads wait up to a minute for each other's SQLite transactions, and hold the lock of
their connection meanwhile. Collecting a cursor in a garbage cycle resets it, which takes that lock.
If the event loop's thread collects it, that thread waits for a connection, which waits for a
transaction that only the event loop can end. The whole server then stands still for the minute, and
reports `database is locked`. A thread that only collects garbage may wait without harm.
"""

from __future__ import annotations

import atexit
import gc
import runpy
import sys
import threading

__all__ = ["collect_in_a_thread", "main"]

_EVERY_SECONDS = 1.0
#: Every so many collections one is full; rarely, because it stops all threads for some tenths of a
#: second.
_YOUNG_ONES = 60
_END_SECONDS = 5.0


def collect_in_a_thread() -> None:
    """Collect garbage in a separate thread only, from now on."""
    ended = threading.Event()
    thread = threading.Thread(target=_collect, args=(ended,), name="recpoint-garbage", daemon=True)

    def end() -> None:
        ended.set()
        thread.join(_END_SECONDS)  # Python ends daemon threads wherever they are

    gc.disable()
    thread.start()
    atexit.register(end)


def _collect(ended: threading.Event) -> None:
    times = 0
    while not ended.wait(_EVERY_SECONDS):
        times += 1
        gc.collect(2 if times % _YOUNG_ONES == 0 else 1)


def main() -> None:
    """Run the module that the first argument names, with the other arguments, as `python -m`."""
    collect_in_a_thread()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
