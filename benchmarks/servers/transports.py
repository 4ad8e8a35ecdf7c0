"""Measures the ways by which rows travel between a trainer and one embedding server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec

import torch

from benchmarks.machine import own_cpu_seconds
from benchmarks.report import Report, spread_of
from benchmarks.servers.nodes import Servers, ThisMachine
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.tcp import TcpTransport
from recpoint.installation import install_command

__all__ = ["TRANSPORT_KEYS", "measure_transports"]

_WAYS = ("tcp", "ray")
_FIGURES = ("gb_per_s", "batch_ms", "batch_cpu_ms")
TRANSPORT_KEYS = tuple(f"{way}_{figure}" for way in _WAYS for figure in _FIGURES)

#: Rows that a batch of 2,048 samples moves without a cache, and a row of 48 values with its state.
_BATCH_ROWS, _ROW_BYTES = 14_000, 196
#: Batches that are timed together: the clock of a process's CPU time has coarse ticks.
_BATCHES = 10


def measure_transports(report: Report, *, rows: int, rounds: int) -> None:
    """Add the figures of each way to the report.

    Args:
        report: of the benchmark.
        rows: that are read at once for the rate of a stream.
        rounds: how often each is measured, in turns.
    """
    openers: dict[str, Callable[[ExitStack], Home]] = {"tcp": _tcp, "ray": _ray}
    if find_spec("ray") is None:
        del openers["ray"]
        reason = f"ray is not installed: {install_command('servers')}"
        report.leave_out((f"ray_{figure}" for figure in _FIGURES), reason)
    figures_by_way: dict[str, dict[str, list[float]]] = {
        way: {figure: [] for figure in _FIGURES} for way in openers
    }
    with ExitStack() as stack:
        homes = {way: make(stack) for way, make in openers.items()}
        for home in homes.values():
            home.add_table("rows", rows=rows, record_bytes=_ROW_BYTES)
        ids = torch.arange(rows, dtype=torch.int64, device="cpu")
        records = torch.empty(rows, _ROW_BYTES, dtype=torch.uint8, device="cpu").random_(0, 256)
        for home in homes.values():
            home.write_back("rows", ids, records, batch=0)
        out = torch.empty_like(records)
        chosen = torch.randperm(rows)[: min(rows, _BATCH_ROWS)].sort().values
        fetched = records[chosen]
        for number in range(1, rounds + 1):
            for way, home in homes.items():
                start_s = time.perf_counter()
                home.fetch("rows", ids, out)
                rate = records.nbytes / (time.perf_counter() - start_s)
                if not torch.equal(out, records):
                    raise RuntimeError(f"{way}: other rows came than were written")
                cpu, start_s = own_cpu_seconds(), time.perf_counter()
                for _ in range(_BATCHES):
                    home.fetch("rows", chosen, fetched)
                    home.write_back("rows", chosen, fetched, batch=number)
                seconds = (time.perf_counter() - start_s) / _BATCHES
                used = ((own_cpu_seconds() or 0.0) - (cpu or 0.0)) / _BATCHES
                for figure, value in zip(
                    _FIGURES, (1e-9 * rate, 1000 * seconds, 1000 * used), strict=True
                ):
                    figures_by_way[way][figure].append(value)
    for way, figures in figures_by_way.items():
        for figure, values in figures.items():
            report.put(f"{way}_{figure}", spread_of(values))
        report.timed(f"{way}: a batch", [1e-3 * batch_ms for batch_ms in figures["batch_ms"]])
    report.notes.append(
        f"transports: a batch reads and writes {len(chosen):,} rows of {_ROW_BYTES} bytes; CPU of "
        f"all roles; {statistics.median(figures_by_way['tcp']['gb_per_s']):.2f} GB/s a stream by "
        "TCP on "
        "this machine itself"
    )


def _tcp(stack: ExitStack) -> Home:
    servers = stack.enter_context(Servers([ThisMachine()], homes=1))
    (access,) = servers.access
    token = bytes.fromhex(access["token"])
    home = ServedHome([TcpTransport(address, token) for address in access["addresses"]])
    return stack.enter_context(home)


def _ray(stack: ExitStack) -> Home:
    from recpoint.embeddings import ray

    return stack.enter_context(ray(None, transport="ray"))
