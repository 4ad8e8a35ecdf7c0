"""Compares the stall of a snapshot with a memcpy of the same bytes, at three table sizes.

Rows have 16 floats. Between two snapshots, the same number of rows is looked up at random in tables
of every size. Both sides use torch's number of threads, and buffers that have been touched before:
the slot is in its second use or later, and the memcpy (`torch.Tensor.copy_`) copies between
ordinary buffers. A memcpy follows each training step and snapshot, so both sides meet the same
caches and the same noise. Several buffers take turns: a single pair would stay partly in a cache of
32 MiB, but rows that training has just changed are not in the cache. The stall is reported by the
plugin for a whole `checkpoint()`: dirty rows, optimizer and generator state, reader, the slot's
checks.

A memcpy reads memory in order. Rows that lie far apart cost more, and the cost grows with the
table. `gather_bound_vs_memcpy` is the time to copy only the rows, with ids known beforehand, over
the memcpy of everything: no snapshot can be faster (`perfect_gather`). `stall_vs_gather` is the
stall over that time. `torch.index_select` of the same rows, into a buffer used before, shows what
torch reaches.

The JSON figures are ratios of medians. The table also shows the fastest of each: on a machine with
other work, medians contain the wait for a core.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from benchmarks.perfect_gather import perfect_gather
from benchmarks.report import Report, ratio
from benchmarks.workload import Tables, scratch, staged_run
from recpoint.catalog.staging import area
from recpoint.format.job import Job

__all__ = ["KEYS", "run"]

KEYS = (
    "stall_vs_gather",
    "stall_vs_memcpy",
    "stall_50m_vs_1m",
    "stall_vs_index_select",
    "gather_bound_vs_memcpy",
)

_DIM = 16
_DIRTY_ROWS = 900_000
_SIZES = (1_000_000, 10_000_000, 50_000_000)
_WARM_UP = 2
_ROUNDS = 15
_BUFFER_PAIRS = 3


def run(*, smoke: bool) -> Report:
    """Measures all sizes; `smoke` divides them by 100."""
    shrink, rounds = (100, 3) if smoke else (1, _ROUNDS)
    report = Report(
        name="snapshot",
        columns=("rows", "dirty rows", "MB copied", "stall ms", "memcpy ms", "ratio")
        + ("fastest stall", "fastest memcpy", "ratio", "rows alone ms", "select ms"),
    )
    found: list[_Seconds] = []
    for rows in (size // shrink for size in _SIZES):
        with scratch() as folder:
            seconds, job = _measure(rows, _DIRTY_ROWS // shrink, rounds, folder)
        found.append(seconds)
        stall, copy, select, gather = (
            report.timed(f"{name}, {rows:,} rows", taken)
            for name, taken in zip(
                ("stall", "memcpy", "select", "rows alone"), seconds, strict=True
            )
        )
        least, least_copy = min(seconds.stalls), min(seconds.copies)
        copied = sum(segment.bytes for segment in job.segments)
        report.rows.append(
            (job.tables[0].spec.rows, job.dirty_rows, copied / 1e6)
            + (1e3 * stall, 1e3 * copy, stall / copy)
            + (1e3 * least, 1e3 * least_copy, least / least_copy)
            + (1e3 * gather, 1e3 * select)
        )
    report.put("stall_vs_gather", max(ratio(one.stalls, one.gathers) for one in found))
    report.put("stall_vs_memcpy", max(ratio(one.stalls, one.copies) for one in found))
    report.put("stall_50m_vs_1m", ratio(found[-1].stalls, found[0].stalls))
    report.put("stall_vs_index_select", max(ratio(one.stalls, one.selects) for one in found))
    report.put("gather_bound_vs_memcpy", max(ratio(one.gathers, one.copies) for one in found))
    return report


class _Seconds(NamedTuple):
    """Seconds of each round.

    The fields: the stall, a memcpy of the same bytes, `index_select` of the rows, and a gather of
    the rows with known ids.
    """

    stalls: list[float]
    copies: list[float]
    selects: list[float]
    gathers: list[float]


def _measure(rows: int, dirty_rows: int, rounds: int, folder: Path) -> tuple[_Seconds, Job]:
    """Returns the times of one size, and the last job."""
    model = Tables(count=1, rows=rows, dim=_DIM)
    table = model.table(0)
    optimizers = model.optimizers(state=False)
    generator = torch.Generator().manual_seed(1)
    # A random row in each of equal parts: the rows are distinct, so every size has as many of them.
    part = rows // dirty_rows
    starts = torch.arange(dirty_rows) * part

    def draw() -> torch.Tensor:
        return starts + torch.randint(0, part, (dirty_rows,), generator=generator)

    seconds = _Seconds([], [], [], [])
    selected, gathered = torch.zeros(dirty_rows, _DIM), torch.zeros(dirty_rows, _DIM)
    memcpy: Callable[[], float] | None = None
    with staged_run(
        model, optimizers, url=str(folder / "run"), staging=folder / "staging"
    ) as tracked:
        tracked.cut_and_persist()  # the full; also the slot's first use
        gather = perfect_gather(table.weight.detach(), gathered)
        for turn in range(_WARM_UP + rounds):
            ids = draw()
            model.top(table(ids)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tracked.checkpointer.step()
            job = area.read_job(tracked.cut())
            memcpy = memcpy or _memcpy(sum(segment.bytes for segment in job.segments))
            copy_s = memcpy()
            # Each copy has its own rows, because the snapshot's rows may still be in a large cache.
            others = draw()
            start = perf_counter()
            torch.index_select(table.weight.detach(), 0, others, out=selected)
            select_s = perf_counter() - start
            if not torch.equal(selected, table.weight.detach()[others]):
                raise RuntimeError("index_select copied other rows than those asked for")
            others = draw()
            start = perf_counter()
            gather(others)
            gather_s = perf_counter() - start
            if not torch.equal(gathered, table.weight.detach()[others]):
                raise RuntimeError("perfect_gather copied other rows than index_select")
            tracked.persist()
            if job.kind != "increment" or job.dirty_rows != dirty_rows:
                raise RuntimeError(f"{job.kind} of {job.dirty_rows} rows, expected {dirty_rows}")
            if turn >= _WARM_UP:
                seconds.stalls.append(tracked.checkpointer.stats.stalls_ms[-1] / 1e3)
                seconds.copies.append(copy_s)
                seconds.selects.append(select_s)
                seconds.gathers.append(gather_s)
    return seconds, job


def _memcpy(size_bytes: int) -> Callable[[], float]:
    """Returns a function that times a copy of `size_bytes`, between other buffers each time."""
    pairs = itertools.cycle(
        [
            (torch.ones(size_bytes, dtype=torch.uint8), torch.ones(size_bytes, dtype=torch.uint8))
            for _ in range(_BUFFER_PAIRS)
        ]
    )

    def copy() -> float:
        source, target = next(pairs)
        start = perf_counter()
        target.copy_(source)
        return perf_counter() - start

    return copy
