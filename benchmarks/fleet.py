"""Counts the requests of many ranks: a commit of 64 and of 1,024, a sweep; finds upload streams.

The store is a real S3 server on this machine. Every request that is sent to it is counted in the
client, those that the SDK repeats too. Rows are a few bytes, because only numbers are counted.

- A checkpoint of so many ranks: each rank's job is staged, and persisted by the code of the agent;
  all but the last one find parts missing, look again when it is committed, and are answered.
- A sweep of orphans: what removing them takes, and all that the sweep asks for.
- Uploads through a proxy that limits each connection and all together: the number of uploads at
  once that the agent settles on, against the number from which more are not faster.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.report import Report
from benchmarks.throttled_proxy import ThrottledProxy
from recpoint.catalog.check.check import check
from recpoint.catalog.persist import upload
from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.s3 import S3Store
from recpoint.catalog.store.scheduler import WriteScheduler
from recpoint.catalog.store.store import open_store
from recpoint.errors import RanksMissing
from recpoint.format.naming import AttemptName, row_chunk_key
from recpoint.testing.seaweed import SeaweedServer
from tests.catalog_builder import Table
from tests.rank_jobs import RankJobs

__all__ = ["KEYS", "run"]

KEYS = (
    "requests_per_rank_64",
    "requests_per_rank_1024",
    "requests_per_rank",
    "join_seconds_64",
    "join_seconds_1024",
    "delete_requests_share",
    "sweep_requests_share",
    "sweep_seconds",
    "streams_of_knee",
    "uploaded_of_limit",
)

_TABLES = 4
#: Bytes a second of a connection, and the number of connections that fill the network.
_EACH, _KNEE = 1e6, 8
_UPLOADED_BYTES = 1 << 20


class _Requests:
    """Counts the requests of a store's client by their kinds."""

    def __init__(self, store: S3Store) -> None:
        self.count: Counter[str] = Counter()
        list(store.list("none/"))  # so that there is a client
        client: Any = store._client.get()
        client._file_system._s3.meta.events.register("before-send.s3", self._sent)

    def _sent(self, event_name: str, **_: object) -> None:
        self.count[event_name.rpartition(".")[2]] += 1


def run(*, smoke: bool) -> Report:
    """Count the requests of commits and a sweep, and find the number of upload streams."""
    report = Report(
        name="fleet",
        columns=("what", "number", "requests", "of one", "seconds", "requests by kind"),
    )
    with (
        tempfile.TemporaryDirectory(prefix="recpoint-fleet-") as folder,
        SeaweedServer(Path(folder) / "s3") as server,
        _environment(server.environment()),
    ):
        for ranks, name in ((2, 64), (8, 1024)) if smoke else ((64, 64), (1024, 1024)):
            _commit(report, server, Path(folder), ranks, name)
        figures = report.figures
        figures["requests_per_rank"] = (
            figures["requests_per_rank_1024"] / figures["requests_per_rank_64"]
        )
        _sweep(report, server, 1_200 if smoke else 20_000)
        _streams(report, server, seconds=4 if smoke else 90)
    report.notes = [
        f"a rank has {_TABLES} tables, so {_TABLES} chunks of rows and one of state; "
        "join seconds: the last rank's job, from its first request to its answer",
        "the sweep's requests: DeleteObjects alone, and with all listings and reads",
        f"streams: {_EACH / 1e6:g} MB/s each, {_KNEE * _EACH / 1e6:g} MB/s together",
    ]
    return report


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _store(server: SeaweedServer) -> S3Store:
    store = open_store(server.run_url())
    assert isinstance(store, S3Store)
    return store


