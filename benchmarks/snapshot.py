"""The stall of a snapshot against a memcpy of the same bytes, at three table sizes.

Tables of 16 floats. Between two snapshots the same number of rows is looked up at random, whatever
the size of the table. Both sides use torch's number of threads, and buffers that have been touched
before: the slot is in its second use or later, and the memcpy (`torch.Tensor.copy_`) goes between
ordinary buffers. One follows each training step and snapshot, so both meet the same caches and the
same noise. The buffers take turns: two of them alone would stay partly in a cache of 32 MiB, in
which a copy of rows that training has just changed cannot be. The stall is what the plugin reports
for a whole `checkpoint()`: dirty rows, optimizer and generator state, reader, the slot's checks.

A memcpy reads memory in order; rows that lie far apart cost more, and the more the larger the
table. `gather_bound_vs_memcpy` is what copying the rows alone takes, their ids known beforehand,
against the memcpy of everything: no snapshot of them can be below that (`perfect_gather`).
`torch.index_select` of the same rows, into a buffer used before, is what torch makes of it.

The JSON figures are ratios of medians. The table shows the fastest of each as well: on a machine
with other work, medians contain the wait for a core.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.perfect_gather import perfect_gather
from benchmarks.report import Report, median_ratio
from benchmarks.workload import Tables, scratch, staged_run
from recpoint.catalog.staging import staged
from recpoint.format.job import Job

__all__ = ["run"]

_DIM = 16
_DIRTY_ROWS = 900_000
_SIZES = (1_000_000, 10_000_000, 50_000_000)
_WARM_UP = 2
_ROUNDS = 15
_BUFFER_PAIRS = 3


def run(*, quick: bool) -> Report:
    """Measure it. `quick` takes a tenth of all sizes."""
    shrink = 10 if quick else 1
    report = Report(
        name="snapshot",
        columns=("rows", "dirty rows", "MB copied", "stall ms", "memcpy ms", "ratio")
        + ("fastest stall", "fastest memcpy", "ratio", "rows alone ms", "select ms"),
    )
    stalls, ratios, select_ratios, bounds = [], [], [], []
    for rows in _SIZES:
        with scratch() as folder:
            times, copies, selects, gathers, job = _measure(
                rows // shrink, _DIRTY_ROWS // shrink, folder
            )
        stalls.append(statistics.median(times))
        ratios.append(median_ratio(times, copies))
        select_ratios.append(median_ratio(times, selects))
        bounds.append(median_ratio(gathers, copies))
        copied = sum(segment.bytes for segment in job.segments)
        report.rows.append(
            (job.tables[0].spec.rows, job.dirty_rows, copied / 1e6)
            + (1e3 * stalls[-1], 1e3 * statistics.median(copies), ratios[-1])
            + (1e3 * min(times), 1e3 * min(copies), min(times) / min(copies))
            + (1e3 * statistics.median(gathers), 1e3 * statistics.median(selects))
        )
    report.figures = {
        "stall_vs_memcpy": max(ratios),
        "stall_50m_vs_1m": stalls[-1] / stalls[0],
        "stall_vs_index_select": max(select_ratios),
        "gather_bound_vs_memcpy": max(bounds),
    }
    return report


def _measure(
    rows: int, dirty_rows: int, folder: Path
) -> tuple[list[float], list[float], list[float], list[float], Job]:
    """(seconds of each stall, memcpy of the same bytes, index_select of the rows, a gather of them
    with their ids known; the last job)."""
    model = Tables(count=1, rows=rows, dim=_DIM)
    table = model.table(0)
    optimizers = model.optimizers(state=False)
    generator = torch.Generator().manual_seed(1)
    # Distinct rows, so that every size has exactly as many: a random offset in each equal part.
    part = rows // dirty_rows
    starts = torch.arange(dirty_rows) * part

    def draw() -> torch.Tensor:
        return starts + torch.randint(0, part, (dirty_rows,), generator=generator)

    stalls: list[float] = []
    copies: list[float] = []
    selects: list[float] = []
    gathers: list[float] = []
    selected, gathered = torch.zeros(dirty_rows, _DIM), torch.zeros(dirty_rows, _DIM)
    memcpy: Callable[[], float] | None = None
    with staged_run(
        model, optimizers, url=str(folder / "run"), staging=folder / "staging"
    ) as tracked:
        tracked.cut_and_persist()  # the full; also the slot's first use
        gather = perfect_gather(table.weight.detach(), gathered)
        for turn in range(_WARM_UP + _ROUNDS):
            ids = draw()
            model.top(table(ids)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tracked.checkpointer.step()
            job = staged.read_job(tracked.cut())
            memcpy = memcpy or _memcpy(sum(segment.bytes for segment in job.segments))
            copy_s = memcpy()
            # Each its own rows: those of the snapshot may still be in a large cache.
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
                stalls.append(tracked.checkpointer.stats.stalls_ms[-1] / 1e3)
                copies.append(copy_s)
                selects.append(select_s)
                gathers.append(gather_s)
    return stalls, copies, selects, gathers, job


def _memcpy(size_bytes: int) -> Callable[[], float]:
    """Copies `size_bytes`, between other buffers each time; returns the seconds."""
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
