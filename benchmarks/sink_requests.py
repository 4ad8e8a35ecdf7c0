"""Looks rows up in a sink at a steady rate, as a serving process does, and prints p99 as JSON."""

from __future__ import annotations

import json
import sys
import time

import torch

from recpoint.errors import NotServing
from recpoint.serving.sinks.reader import SinkReader

__all__ = ["main"]

_ROWS = 100
_REQUESTS_A_SECOND = 100


def main(url: str, seconds: float) -> None:
    """Make requests of 100 rows, 100 a second; a late one is not made up for."""
    random_numbers = torch.Generator().manual_seed(2)
    reader = SinkReader(url)
    with reader.reading() as version:
        table = version.tables[0]
    times_ms = []
    end = time.perf_counter() + seconds
    due = time.perf_counter()
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        ids = torch.randint(table.rows, (_ROWS,), generator=random_numbers)
        start = time.perf_counter()
        while True:
            try:
                with reader.reading() as version:
                    version.lookup(table.name, ids)
                break
            except NotServing:
                continue  # the sink has no grace here; the request begins again
        times_ms.append(1000 * (time.perf_counter() - start))
        due = max(due + 1 / _REQUESTS_A_SECOND, time.perf_counter())
    times_ms.sort()
    print(json.dumps({"p99_ms": times_ms[int(0.99 * (len(times_ms) - 1))]}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
