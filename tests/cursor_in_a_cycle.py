"""Reproduces a deadlock of SQLite with garbage collection, as in a Prefect server.

Another thread waits in SQLite for a lock that only the main thread can release. The event loop of a
Prefect server is such a main thread: it commits what other threads wait for. These threads hold a
lock which the main thread needs if it collects a cursor as garbage. Prints the outcome of the
waiting thread.
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
    """A list to which weak references are possible."""


def main() -> None:
    """Make one connection to the given file wait for another, and make garbage meanwhile."""
    (path,) = sys.argv[1:]
    holds = sqlite3.connect(path, isolation_level=None)
    waits = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    waits.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
    holds.execute("CREATE TABLE run (state TEXT)")
    holds.execute("BEGIN IMMEDIATE")
    began, results = threading.Event(), []

    def store() -> None:
        try:
            waits.execute("INSERT INTO run VALUES ('completed')")
            results.append("stored")
        except sqlite3.OperationalError as error:
            results.append(str(error))

    # The cursor has more rows, so that its collection must reset it.
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
    cyclic_lists: list[list[object]] = []
    while not collected.wait(0.01) and time.monotonic() < deadline:
        cyclic_lists.extend(
            [] for _ in range(10_000)
        )  # enough objects for Python to collect by itself
    holds.execute("COMMIT")
    thread.join()
    print(*results, "collected" if collected.is_set() else "kept")


if __name__ == "__main__":
    main()