def _commit(report: Report, server: SeaweedServer, folder: Path, ranks: int, name: int) -> None:
    store = _store(server)
    run = Run.create(store)
    run.claim(None)
    host = folder / f"host-{ranks}"
    tables = [Table(f"table{table}", torch.rand(ranks, 1)) for table in range(_TABLES)]
    *others, last = RankJobs(run, [host] * ranks, tables).stage(10)
    requests = _Requests(store)
    for job in others:
        try:
            persist_job(job, store=store)
        except RanksMissing:
            continue
        raise AssertionError("a checkpoint was committed before all parts were there")
    began_seconds = perf_counter()
    answers = [persist_job(last, store=store)]
    seconds = perf_counter() - began_seconds
    answers += [persist_job(job, store=store) for job in others]
    if any(answer.result != "committed" for answer in answers):
        raise AssertionError("a rank was not told of the commit")
    counted = requests.count.copy()
    if not check(run).ok or run.manifest(10, 1).ranks != ranks:
        raise AssertionError("the checkpoint is not whole")
    total = counted.total()
    report.figures[f"requests_per_rank_{name}"] = total / ranks
    report.figures[f"join_seconds_{name}"] = seconds
    report.rows.append(
        ("commit, ranks", ranks, total, f"{total / ranks:.2f}", f"{seconds:.2f}", _kinds(counted))
    )


def _sweep(report: Report, server: SeaweedServer, objects: int) -> None:
    store = _store(server)
    run = Run.create(store)
    for _ in range(2):  # the trainer of generation 1 is superseded
        run.claim(None)
    attempt = AttemptName(10, 1, 32 * "a")
    keys = [
        row_chunk_key(*attempt, rank=number // 100, table=0, number=number % 100)
        for number in range(objects)
    ]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda key: store.put(key, b"x"), keys))
    requests = _Requests(store)
    began_seconds = perf_counter()
    result = execute(run, plan_sweep(run, grace_seconds=0))
    seconds = perf_counter() - began_seconds
    if {swept.key for swept in result.removed} != {*keys} or list(store.list("chunks/")):
        raise AssertionError("a sweep left orphans")
    counted = requests.count.copy()
    total = counted.total() - 1  # the gate's own listing
    report.figures["delete_requests_share"] = counted["DeleteObjects"] / objects
    report.figures["sweep_requests_share"] = total / objects
    report.figures["sweep_seconds"] = seconds
    report.rows.append(
        ("sweep, objects", objects, total, f"1/{objects / total:.0f}", f"{seconds:.2f}",
         _kinds(counted))
    )  # fmt: skip


def _streams(report: Report, server: SeaweedServer, *, seconds: float) -> None:
    data = os.urandom(_UPLOADED_BYTES)
    history: list[int] = []
    lock = threading.Lock()
    uploads = upload._MeasuredUploads(upload.MOST_STREAMS, upload.MOST_STREAMS * _UPLOADED_BYTES)
    with (
        ThrottledProxy(server.port, each=_EACH, total=_KNEE * _EACH) as proxy,
        _environment({"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}),
    ):
        store = _store(server)

        def write(number: int) -> None:
            uploads.put(store, f"{number % 64}", data)
            with lock:
                history.append(uploads.budget.at_once)

        began_seconds = perf_counter()
        number = 0
        with WriteScheduler(uploads.budget) as writes:
            while perf_counter() - began_seconds < seconds:
                writes.begin(writes.reserve(len(data)), partial(write, number))
                number += 1
            writes.finish()
        took_seconds = perf_counter() - began_seconds
    late = history[len(history) // 2 :]
    streams = statistics.median(late)
    rate = number * len(data) / took_seconds
    report.figures["streams_of_knee"] = streams / _KNEE
    report.figures["uploaded_of_limit"] = rate / (_KNEE * _EACH)
    steps = [str(a) for a, b in zip([0, *history], history, strict=False) if a != b and a]
    report.rows.append(
        ("uploads", number, "", f"median {streams:g}", f"{took_seconds:.0f}",
         f"{rate / 1e6:.1f} MB/s; {' '.join([*steps, str(history[-1])])}")
    )  # fmt: skip


def _kinds(counted: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counted.most_common())
