"""Measures first values of rows on one thread, against torch's generator and the reference.

Values for a batch's few new keys are what a lookup of a keyed table waits for; values of many rows
fill tables. Seconds are those of the thread's processor time. The benchmark `keyed` calls
`measure`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import thread_time

import torch
from torch import Tensor

from benchmarks.report import Report, alternate, ratio, spread_of
from recpoint.kernels.first_values import reference, uniform_values

__all__ = ["KEYS", "measure"]

KEYS = ("first_values_per_second", "first_values_few_us", "first_values_vs_reference")

_DIM, _FEW = 16, 5


def _values(kernel: Callable[..., Tensor], ids: Tensor) -> Tensor:
    return kernel(
        5,
        ids,
        low=-0.01,
        high=0.01,
        row_values=_DIM,
        columns=range(_DIM),
        dtype=torch.float32,
    )


def measure(report: Report, *, smoke: bool) -> None:
    """Add the figures KEYS."""
    rows, rounds, calls = (200, 3, 10) if smoke else (50_000, 21, 1_000)
    ids = torch.randint(-(2**63), 2**63 - 1, (rows,))
    if not torch.equal(_values(uniform_values, ids), _values(reference.uniform_values, ids)):
        raise AssertionError("first_values: other values than the reference's")

    def draw_few() -> None:
        for _ in range(calls):
            _values(uniform_values, ids[:_FEW])

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        many, by_reference, by_torch, few = alternate(
            rounds,
            partial(_values, uniform_values, ids),
            partial(_values, reference.uniform_values, ids),
            lambda: torch.empty(rows, _DIM).uniform_(-0.01, 0.01),
            draw_few,
            clock=thread_time,
        )
    finally:
        torch.set_num_threads(threads)
    report.timed(f"first values of {rows:,} rows", many)
    report.timed("the same by torch's generator", by_torch)
    report.put("first_values_per_second", spread_of([rows * _DIM / each for each in many]))
    report.put("first_values_few_us", spread_of([1e6 * each / calls for each in few]))
    report.put("first_values_vs_reference", ratio(by_reference, many))
