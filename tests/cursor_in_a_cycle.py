"""A program whose main thread alone can end what a thread of its own waits for in SQLite.

So does the event loop of a Prefect server: it commits what others wait for, while they hold a lock
that a cursor takes which is collected as garbage. Prints what has become of the one who waits.
"""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
import weakref

_BUSY_MS = 20_000
_PATIENCE_SECONDS = 60.0


class _Statement(list[object]):
    """A list that can be watched."""


def main() -> None:
    """Let one connection to the file that is named wait for another, and make garbage."""
    (path,) = sys.argv[1:]
    holds = sqlite3.connect(path, isolation_level=None)
    waits = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    waits.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    holds.execute("CREATE TABLE run (state TEXT)")
    holds.execute("BEGIN IMMEDIATE")
    began, told = threading.Event(), []

    def store() -> None:
        try:
            waits.execute("INSERT INTO run VALUES ('completed')")
            told.append("stored")
        except sqlite3.OperationalError as error:
            told.append(str(error))

    # It has more to give, so that it is to be reset.
    cycle = _Statement([waits.execute("SELECT 1 UNION SELECT 2")])
    cycle.append(cycle)
    collected = threading.Event()
    weakref.finalize(cycle, collected.set)
    waits.set_trace_callback(lambda _: began.set())  # right before the connection waits
    thread = threading.Thread(target=store)
    thread.start()
    began.wait()
    del cycle
    deadline = time.monotonic() + _PATIENCE_SECONDS
    kept: list[list[object]] = []
    while not collected.wait(0.01) and time.monotonic() < deadline:
        kept.extend([] for _ in range(10_000))  # often enough for Python to look for garbage itself
    holds.execute("COMMIT")
    thread.join()
    print(*told, "collected" if collected.is_set() else "kept")


if __name__ == "__main__":
    main()
