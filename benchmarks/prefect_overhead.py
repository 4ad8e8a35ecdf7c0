"""Measures the persist flow against the same functions called without Prefect, on real servers.

1 GB is staged. The store is SeaweedFS on this machine; the Prefect server is the one that the agent
starts (SQLite). Flow and bare calls alternate in one process, as in the resident agent. Besides the
seconds of the whole call, the seconds until the trainer has its answer are measured: Prefect's work
after that delays nobody.

`prefect_share` is the median of the differences between the two consecutive calls of a round, over
the flow's median. The store's own seconds differ from call to call by more than Prefect adds, even
in medians of a dozen calls. Therefore `prefect_waiting_share` is measured too: the time of a flow
call in which no function of recpoint is at work, so that the call waits for orchestration, less the
same time of a bare call, over the whole. The CPU time of the process is measured as well. The store
takes most of both cores meanwhile, so the computations of Prefect and its server are waited for; a
store on another machine would leave room for them.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

from benchmarks.report import Report, Spread, spread_of
from benchmarks.workload import StagedTraining, Tables, scratch, staged_run, wait_for
from recpoint.catalog.persist.persist import PersistJob, persist_job
from recpoint.catalog.staging.job_files import read_job
from recpoint.testing.seaweed import SeaweedServer

__all__ = ["KEYS", "run"]

KEYS = (
    "prefect_share",
    "prefect_waiting_share",
    "prefect_waiting_seconds",
    "prefect_cpu_seconds",
    "prefect_share_until_answered",
)

_DIM = 64


def run(*, smoke: bool) -> Report:
    """Measure both ways."""
    mebibytes, rounds = (4, 1) if smoke else (1024, 15)
    size_bytes = mebibytes << 20
    with (
        scratch(in_memory=False) as disk,
        scratch() as memory,
        SeaweedServer(disk / "weed") as weed,
    ):
        os.environ.update(weed.environment(), RECPOINT_HOME=str(disk / "home"))
        os.environ.update(PREFECT_HOME=str(disk / "prefect"), PREFECT_LOGGING_LEVEL="ERROR")
        from recpoint.flows import prefect_server

        server = prefect_server.start_server()
        try:
            wait_for(lambda: prefect_server.is_healthy(server.url) or None)
            # Prefect reads its settings when it is imported.
            os.environ["PREFECT_API_URL"] = server.url
            from recpoint.flows.persist import run_persist

            model = Tables(count=2, rows=size_bytes // (2 * 4 * _DIM), dim=_DIM)
            optimizers = model.optimizers(state=False)
            with staged_run(
                model, optimizers, url=weed.run_url(), staging=memory / "staging"
            ) as tracked:
                return _compare(tracked, run_persist, rounds)
        finally:
            prefect_server.stop_server()


class _Call(NamedTuple):
    """Seconds of one call: whole, until the answer, with no function of recpoint at work, CPU."""

    whole: float
    answered: float
    idle: float
    cpu: float


class _AtWork:
    """Records when the steps of a persist were at work, from the first call of `watch` on."""

    _NAMES = ("find_done", "verify", "quantize", "encode", "upload", "commit", "finish")

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def watch(self) -> None:
        """Start to time the steps' methods, for every caller."""
        for name in self._NAMES:
            setattr(PersistJob, name, self._timed(getattr(PersistJob, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._spans.append((start, perf_counter()))

        return timed

    def idle(self, start: float, end: float) -> float:
        """Return the seconds between two times in which no step worked; clear the record."""
        spans, self._spans = sorted(self._spans), []
        idle, busy_until = 0.0, start
        for begin, stop in spans:
            idle += max(0.0, begin - busy_until)
            busy_until = max(busy_until, stop)
        return idle + max(0.0, end - busy_until)


def _compare(tracked: StagedTraining, flow: Callable[[PersistJob], object], rounds: int) -> Report:
    at_work = _AtWork()
    at_work.watch()
    ways: dict[str, Callable[[Path], object]] = {
        "the same functions, bare": persist_job,
        "the flow": lambda job_file: flow(PersistJob.open(job_file)),
    }
    calls: dict[str, list[_Call]] = {name: [] for name in ways}
    staged_bytes = 0
    for turn in range(rounds + 1):
        # Each way goes first equally often: the store has more to do just after a large upload.
        for name in sorted(ways, reverse=turn % 2 == 0):
            for table in ("tables.0", "tables.1"):
                tracked.checkpointer.mark_all(table)
            tracked.checkpointer.step()
            committed = tracked.checkpointer.stats.committed
            job_file = tracked.cut()
            staged_bytes = sum(segment.bytes for segment in read_job(job_file).segments)
            call = _time(ways[name], job_file, at_work)
            tracked.wait_for_commit(committed)
            if turn:  # the first call of each way warms up caches
                calls[name].append(call)
    median = {
        name: _Call(*(statistics.median(values) for values in zip(*measured, strict=True)))
        for name, measured in calls.items()
    }
    bare, with_flow = median.values()
    more, answered_later, added = (
        [flow[i] - alone[i] for alone, flow in zip(*calls.values(), strict=True)] for i in range(3)
    )
    report = Report(
        name="prefect_overhead",
        columns=("1 persist", "staged MB", "s", "s until answered", "s idle", "s of CPU"),
        rows=[(name, staged_bytes / 1e6, *call) for name, call in median.items()],
    )
    for name, measured in calls.items():
        report.timed(name, [call.whole for call in measured])
        report.timed(f"{name}, until answered", [call.answered for call in measured])
    report.put("prefect_share", _over(more, with_flow.whole))
    report.put("prefect_waiting_share", _over(added, with_flow.whole))
    report.put("prefect_waiting_seconds", spread_of(added))
    report.figures["prefect_cpu_seconds"] = with_flow.cpu - bare.cpu
    report.put("prefect_share_until_answered", _over(answered_later, with_flow.answered))
    return report


def _over(differences: list[float], whole: float) -> Spread:
    return spread_of([difference / whole for difference in differences])


def _time(way: Callable[[Path], object], job_file: Path, at_work: _AtWork) -> _Call:
    answer: list[float] = []
    cpu = process_time()
    start = perf_counter()

    def watch() -> None:
        while job_file.exists():
            sleep(0.002)
        answer.append(perf_counter() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    way(job_file)
    end = perf_counter()
    cpu = process_time() - cpu
    watcher.join(60)
    return _Call(end - start, answer[0], at_work.idle(start, end), cpu)
