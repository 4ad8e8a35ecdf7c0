"""The stall of a snapshot against a memcpy of the same bytes, at three table sizes.

Tables of 16 floats. Between two snapshots the same number of rows is looked up at random, whatever
the size of the table. Buffers are warm on both sides: the slot has been used before, and the copy
it is compared with goes between two buffers that have been touched.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.report import Report
from benchmarks.workload import Tables, scratch, staged_run
from recpoint.format.job import Job

__all__ = ["run"]

_DIM = 16
_DIRTY_ROWS = 500_000
_SIZES = (1_000_000, 10_000_000, 50_000_000)


def run(*, quick: bool) -> Report:
    """Measure it. `quick` takes a tenth of all sizes."""
    shrink = 10 if quick else 1
    report = Report(
        name="snapshot",
        columns=("rows", "dirty rows", "MB copied", "stall ms", "memcpy ms", "ratio"),
    )
    stalls, ratios = [], []
    for rows in _SIZES:
        with scratch() as folder:
            stall_s, copy_s, job = _measure(rows // shrink, _DIRTY_ROWS // shrink, folder)
        stalls.append(stall_s)
        ratios.append(stall_s / copy_s)
        copied = sum(segment.bytes for segment in job.segments)
        report.rows.append(
            (job.tables[0].spec.rows, job.dirty_rows, copied / 1e6, 1e3 * stall_s, 1e3 * copy_s)
            + (ratios[-1],)
        )
    report.figures = {
        "stall_vs_memcpy": max(ratios),
        "stall_50m_vs_1m": stalls[-1] / stalls[0],
    }
    return report


def _measure(rows: int, dirty_rows: int, folder: Path) -> tuple[float, float, Job]:
    """(median stall, median memcpy of the same bytes, the last job)."""
    model = Tables(count=1, rows=rows, dim=_DIM)
    table = model.table(0)
    optimizers = model.optimizers(state=False)
    generator = torch.Generator().manual_seed(1)
    # Distinct rows, so that every size has exactly as many: a random offset in each equal part.
    part = rows // dirty_rows
    starts = torch.arange(dirty_rows) * part
    stalls, copies = [], []
    with staged_run(
        model, optimizers, url=str(folder / "run"), staging=folder / "staging"
    ) as tracked:
        tracked.cut_and_persist()  # the full; also the slot's first use
        for turn in range(9):
            ids = starts + torch.randint(0, part, (dirty_rows,), generator=generator)
            model.top(table(ids)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            tracked.checkpointer.step()
            job, _ = tracked.cut_and_persist()
            if job.kind != "increment" or job.dirty_rows != dirty_rows:
                raise RuntimeError(f"{job.kind} of {job.dirty_rows} rows, expected {dirty_rows}")
            if turn >= 2:
                stalls.append(tracked.checkpointer.stats.stalls_ms[-1] / 1e3)
                copies.append(_memcpy_seconds(sum(segment.bytes for segment in job.segments)))
    return statistics.median(stalls), statistics.median(copies), job


def _memcpy_seconds(size_bytes: int) -> float:
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = []
    for turn in range(5):
        start = perf_counter()
        target.copy_(source)
        if turn >= 2:
            seconds.append(perf_counter() - start)
    return statistics.median(seconds)
