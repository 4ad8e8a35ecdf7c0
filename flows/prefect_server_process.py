"""The process of a Prefect server on SQLite: Prefect's own, with its garbage collected in a thread.

    python -m recpoint.flows.prefect_server_process prefect server start --port 4200

Prefect's connections to SQLite wait for each other's transactions in threads, up to a minute, and
each holds a lock of its connection while it waits. A cursor that became garbage in a cycle is reset
by whichever thread happens to collect it, which takes the same lock. Where that is the thread of
the event loop, it waits for a connection that waits for a transaction that only the event loop can
end: the whole server stands still for that minute, and says `database is locked` after it. A thread
that does nothing but collect may wait as long as it likes.
"""

from __future__ import annotations

import atexit
import gc
import runpy
import sys
import threading

__all__ = ["collect_in_a_thread", "main"]

_EVERY_SECONDS = 1.0
#: So many collections of what is young are between two of everything, which stop all threads for
#: some tenths of a second.
_YOUNG_ONES = 60
_END_SECONDS = 5.0


def collect_in_a_thread() -> None:
    """From now on garbage is collected in a thread of its own, and nowhere else."""
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
