"""Looks rows up at a steady rate, as a serving process does, and prints p99 as JSON.

Rows come from a sink, or from the memory of a follower that runs in this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from recpoint.errors import NotServing
from recpoint.serving.follower import Follower
from recpoint.serving.sinks.reader import SinkReader

__all__ = ["main"]

_ROWS = 100
_REQUESTS_A_SECOND = 100
_POLL_SECONDS = 0.25


def main(source: str, url: str, seconds: float) -> None:
    """Make requests of 100 rows, 100 a second; a late one is not made up for.

    Args:
        source: "sink", "follower", or "pinned": a follower that stays at its first version.
        url: of the sink, or of the run.
        seconds: how long.
    """
    with ExitStack() as stack:
        if source == "sink":
            rows, lookup = _sink(SinkReader(url))
        else:
            follower = Follower(url, poll_seconds=_POLL_SECONDS)
            rows, lookup = _follower(stack.enter_context(follower))
            if source == "pinned" and follower.version is not None:
                follower.pin(follower.version)
        times_ms = sorted(_times_ms(rows, lookup, seconds))
    print(json.dumps({"p99_ms": times_ms[int(0.99 * (len(times_ms) - 1))]}))


def _sink(reader: SinkReader) -> tuple[int, Callable[[Tensor], object]]:
    """Return how many rows the first table has, and how to look some of them up."""
    with reader.reading() as version:
        table = version.tables[0]

    def lookup(ids: Tensor) -> object:
        while True:
            try:
                with reader.reading() as version:
                    return version.lookup(table.name, ids)
            except NotServing:
                continue  # the sink has no grace here; the request begins again

    return table.rows, lookup


def _follower(follower: Follower) -> tuple[int, Callable[[Tensor], object]]:
    """Return how many rows the first table has, and how to look some of them up."""
    if not follower.wait(seconds=120):
        raise TimeoutError("the follower has no version after 120 s")
    with follower.reading() as version:
        name, table = next(iter(version.tables.items()))

    def lookup(ids: Tensor) -> object:
        with follower.reading() as version:
            return version.lookup(name, ids)

    return table.rows, lookup


def _times_ms(rows: int, lookup: Callable[[Tensor], object], seconds: float) -> list[float]:
    random_numbers = torch.Generator().manual_seed(2)
    times_ms = []
    end = time.perf_counter() + seconds
    due = time.perf_counter()
    while due < end:
        time.sleep(max(0.0, due - time.perf_counter()))
        ids = torch.randint(rows, (_ROWS,), generator=random_numbers)
        start = time.perf_counter()
        lookup(ids)
        times_ms.append(1000 * (time.perf_counter() - start))
        due = max(due + 1 / _REQUESTS_A_SECOND, time.perf_counter())
    return times_ms


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
