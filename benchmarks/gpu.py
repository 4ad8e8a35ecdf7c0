"""Measures the Triton kernels on a GPU against copy rates of the same run, after checking them.

Times are device times: while a spinning kernel keeps the device busy, the host enqueues an event,
the call and another event, so that neither Python nor the launch adds time between the events.
`collect_many` waits for the device itself, so wall time is measured. There are 26 tables, as in
Criteo's data sets, with 64 floats a row and a row-wise optimizer state. Traffic counts each byte
read and each byte written once. Its share is relative to the rate at which the device copies one
buffer to another.

A run on a GPU writes a record to benchmarks/results. It needs only torch, Triton and numpy.
"""

from __future__ import annotations

import itertools
import json
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu_correctness import BITS, check
from benchmarks.gpu_kernels import load
from benchmarks.machine import commit
from benchmarks.report import Report, Spread, spread_of

__all__ = ["KEYS", "record", "run"]

KEYS = ("mark_2m_us", "gather_vs_copy", "fused4_vs_copy")

_RESULTS: Final = Path(__file__).with_name("results")
_TABLES: Final = 26
_DIM: Final = 64
_MARKED_IDS: Final = 2_000_000
_DIRTY_SHARE: Final = 0.1
#: Cycles of the GPU's clock that the kernel spins: enough for the host to enqueue the longest call.
_SPIN_CYCLES: Final = 4_000_000


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """The settings and the report that the measurements share."""

    device: torch.device
    kernels: dict[str, Any]
    rounds: int
    rows: int  # of each table
    report: Report

    def device_seconds(
        self, call: Callable[[], object], prepare: Callable[[], object] | None = None
    ) -> list[float]:
        """Return device times in seconds; `prepare` undoes what the call changes."""
        times: list[float] = []
        for number in range(3 + self.rounds):
            if prepare is not None:
                prepare()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_SPIN_CYCLES)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            if number >= 3:  # the first calls compile, and allocate buffers
                times.append(start.elapsed_time(end) / 1e3)
        return times

    def wall_seconds(self, call: Callable[[], object], *, wait: bool = True) -> list[float]:
        """Return wall times in seconds; without `wait`, only until the call returns."""
        times: list[float] = []
        for number in range(3 + self.rounds):
            torch.cuda.synchronize()
            start = perf_counter()
            call()
            if wait:
                torch.cuda.synchronize()
            if number >= 3:
                times.append(perf_counter() - start)
        torch.cuda.synchronize()
        return times

    def row(
        self, name: str, times: list[float], traffic_bytes: int, ceiling: float | None
    ) -> Spread:
        """Add a row; return the traffic's median rate as a share of the ceiling.

        `ceiling`: in bytes a second; None: the median rate of the traffic itself.
        """
        seconds = self.report.timed(name, times)
        ceiling = ceiling or traffic_bytes / seconds
        shares = spread_of([traffic_bytes / seconds / ceiling for seconds in times])
        shares = shares._replace(median=traffic_bytes / seconds / ceiling)
        gigabytes = traffic_bytes / seconds / 1e9
        self.report.rows.append(
            (name, 1e6 * seconds, traffic_bytes / 1e6, gigabytes, shares.median)
        )
        return shares

    def row_of_time(self, name: str, times: list[float]) -> None:
        """Add a row of a time that has no ceiling."""
        seconds = self.report.timed(name, times)
        self.report.rows.append((name, 1e6 * seconds, "-", "-", "-"))


