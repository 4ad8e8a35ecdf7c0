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

Two more measurements show what bounds the stall. They run the snapshot's own two calls alone, on a
bitmap of their own with as many marked rows: `count` counts the marked rows, `copy` finds their ids
and copies ids and rows. `copy_vs_gather` is `copy` over the copy with known ids, so it is the part
of `stall_vs_gather` that finding and writing ids cost. `count_vs_gather` is the part of counting.
What the stall takes beyond both is in Python: state, reader, the slot's checks.

There are seven rounds. Each round measures all sizes, so a change of the machine's speed meets all
sizes alike. The JSON figures are ratios of medians over the rounds. The table of spreads also shows
the fastest of each: on a machine with other work, medians contain the wait for a core.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.perfect_gather import perfect_gather
from benchmarks.report import Report, ratio
from benchmarks.workload import StagedTraining, Tables, scratch, staged_run
from recpoint.catalog.staging import job_files
from recpoint.kernels import dirty_bitmap, dirty_rows

__all__ = ["KEYS", "in_turn", "run"]

KEYS = (
    "stall_vs_gather",
    "stall_vs_memcpy",
    "stall_50m_vs_1m",
    "stall_vs_index_select",
    "gather_bound_vs_memcpy",
    "count_vs_gather",
    "copy_vs_gather",
)

_DIM = 16
_DIRTY_ROWS = 900_000
_SIZES = (1_000_000, 10_000_000, 50_000_000)
_WARM_UP = 2
_ROUNDS = 7
_BUFFER_PAIRS = 3


