"""Measures publishing to Redis: against bare pipelined writes, and what readers notice of it.

A run on a real S3 server gets increments of 100,000 changed rows of 64 values. Measured is the time
from a commit until readers of Redis see the version, against writing the same bytes with pipelined
SETs and nothing else. Then a process looks up 10,000 rows a second, 100 in a request:

- in Redis, while versions arrive, and while none does;
- there, while the same versions are committed and arrive in another Redis server: what they take
  from the readers besides time of the readers' own server;
- in the memory of a follower, while versions arrive, while none does, and while they are committed
  and the follower is pinned to one.

Redis, S3, publisher and trainer run on this host. Before anything is timed, every row of the sink
is compared with its checkpoint.

Last, requests of the bundled purchases are scored while sinks get the rows that changed most, under
budgets (`sink_budget`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import redis
import torch
from torch import Tensor

from benchmarks.report import Report, ratio, spread_of
from benchmarks.sink_budget import budget_curve
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import Manifest
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import SinkPublisher
from recpoint.serving.sinks.verification import verify
from recpoint.testing.seaweed import SeaweedServer
from tests.catalog_builder import Table, build, publish
from tests.redis_server import redis_server

__all__ = ["KEYS", "run"]

KEYS = (
    "vs_bare",
    "readers_p99_ratio",
    "readers_p99_elsewhere_ratio",
    "follower_p99_ratio",
    "follower_p99_pinned_ratio",
    "gap_share",
)

_DIM = 64
_CHUNK_ROWS = 16_384
_ROWS_A_PIPELINE = 1000


def run(*, smoke: bool) -> Report:
    """Measure on this host's own servers."""
    rows, changed_rows, rounds = (4000, 1000, 2) if smoke else (400_000, 100_000, 7)
    report = Report(name="sinks", columns=("what", "median", "least", "most"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="recpoint-sinks-")))
        server, other_server = (
            stack.enter_context(redis_server(_made(folder / name))) for name in ("redis", "other")
        )
        s3 = stack.enter_context(SeaweedServer(folder / "seaweed"))
        os.environ.update(s3.environment())
        url = f"{server.url}?grace=0"
        training = _Training(s3.run_url(), rows, changed_rows)
        publisher = SinkPublisher(training.url, stack.enter_context(open_sink(url)))
        other_url = f"{other_server.url}?grace=0"
        other = SinkPublisher(training.url, stack.enter_context(open_sink(other_url)))
        training.commit()
        publisher.poll()
        other.poll()
        _require_equal(training.url, url)
        bare = redis.Redis.from_url(server.url)
        _write_bare(bare, training)
        published_seconds, bare_seconds = [], []
        for _ in range(rounds):
            training.commit()
            published_seconds.append(_seconds(publisher.poll))
            bare_seconds.append(_seconds(lambda: _write_bare(bare, training)))
        _require_equal(training.url, url)

        def publish_here() -> None:
            training.commit()
            publisher.poll()

        def publish_elsewhere() -> None:
            training.commit()
            other.poll()

        sink, follower = ("sink", url), ("follower", training.url)
        sink_ms = _requests_ms(
            {
                "none": (sink, _nothing),
                "here": (sink, publish_here),
                "elsewhere": (sink, publish_elsewhere),
            },
            smoke=smoke,
        )
        follower_ms = _requests_ms(
            {
                "none": (follower, _nothing),
                "here": (follower, training.commit),
                "pinned": (("pinned", training.url), training.commit),
            },
            smoke=smoke,
        )
    report.put("vs_bare", ratio(bare_seconds, published_seconds))
    report.put("readers_p99_ratio", ratio(sink_ms["here"], sink_ms["none"]))
    report.put("readers_p99_elsewhere_ratio", ratio(sink_ms["elsewhere"], sink_ms["none"]))
    report.put("follower_p99_ratio", ratio(follower_ms["here"], follower_ms["none"]))
    report.put("follower_p99_pinned_ratio", ratio(follower_ms["pinned"], follower_ms["none"]))
    report.timed(
        f"{changed_rows:,} changed rows, from a commit on S3 to readers", published_seconds
    )
    report.timed("the same bytes by pipelined SETs", bare_seconds)
    for label, values in (
        ("p99 of a request of 100 rows while versions arrive, ms", sink_ms["here"]),
        ("p99 while they arrive in another Redis server, ms", sink_ms["elsewhere"]),
        ("p99 while none arrives, ms", sink_ms["none"]),
        ("p99 of a request to a follower while versions arrive, ms", follower_ms["here"]),
        ("p99 while they are committed, and it is pinned, ms", follower_ms["pinned"]),
        ("p99 while none arrives, ms", follower_ms["none"]),
    ):
        spread = spread_of(values)
        report.rows.append((label, spread.median, spread.least, spread.most))
    _put_budgets(report, smoke=smoke)
    report.notes += [
        "vs_bare: seconds of bare writes over seconds of a publication",
        f"{rows:,} rows of {_DIM} float32 values; every row was compared before and after",
    ]
    return report