def run(*, smoke: bool) -> Report:
    """Measure all kernels, or report that there is no GPU."""
    report = Report(name="gpu", columns=("what", "µs", "MB moved", "GB/s", "share of copy"))
    if not torch.cuda.is_available():
        report.rows.append(("not run: no CUDA device", "-", "-", "-", "-"))
        report.leave_out(KEYS, "no CUDA device")
        return report
    device = torch.device("cuda")
    compared = check(device, rows=2_000 if smoke else 60_000, seed=torch.seed() % 2**31)
    report.notes.append(f"{compared} results equal those of the references, bit for bit")
    free_bytes = torch.cuda.mem_get_info(device)[0]
    table_bytes = min(1 << (28 if smoke else 34), free_bytes // 3)
    bench = _Bench(
        device=device,
        kernels=load(),
        rounds=3 if smoke else 40,
        rows=table_bytes // (_TABLES * 4 * (_DIM + 1)),
        report=report,
    )
    copy = _ceiling(bench)
    _marks(bench)
    _collects(bench)
    _tables(bench, copy)
    if not smoke:
        report.notes.append(record(report, device))
    return report


def _ceiling(bench: _Bench) -> float:
    """Return the bytes a second that a copy on the device reads and writes."""
    size = min(1 << 30, torch.cuda.mem_get_info(bench.device)[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    name = "copy on the device"
    bench.row(name, bench.device_seconds(partial(target.copy_, source)), 2 * size, None)
    return 2 * size / bench.report.times[name].median


def _batches(bench: _Bench, *, skewed: bool) -> list[list[Tensor]]:
    """Return eight batches of ids for all tables, so that no batch is in a cache by chance."""
    count = _MARKED_IDS // _TABLES
    batches = []
    for _ in range(8):
        draws = torch.rand(_TABLES, count, dtype=torch.float64, device=bench.device)
        # Skewed: a row of rank k is drawn with a probability like 1 / k.
        places = (bench.rows**draws if skewed else draws * bench.rows).long() - int(skewed)
        batches.append(list(places.clamp(0, bench.rows - 1).unbind()))
    return batches


def _marks(bench: _Bench) -> None:
    dirty_bitmap = bench.kernels["dirty_bitmap"].triton
    words = (bench.rows + 31) // 32
    bitmaps = list(torch.zeros(_TABLES, words, dtype=torch.int32, device=bench.device).unbind())
    rows = [bench.rows] * _TABLES
    slowest: list[Spread] = []
    for skewed in (False, True):
        batches = _batches(bench, skewed=skewed)
        turns = itertools.cycle(batches)

        def mark(turns: Iterator[list[Tensor]] = turns) -> None:
            dirty_bitmap.mark_many(bitmaps, next(turns), rows=rows)

        def clear() -> None:
            for bitmap in bitmaps:
                bitmap.zero_()

        for _ in batches:  # brings each batch's table of addresses to the device
            mark()
        name = f"mark 2 M ids of {_TABLES} tables, {'skewed' if skewed else 'uniform'}"
        clean, marked_before = bench.device_seconds(mark, clear), bench.device_seconds(mark)
        slowest.append(spread_of([1e6 * seconds for seconds in clean]))
        bench.row_of_time(f"{name}, clean bitmaps", clean)
        bench.row_of_time(f"{name}, marked before", marked_before)
        host = bench.wall_seconds(mark, wait=False)
        bench.row_of_time(f"{name}, until the call returns", host)
    bench.report.put("mark_2m_us", max(slowest))
    _mark_features(bench, bitmaps)


def _mark_features(bench: _Bench, bitmaps: list[Tensor]) -> None:
    dirty_bitmap = bench.kernels["dirty_bitmap"].triton
    ids = torch.cat(_batches(bench, skewed=True)[0])
    bags = [(n, n + 1) for n in range(_TABLES)]
    offsets = torch.arange(_TABLES + 1, device=bench.device) * (ids.numel() // _TABLES)
    rows = [bench.rows] * _TABLES
    mark = partial(dirty_bitmap.mark_features, bitmaps, ids, offsets, bags, rows=rows)
    mark()  # brings the table of addresses to the device
    name = f"mark 2 M ids of {_TABLES} features of one lookup, skewed"
    bench.row_of_time(f"{name}, marked before", bench.device_seconds(mark))
    bench.row_of_time(f"{name}, until the call returns", bench.wall_seconds(mark, wait=False))


def _collects(bench: _Bench) -> None:
    dirty_bitmap = bench.kernels["dirty_bitmap"].triton
    rows = [bench.rows] * _TABLES
    for share in (0.01, 0.26):
        bitmaps = [_dirty(bench, share) for _ in range(_TABLES)]
        seconds = bench.wall_seconds(partial(dirty_bitmap.collect_many, bitmaps, rows=rows))
        name = f"collect {sum(rows) / 1e6:.0f} M rows, {100 * share:.0f} % dirty, with its wait"
        bench.row_of_time(name, seconds)


def _dirty(bench: _Bench, share: float) -> Tensor:
    """Return a bitmap in which the given share of the rows is marked."""
    dirty_bitmap = bench.kernels["dirty_bitmap"].triton
    bitmap = torch.zeros((bench.rows + 31) // 32, dtype=torch.int32, device=bench.device)
    ids = torch.nonzero(torch.rand(bench.rows, device=bench.device) < share).flatten()
    dirty_bitmap.mark(bitmap, ids, rows=bench.rows)
    return bitmap


def _tables(bench: _Bench, copy: float) -> None:
    """Measure all that reads rows: gathers, quantizers, and copies to the host."""
    dirty_bitmap = bench.kernels["dirty_bitmap"].triton
    tables = [torch.randn(bench.rows, _DIM, device=bench.device) * 0.05 for _ in range(_TABLES)]
    states = [torch.rand(bench.rows, device=bench.device) for _ in range(_TABLES)]
    bitmaps = [_dirty(bench, _DIRTY_SHARE) for _ in range(_TABLES)]
    ids = dirty_bitmap.collect_many(bitmaps, rows=[bench.rows] * _TABLES)
    _gathers(bench, tables, states, ids, copy)
    del states
    # All dirty rows are in one table, so that the cost of launches does not blur the cost of rows.
    table = torch.cat(tables)
    all_ids = torch.cat([table_ids + k * bench.rows for k, table_ids in enumerate(ids)])
    del tables
    _quantizers(bench, table, all_ids, copy)
    _drains(bench, table, all_ids, copy)


def _gathers(
    bench: _Bench, tables: list[Tensor], states: list[Tensor], ids: list[Tensor], copy: float
) -> None:
    gather_many = bench.kernels["row_gather"].triton.gather_many
    count = sum(row_ids.numel() for row_ids in ids)

    def measure(name: str, sources: list[Tensor], chosen: list[Tensor], out: Tensor) -> None:
        outs = list(out.split([row_ids.numel() for row_ids in chosen]))
        seconds = bench.device_seconds(lambda: gather_many(sources, chosen, outs))
        bench.row(name, seconds, 2 * out.nbytes + 8 * out.shape[0], copy)

    values = torch.empty(count, _DIM, device=bench.device)
    of_states = torch.empty(count, device=bench.device)
    name = f"gather {count / 1e6:.1f} M rows of {_DIM} floats"
    measure(name, tables, ids, values)
    measure("gather their states of one float", states, ids, of_states)
    outs = [*values.split([row_ids.numel() for row_ids in ids])]
    outs += of_states.split([row_ids.numel() for row_ids in ids])
    seconds = bench.device_seconds(lambda: gather_many([*tables, *states], [*ids, *ids], outs))
    traffic = 2 * (values.nbytes + of_states.nbytes) + 16 * count
    name = "gather rows and states in one launch"
    bench.report.put("gather_vs_copy", bench.row(name, seconds, traffic, copy))
    for dim in (8, 16, 128):
        # The same memory viewed as a table of another width, with as many rows as fill it.
        width = [table.view(-1, dim) for table in tables]
        chosen = [
            torch.nonzero(torch.rand(len(table), device=bench.device) < _DIRTY_SHARE).flatten()
            for table in width
        ]
        out = torch.empty(sum(row_ids.numel() for row_ids in chosen), dim, device=bench.device)
        measure(f"gather {len(out) / 1e6:.1f} M rows of {dim} floats", width, chosen, out)


def _quantizers(bench: _Bench, table: Tensor, ids: Tensor, copy: float) -> None:
    from recpoint.kernels.quantize.method import ASYMMETRIC, SYMMETRIC, Method, default_method

    quantize = bench.kernels["quantize"].triton
    n = ids.numel()
    cases = [(method, bits) for method in (SYMMETRIC, ASYMMETRIC) for bits in BITS]
    cases += [(default_method(bits), bits) for bits in (2, 3, 4)]
    cases += [(Method(name="greedy", bins=50, ratio_permille=500), bits) for bits in (2, 4)]
    for method, bits in cases:
        call = partial(quantize.quantize_rows, table, ids, bits, method, half_parameters=True)
        seconds = bench.device_seconds(call)
        traffic = n * (8 + 4 * _DIM + _DIM * bits // 8 + 10)
        name = f"gather, quantize and pack, {method.name}, {bits} bits"
        share = bench.row(name, seconds, traffic, copy)
        if (method, bits) == (ASYMMETRIC, 4):
            bench.report.put("fused4_vs_copy", share)
    rows = table[: min(n, len(table))]
    for bits in BITS:
        call = partial(quantize.quantize_packed, rows, bits, half_parameters=True)
        seconds = bench.device_seconds(call)
        traffic = len(rows) * (4 * _DIM + _DIM * bits // 8 + 10)
        bench.row(f"quantize and pack rows in sequence, {bits} bits", seconds, traffic, copy)
    packed = quantize.quantize_packed(rows, 4)
    seconds = bench.device_seconds(
        lambda: quantize.dequantize_packed(*packed[:3], dim=_DIM, bits=4)
    )
    bench.row("unpack and decode, 4 bits", seconds, len(rows) * (4 * _DIM + _DIM // 2 + 8), copy)


def _drains(bench: _Bench, table: Tensor, ids: Tensor, copy: float) -> None:
    """Measure copies to the host: of rows, and of codes with parameters of two bytes."""
    quantize = bench.kernels["quantize"].triton
    packed = quantize.quantize_rows(table, ids, 4, half_parameters=True).packed
    sizes = {"rows of 32 bits": ids.numel() * 4 * _DIM, "codes of 4 bits": packed.nbytes}
    sizes["codes of 4 bits"] += 2 * 2 * ids.numel()
    for name, size in sizes.items():
        source = torch.ones(size, dtype=torch.uint8, device=bench.device)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        seconds = bench.device_seconds(partial(pinned.copy_, source, non_blocking=True))
        bench.row(f"{ids.numel() / 1e6:.1f} M {name} to pinned memory", seconds, size, copy)


def record(report: Report, device: torch.device) -> str:
    """Write the figures, the machine and the versions to a file; return a note that names it."""
    import triton

    name = torch.cuda.get_device_name(device)
    document = {
        "benchmark": report.name,
        "device": name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "columns": list(report.columns),
        "rows": [list(row) for row in report.rows],
        "figures": report.figures,
    }
    _RESULTS.mkdir(exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    file = _RESULTS / f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower())}-{stamp}.json"
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return f"recorded in benchmarks/results/{file.name}"
