"""Measures admission and eviction of keyed tables on one thread: the sketch, and who leaves next.

In each batch 50,000 random rows of a full table are used, and 500 others leave for new keys. The
figures are of all calls together, scans for candidates included. The other side sorts all rows in
each batch. Seconds are those of the thread's processor time, because figures are for a core.

The benchmark `keyed` calls `measure`.
"""

from __future__ import annotations

from functools import partial
from time import thread_time

import torch
from torch import Tensor

from benchmarks.report import Report, alternate, ratio, spread_of
from recpoint.kernels.key_order import KeyOrder, reference
from recpoint.kernels.key_sketch import DEPTH, KeySketch
from recpoint.kernels.key_sketch import reference as sketch_reference

__all__ = ["KEYS", "measure"]

KEYS = (
    "sketch_adds_per_second",
    "evictions_per_second",
    "eviction_longest_ms",
    "eviction_vs_sort",
)

_BATCH = 50_000
_LEAVING = 500


def measure(report: Report, *, smoke: bool) -> None:
    """Add the figures KEYS."""
    rows, batches = (20_000, 12) if smoke else (10_000_000, 1_500)
    _gate()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _measure_sketch(report, rows, rounds=3 if smoke else 21)
        _measure_order(report, rows, batches)
    finally:
        torch.set_num_threads(threads)


def _gate() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (400,))
    sketches = [
        kind(torch.zeros(DEPTH, 90, dtype=torch.uint8))
        for kind in (KeySketch, sketch_reference.KeySketch)
    ]
    for sketch in sketches:
        sketch.add(keys)
        sketch.add(keys[:100])
    if not torch.equal(sketches[0].counts, sketches[1].counts):
        raise AssertionError("key_sketch: other counts than the reference's")


def _measure_sketch(report: Report, rows: int, rounds: int) -> None:
    sketch = KeySketch(torch.zeros(DEPTH, rows, dtype=torch.uint8))
    batches = [torch.randint(-(2**63), 2**63 - 1, (_BATCH,)) for _ in range(rounds + 1)]
    seconds = [alternate(1, partial(sketch.add, keys), clock=thread_time)[0][0] for keys in batches]
    report.timed(f"adds to a sketch of {rows:,} columns", seconds[1:])
    report.put("sketch_adds_per_second", spread_of([_BATCH / time for time in seconds[1:]]))


def _measure_order(report: Report, rows: int, batches: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows + 1,), generator=generator)
    last_use = torch.randint(0, 1_000, (rows + 1,), generator=generator)
    last_use[0] = -1
    order = KeyOrder(keys, last_use)
    seconds: list[float] = []
    for step in range(1_000, 1_000 + batches):
        last_use[torch.randint(1, rows + 1, (_BATCH,), generator=generator)] = step
        start = thread_time()
        slots = order.least(_LEAVING, step)
        middle = thread_time()
        _replace(keys, last_use, slots, step, generator)
        joined = thread_time()
        order.join(slots)
        seconds.append(middle - start + thread_time() - joined)
    by_sort = reference.KeyOrder(keys, last_use)
    results: list[Tensor] = []
    sort_seconds = alternate(
        3, lambda: results.append(by_sort.least(_LEAVING, step)), clock=thread_time
    )[0]
    if not torch.equal(results[0], order.least(_LEAVING, step)):
        raise AssertionError("key_order: other rows than those of a sort")
    longest, mean = max(seconds), sum(seconds) / len(seconds)
    report.timed(f"least and join, {rows:,} rows", seconds)
    report.timed(f"sort of {rows:,} rows", sort_seconds)
    report.put("evictions_per_second", spread_of([_LEAVING / mean]))
    report.put("eviction_longest_ms", spread_of([1e3 * longest]))
    report.put("eviction_vs_sort", ratio(sort_seconds, [mean] * len(sort_seconds)))


def _replace(
    keys: Tensor, last_use: Tensor, slots: Tensor, step: int, generator: torch.Generator
) -> None:
    keys[slots] = torch.randint(-(2**63), 2**63 - 1, (len(slots),), generator=generator)
    last_use[slots] = step
