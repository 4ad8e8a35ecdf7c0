"""The persist flow against the same functions called bare, 1 GB staged, real servers on both sides.

The store is SeaweedFS on this machine, the Prefect server the one that the agent starts (SQLite).
Both ways are taken in turn, in one process, as in the resident agent. Beside the seconds of the
whole call stand those until the trainer has its answer: what Prefect does after that delays nobody.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

from benchmarks.report import Report
from benchmarks.workload import StagedRun, Tables, scratch, staged_run, wait_for
from recpoint import kernels
from recpoint.catalog.persist import persist_job
from recpoint.catalog.staged import read_job
from recpoint.testing.seaweed import SeaweedServer

__all__ = ["run"]

_DIM = 64


def run(*, quick: bool) -> Report:
    """Measure it."""
    size_bytes = (128 if quick else 1024) << 20
    rounds = 3 if quick else 7
    kernels.warm_up()
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


def _compare(tracked: StagedRun, flow: Callable[[str], object], rounds: int) -> Report:
    ways: dict[str, Callable[[Path], object]] = {
        "the same functions, bare": persist_job,
        "the flow": lambda job_file: flow(str(job_file)),
    }
    whole: dict[str, list[float]] = {name: [] for name in ways}
    answered: dict[str, list[float]] = {name: [] for name in ways}
    staged_bytes = 0
    for turn in range(rounds + 1):
        for name, way in ways.items():
            for table in ("tables.0", "tables.1"):
                tracked.checkpointer.mark_all(table)
            tracked.checkpointer.step()
            committed = tracked.checkpointer.stats.committed
            job_file = tracked.cut()
            staged_bytes = sum(segment.bytes for segment in read_job(job_file).segments)
            seconds, until_answer = _time(way, job_file)
            tracked.wait_for_commit(committed)
            if turn:  # the first of each warms caches up
                whole[name].append(seconds)
                answered[name].append(until_answer)
    report = Report(
        name="prefect_overhead",
        columns=("1 persist", "staged MB", "s", "s until answered"),
        rows=[
            (name, staged_bytes / 1e6, statistics.median(whole[name]))
            + (statistics.median(answered[name]),)
            for name in ways
        ],
    )
    bare, with_flow = ways
    added = statistics.median(b - a for a, b in zip(whole[bare], whole[with_flow], strict=True))
    added_to_answer = statistics.median(
        b - a for a, b in zip(answered[bare], answered[with_flow], strict=True)
    )
    report.figures = {
        "prefect_share": added / statistics.median(whole[with_flow]),
        "prefect_share_until_answered": added_to_answer / statistics.median(answered[with_flow]),
        "prefect_seconds": added,
    }
    return report


def _time(way: Callable[[Path], object], job_file: Path) -> tuple[float, float]:
    """Seconds of the call, and seconds until the job was answered."""
    answer: list[float] = []
    start = perf_counter()

    def watch() -> None:
        while job_file.exists():
            sleep(0.002)
        answer.append(perf_counter() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    way(job_file)
    seconds = perf_counter() - start
    watcher.join(60)
    return seconds, answer[0]
