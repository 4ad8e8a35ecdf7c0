"""What the page says of sinks: which checkpoint readers see, and since when they lack a better."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.dashboards import sink_texts
from recpoint.dashboards.sink_texts import SINK_HEADINGS, sink_lag
from recpoint.dashboards.watched_runs import WatchedRun
from recpoint.dashboards.watched_sinks import WatchedSink
from recpoint.errors import SettingsError
from recpoint.serving.sinks.most_changed import ID_BYTES
from recpoint.serving.sinks.opening import open_sink
from recpoint.serving.sinks.publisher import Budget, SinkPublisher
from recpoint.testing.sinks import bring, ids_of
from tests.catalog_builder import Table, new_run
from tests.followed_run import Trainer


class _Page:
    """A run with a trainer, a sink of it, and what a page says of both."""

    def __init__(self, directory: Path) -> None:
        run = new_run(directory / "run")
        run.claim(None)
        self.trainer = Trainer(run, [Table("users", torch.randn(50, 4))])
        self.url = f"sqlite:{directory}/sinks/served"
        self.watched_run = WatchedRun(run.url, interval_seconds=5, intervals=3)
        self.sink = WatchedSink(self.url, interval_seconds=5)

    @property
    def run(self) -> Run:
        return self.trainer.run

    def publish(self) -> None:
        """Bring the newest checkpoint to the sink."""
        with open_sink(self.url) as sink:
            SinkPublisher(self.run.url, sink).poll()

    def row(self) -> dict[str, str]:
        """Look at both, and return the sink's row."""
        self.watched_run.refresh()
        self.sink.look()
        return self.shown()

    def shown(self) -> dict[str, str]:
        """Return the sink's row as it was seen last."""
        cells = sink_texts.sink_row(self.sink, [self.watched_run])
        return dict(zip(SINK_HEADINGS, cells, strict=True))

    @property
    def state(self) -> str:
        return sink_texts.sink_state(self.sink, [self.watched_run])


@pytest.fixture
def page(tmp_path: Path) -> _Page:
    return _Page(tmp_path)


def test_a_sink_is_followed_from_nothing_to_behind(page: _Page) -> None:
    assert (page.shown()["State"], page.state) == ("reading", "")
    assert page.row()["State"] == "empty"
    page.trainer.commit(1)
    page.publish()
    row = page.row()
    assert (row["State"], row["Readers see step"], row["Version"]) == ("up to date", "1", "1")
    assert row["Run"] == page.run.url and row["Behind the newest"] == "0 s"
    assert page.state == "good"
    page.trainer.commit(2)
    page.trainer.commit(3)
    row = page.row()
    assert (row["State"], row["Readers see step"]) == ("behind", "1")
    assert row["Behind the newest"].endswith(", 2 checkpoints")
    page.publish()
    assert (page.row()["State"], page.shown()["Version"]) == ("up to date", "2")


def test_deferred_rows_are_shown(page: _Page) -> None:
    page.trainer.commit(1)
    page.publish()
    assert page.row()["Deferred"] == "0 rows"
    rows = page.trainer.commit(2).dirty_rows - 3
    with open_sink(page.url) as sink:
        SinkPublisher(page.run.url, sink, budget=Budget(3 * (16 + ID_BYTES))).poll()
    assert page.row()["Deferred"] == f"{rows} rows, {16 * rows} B, the oldest at step 1"


def test_lag_counts_from_the_first_checkpoint_that_is_missing(page: _Page) -> None:
    page.trainer.commit(1)
    page.publish()
    missing = page.trainer.commit(2)
    page.trainer.commit(3)
    page.row()
    overview, committed = page.watched_run.seen.overview, page.sink.seen.committed
    assert overview is not None and committed is not None
    lag = sink_lag(overview, committed)
    assert lag.checkpoints == 2 and not lag.has_more
    assert lag.seconds == pytest.approx(time.time() - missing.committed_ms / 1000, abs=30)
    for seconds, state in ((60, ""), (3600, "bad")):
        committed_ms = int(1000 * (time.time() - seconds))
        dated = [replace(facts, committed_ms=committed_ms) for facts in overview.checkpoints]
        page.watched_run.seen = replace(
            page.watched_run.seen, overview=replace(overview, checkpoints=tuple(dated))
        )
        assert page.state == state
    # The page knows the newest checkpoints only, and the sink's is older than all of them.
    newest = replace(overview, checkpoints=overview.checkpoints[:1])
    assert sink_lag(newest, committed)[::2] == (1, True)


def test_a_later_generation_may_begin_at_an_earlier_step(page: _Page) -> None:
    page.trainer.commit(5)
    page.publish()
    page.row()
    overview, committed = page.watched_run.seen.overview, page.sink.seen.committed
    assert overview is not None and committed is not None
    facts = overview.checkpoints[0]
    later = replace(
        overview, checkpoints=(replace(facts, step=3, generation=facts.generation + 1),)
    )
    assert sink_lag(later, committed).checkpoints == 1
    unreadable = replace(later.checkpoints[0], error="damaged")
    assert sink_lag(replace(overview, checkpoints=(unreadable,)), committed).checkpoints == 0


def test_a_sink_that_is_away_is_shown_as_it_was(page: _Page, tmp_path: Path) -> None:
    page.trainer.commit(1)
    page.publish()
    page.row()
    (tmp_path / "sinks").rename(tmp_path / "away")
    (tmp_path / "sinks").mkdir()
    (tmp_path / "sinks" / "served").write_bytes(b"no database" * 1000)
    row = page.row()
    assert (row["State"], row["Readers see step"], page.state) == ("NO ANSWER", "1", "bad")
    trouble = sink_texts.sink_trouble(page.sink)
    assert trouble is not None and page.sink.name in trouble.cause and trouble.next_step
    shutil.rmtree(tmp_path / "sinks")
    shutil.move(tmp_path / "away", tmp_path / "sinks")
    assert page.row()["State"] == "up to date" and sink_texts.sink_trouble(page.sink) is None


def test_a_look_that_does_not_come_back_is_no_answer(page: _Page) -> None:
    page.row()
    page.sink.seen = replace(page.sink.seen, due=time.monotonic() - 1)
    assert page.shown()["State"] == "NO ANSWER"
    assert sink_texts.sink_trouble(page.sink) is not None


def test_a_sink_of_another_run_is_named_by_it(page: _Page) -> None:
    page.trainer.commit(1)
    with open_sink(page.url) as sink:
        bring(sink, 7, {"users": ids_of(1), "items": ids_of()}, parent=None)
    row = page.row()
    assert (row["State"], row["Run"]) == ("in service", f"not watched ({'a' * 12})")
    assert (row["Readers see step"], row["Behind the newest"], page.state) == ("7", "–", "")


def test_no_password_of_a_sink_is_shown() -> None:
    sink = WatchedSink("redis://u:hunter2@127.0.0.1:1/0", interval_seconds=5)
    assert "hunter2" not in "".join(sink_texts.sink_row(sink, []))
    with pytest.raises(SettingsError):
        WatchedSink("ftp://host", interval_seconds=5)