def _put_budgets(report: Report, *, smoke: bool) -> None:
    """Add the log loss of requests under each budget; `gap_share` is that of 1/13."""
    with tempfile.TemporaryDirectory(prefix="recpoint-budgets-") as folder:
        points = budget_curve(Path(folder), smoke=smoke)
    for point in points:
        report.notes.append(
            f"budget {point.label}: log loss of requests {point.loss:.5f}, {point.gap_share:.3f} "
            f"of the gap, {point.bytes_share:.4f} of the bytes, {point.rows_deferred:,} rows "
            "deferred at the end"
        )
    report.figures["gap_share"] = next(p.gap_share for p in points if p.label == "1/13")


class _Training:
    """Commits checkpoints whose changed rows are drawn at random."""

    def __init__(self, url: str, rows: int, changed_rows: int) -> None:
        self.url = url
        self._run = Run.create(open_store(url))
        self._run.claim(None)
        self._random = torch.Generator().manual_seed(1)
        values = torch.randn(rows, _DIM, generator=self._random)
        self._table = Table("items", values)
        self._changed_rows = changed_rows
        self._parent: Manifest | None = None
        self.ids = torch.arange(rows)

    @property
    def changed(self) -> Tensor:
        """The rows that the newest checkpoint changed, [n, dim]."""
        return self._table.values[self.ids]

    def commit(self) -> None:
        """Commit a full first, and then increments."""
        step = 1 if self._parent is None else self._parent.step + 1
        if self._parent is not None:
            order = torch.randperm(self._table.rows, generator=self._random)
            self.ids = order[: self._changed_rows].sort()[0]
            self._table.train(self.ids, self._random)
        checkpoint = build(
            self._run,
            [self._table],
            step=step,
            generation=1,
            parent=self._parent,
            dirty=None if self._parent is None else [self.ids],
            state={"model": {"tensors": {"top": torch.full((4,), float(step))}, "extra": {}}},
            rows_per_chunk=_CHUNK_ROWS,
        )
        self._parent = publish(self._run, checkpoint)


def _write_bare(client: redis.Redis, training: _Training) -> None:
    rows = training.changed.numpy()
    ids = training.ids.tolist()
    for first in range(0, len(ids), _ROWS_A_PIPELINE):
        pipeline = client.pipeline(transaction=False)
        part = slice(first, first + _ROWS_A_PIPELINE)
        for row, values in zip(ids[part], rows[part], strict=True):
            pipeline.set(f"bare:{row}", values.tobytes())
        pipeline.execute()


def _requests_ms(
    sides: Mapping[str, tuple[tuple[str, str], Callable[[], None]]], *, smoke: bool
) -> Mapping[str, list[float]]:
    """Return p99 of requests in ms, one for each round.

    Args:
        sides: name -> where the rows come from (the first two arguments of
            `benchmarks.sink_requests`), and what goes on meanwhile, again and again.
        smoke: for a moment only.
    """
    rounds, seconds = (2, 1.0) if smoke else (5, 6.0)
    times_ms: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (source, work) in sides.items():
            times_ms[name].append(_p99_ms(source, seconds, work))
    return times_ms


def _p99_ms(source: tuple[str, str], seconds: float, work: Callable[[], None]) -> float:
    """Return p99 of the requests of another process, which runs beside `work`, again and again."""
    command = [sys.executable, "-m", "benchmarks.sink_requests", *source, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            work()
            if process.poll() is None:
                try:
                    process.wait(0.05)
                except subprocess.TimeoutExpired:
                    continue
        assert process.stdout is not None and process.returncode == 0
        return float(json.loads(process.stdout.read())["p99_ms"])


def _nothing() -> None:
    """Let requests have the host to themselves."""


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _seconds(function: Callable[[], object]) -> float:
    start = perf_counter()
    function()
    return perf_counter() - start


def _require_equal(run_url: str, sink_url: str) -> None:
    with open_sink(sink_url) as sink:
        comparison = verify(Run.open(open_store(run_url)), sink)
    if comparison.differences:
        raise AssertionError(f"the sink differs: {comparison.differences}")