def run(*, smoke: bool) -> Report:
    """Measure all sizes in each round; `smoke` divides them by 100."""
    shrink, rounds = (100, 3) if smoke else (1, _ROUNDS)
    report = Report(
        name="snapshot",
        columns=("rows", "dirty rows", "MB copied", "memcpy ms", "select ms", "rows alone ms")
        + ("stall ms", "of it: count", "copy", "rest"),
    )
    with ExitStack() as open_runs:
        sizes = [
            _Size(size // shrink, _DIRTY_ROWS // shrink, open_runs.enter_context(scratch()))
            for size in _SIZES
        ]
        runs = [open_runs.enter_context(size.started()) for size in sizes]
        measures = [partial(size.measure, run) for size, run in zip(sizes, runs, strict=True)]
        in_turn(measures, warm_up=_WARM_UP, rounds=rounds)
    times = [size.seconds for size in sizes]
    for size, seconds in zip(sizes, times, strict=True):
        stall, copy, select, gather, count, native = (
            report.timed(f"{name}, {size.rows:,} rows", call_times)
            for name, call_times in zip(
                ("stall", "memcpy", "select", "rows alone", "count", "copy"), seconds, strict=True
            )
        )
        parts = zip(seconds.stalls, seconds.counts, seconds.copies, strict=True)
        other_s = statistics.median(whole - counted - copied for whole, counted, copied in parts)
        report.rows.append(
            (size.rows, size.dirty_rows, size.copied_bytes / 1e6)
            + (1e3 * copy, 1e3 * select, 1e3 * gather)
            + (1e3 * stall, 1e3 * count, 1e3 * native, 1e3 * other_s)
        )
    report.put(
        "stall_vs_gather", max(ratio(size_times.stalls, size_times.gathers) for size_times in times)
    )
    report.put(
        "stall_vs_memcpy", max(ratio(size_times.stalls, size_times.memcpys) for size_times in times)
    )
    report.put("stall_50m_vs_1m", ratio(times[-1].stalls, times[0].stalls))
    report.put(
        "stall_vs_index_select",
        max(ratio(size_times.stalls, size_times.selects) for size_times in times),
    )
    report.put(
        "gather_bound_vs_memcpy",
        max(ratio(size_times.gathers, size_times.memcpys) for size_times in times),
    )
    report.put(
        "count_vs_gather", max(ratio(size_times.counts, size_times.gathers) for size_times in times)
    )
    report.put(
        "copy_vs_gather", max(ratio(size_times.copies, size_times.gathers) for size_times in times)
    )
    return report


def in_turn(measures: Sequence[Callable[[bool], None]], *, warm_up: int, rounds: int) -> None:
    """Call all measures in each round, with whether the round counts: warm-up rounds do not."""
    for turn in range(warm_up + rounds):
        for measure in measures:
            measure(turn >= warm_up)


class _Seconds(NamedTuple):
    """Seconds of each round.

    The fields: the stall, a memcpy of the same bytes, `index_select` of the rows, a gather of the
    rows with known ids, the count of the marked rows, and their copy with their ids.
    """

    stalls: list[float]
    memcpys: list[float]
    selects: list[float]
    gathers: list[float]
    counts: list[float]
    copies: list[float]


class _Size:
    """One table size: its model, its buffers, and the times of its rounds.

    Args:
        rows: rows of the table.
        dirty_rows: rows that change between two snapshots.
        folder: an empty directory for the run and its staging area.

    Attributes:
        seconds: of the rounds that are kept.
        copied_bytes: bytes of the last snapshot.
    """

    def __init__(self, rows: int, dirty_rows: int, folder: Path) -> None:
        self.rows, self.dirty_rows = rows, dirty_rows
        self.seconds = _Seconds([], [], [], [], [], [])
        self.copied_bytes = 0
        self._folder = folder
        self._model = Tables(count=1, rows=rows, dim=_DIM)
        self._optimizers = self._model.optimizers(state=False)
        self._generator = torch.Generator().manual_seed(1)
        # A random row in each of equal parts: the rows are distinct, so every size has as many.
        self._part = rows // dirty_rows
        self._starts = torch.arange(dirty_rows) * self._part
        self._selected, self._gathered, self._copied = (
            torch.zeros(dirty_rows, _DIM) for _ in range(3)
        )
        self._ids = torch.zeros(dirty_rows, dtype=torch.int64)
        self._memcpy: Callable[[], float] | None = None

    @contextmanager
    def started(self) -> Iterator[StagedTraining]:
        """Yield the run of this size after its full, which is also the slot's first use."""
        with staged_run(
            self._model,
            self._optimizers,
            url=str(self._folder / "run"),
            staging=self._folder / "staging",
        ) as tracked:
            tracked.cut_and_persist()
            yield tracked

    def measure(self, tracked: StagedTraining, is_recorded: bool) -> None:
        """Train a step, take a snapshot and time its competitors; record if `is_recorded`."""
        ids = self._draw()
        self._model.top(self._table(ids)).sum().backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tracked.checkpointer.step()
        job = job_files.read_job(tracked.cut())
        self.copied_bytes = sum(segment.bytes for segment in job.segments)
        self._memcpy = self._memcpy or _memcpy(self.copied_bytes)
        measured = (self._memcpy(), self._select(), self._gather(), *self._count_and_copy())
        tracked.persist()
        if job.kind != "increment" or job.dirty_rows != self.dirty_rows:
            raise RuntimeError(f"{job.kind} of {job.dirty_rows} rows, expected {self.dirty_rows}")
        if is_recorded:
            stall_s = tracked.checkpointer.stats.stalls_ms[-1] / 1e3
            for times, seconds in zip(self.seconds, (stall_s, *measured), strict=True):
                times.append(seconds)

    # Each copy has rows of its own, because the snapshot's rows may still be in a large cache.

    def _select(self) -> float:
        ids = self._draw()
        start = perf_counter()
        torch.index_select(self._weight, 0, ids, out=self._selected)
        seconds = perf_counter() - start
        if not torch.equal(self._selected, self._weight[ids]):
            raise RuntimeError("index_select copied other rows than those asked for")
        return seconds

    def _gather(self) -> float:
        gather = perfect_gather(self._weight, self._gathered)
        ids = self._draw()
        start = perf_counter()
        gather(ids)
        seconds = perf_counter() - start
        if not torch.equal(self._gathered, self._weight[ids]):
            raise RuntimeError("perfect_gather copied other rows than index_select")
        return seconds

    def _count_and_copy(self) -> tuple[float, float]:
        """Time the two calls of a snapshot on rows that only this method has marked."""
        ids = self._draw()
        bitmap = dirty_bitmap.new(self.rows)
        dirty_bitmap.mark(bitmap, ids, rows=self.rows)
        destination = dirty_rows.into(self._ids, (self._weight, self._copied))
        start = perf_counter()
        tally = dirty_rows.count((bitmap,), rows=(self.rows,))
        counted = perf_counter()
        tally.copy([destination])
        copied = perf_counter()
        if not (torch.equal(self._ids, ids) and torch.equal(self._copied, self._weight[ids])):
            raise RuntimeError("dirty_rows copied other rows than those marked")
        return counted - start, copied - counted

    @property
    def _table(self) -> nn.Embedding:
        return self._model.table(0)

    @property
    def _weight(self) -> torch.Tensor:
        return self._table.weight.detach()

    def _draw(self) -> torch.Tensor:
        """Return int64 [dirty_rows], ascending."""
        offsets = torch.randint(0, self._part, (self.dirty_rows,), generator=self._generator)
        return self._starts + offsets


def _memcpy(size_bytes: int) -> Callable[[], float]:
    """Return a function that times a copy of `size_bytes`, between other buffers each time."""
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
