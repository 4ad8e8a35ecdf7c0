"""Metrics of a sink: how long readers have lacked a better checkpoint, and what failed."""

from __future__ import annotations

import shutil
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from recpoint.catalog.run.publications import publish as publish_checkpoint
from recpoint.dashboards.metrics.sink import SinkMetrics
from recpoint.errors import RecpointError, SinkError
from recpoint.format.naming import ManifestName
from recpoint.serving.sinks.most_changed import ID_BYTES
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import Budget, SinkPublisher
from recpoint.testing.sinks import sink_version
from tests.catalog_builder import Table, new_run
from tests.followed_run import Trainer


def scraped(metrics: SinkMetrics) -> dict[str, float]:
    """Read the metrics of the sink as Prometheus does: name and cause -> value."""
    assert metrics.url is not None
    with urllib.request.urlopen(metrics.url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    values = {}
    for line in lines:
        if line.startswith("recpoint_sink_"):
            series, _, value = line.rpartition(" ")
            assert 'run="' in series and 'sink="sqlite:' in series
            name = series.partition("{")[0].removeprefix("recpoint_sink_")
            cause = series.partition('cause="')[2].partition('"')[0]
            values[f"{name} {cause}".strip()] = float(value)
    return values


def test_lag_grows_until_the_version_is_there(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = Trainer(run, [Table("users", torch.randn(50, 4))])
    with open_sink(f"sqlite:{tmp_path}/sinks/served") as sink:
        publisher = SinkPublisher(run.url, sink)
        metrics = SinkMetrics(publisher, run=run.url, sink=sink.url, port=0, address="127.0.0.1")
        first = scraped(metrics)
        started = first.pop("look_timestamp_seconds")  # so that an alert tells of no look at all
        assert abs(started - time.time()) < 60
        assert set(first.values()) == {0.0}  # failures of each cause
        trainer.commit(1)
        publisher.poll()
        first = scraped(metrics)
        assert (first["step"], first["lag_seconds"]) == (1, 0)
        assert abs(first["look_timestamp_seconds"] - time.time()) < 60
        trainer.commit(2)
        trainer.commit(3)
        (tmp_path / "sinks").rename(tmp_path / "away")
        (tmp_path / "sinks").touch()  # a file, where the sink's directory was
        for _ in range(2):
            with pytest.raises(RecpointError) as failure:
                publisher.poll()
            metrics.note_failure(failure.value)
        assert scraped(metrics)["failures_total other"] == 2
        (tmp_path / "sinks").unlink()
        shutil.move(tmp_path / "away", tmp_path / "sinks")
        publisher.poll()
        last = scraped(metrics)
        assert (last["step"], last["lag_seconds"]) == (3, 0)


def test_deferred_rows_are_counted(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = Trainer(run, [Table("users", torch.randn(50, 4))])
    with open_sink(f"sqlite:{tmp_path}/served") as sink:
        publisher = SinkPublisher(run.url, sink, budget=Budget(3 * (16 + ID_BYTES)))
        metrics = SinkMetrics(publisher, run=run.url, sink=sink.url, port=0, address="127.0.0.1")
        trainer.commit(1)
        publisher.poll()
        names = ("deferred_rows", "deferred_bytes", "deferred_versions")
        assert [scraped(metrics)[name] for name in names] == [0, 0, 0]
        rows = trainer.commit(2).dirty_rows - 3
        publisher.poll()
        assert [scraped(metrics)[name] for name in names] == [rows, 16 * rows, 1]


def test_lag_counts_from_the_first_checkpoint_that_is_missing(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = Trainer(run, [Table("users", torch.randn(50, 4))])
    trainer.commit(1)
    url = f"parquet:{tmp_path}/served"
    with open_sink(url) as sink, open_sink(url) as another:
        publisher = SinkPublisher(run.url, sink)
        publisher.poll()
        missing = trainer.commit(2)
        trainer.commit(3)
        another.begin(sink_version(9), None)  # another publisher has the sink
        for _ in range(2):
            with pytest.raises(SinkError):
                publisher.poll()
            assert publisher.standing is not None
            assert publisher.standing.waiting_since_ms == missing.committed_ms
            assert publisher.standing.lag_seconds > 0
        another.discard()
        publisher.poll()
        assert publisher.standing is not None and publisher.standing.lag_seconds == 0


def test_lag_counts_from_the_first_publication_that_is_missing(tmp_path: Path) -> None:
    """Publications that go on while a sink is away do not restart the lag."""
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = Trainer(run, [Table("users", torch.randn(50, 4))])
    url = f"parquet:{tmp_path}/served"
    with open_sink(url) as sink, open_sink(url) as another:
        publisher = SinkPublisher(run.url, sink, channel="published")
        published_ms = []
        for step in (1, 2, 3):
            trainer.commit(step)
            published = publish_checkpoint(run, ManifestName(step, 1))
            published_ms.append(published.record.created_ms)
            if step == 1:
                publisher.poll()
                another.begin(sink_version(9), None)  # another publisher has the sink
                continue
            with pytest.raises(SinkError):
                publisher.poll()
            assert publisher.standing is not None
            assert publisher.standing.waiting_since_ms == published_ms[1]
        another.discard()
        committed = publisher.poll()
        assert committed is not None and committed.version.checkpoint.step == 3
