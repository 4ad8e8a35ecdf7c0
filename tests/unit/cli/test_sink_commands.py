"""recpoint publish-to and recpoint sink verify: a store for serving, filled and compared."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import torch

from recpoint.serving.sinks.reader import SinkReader
from tests.catalog_builder import Table, new_run
from tests.followed_run import Trainer
from tests.unit.cli.conftest import Invoke, SavedRun


@pytest.fixture
def sink(tmp_path: Path) -> str:
    """URL of an empty sink."""
    return f"sqlite:{tmp_path}/served.db"


def test_it_publishes_and_compares(recpoint: Invoke, saved_run: SavedRun, sink: str) -> None:
    ended = recpoint("publish-to", sink, saved_run.directory)
    rows = sum(len(values) for values in saved_run.newest.values())
    assert ended.code == 0
    shown = " ".join(ended.stdout.split())
    assert shown.startswith("step 30 (generation 2, ") and "is version 1 of the sink" in shown
    assert f"{rows:,} rows (all rows)" in shown
    with SinkReader(sink).reading() as version:
        for name, values in saved_run.newest.items():
            assert torch.equal(version.lookup(name, torch.arange(len(values))), values)
    again = recpoint("publish-to", sink, saved_run.directory, "--json").json
    assert (again["number"], again["version"]["checkpoint"]["step"]) == (1, 30)
    same = recpoint("sink", "verify", sink, saved_run.directory)
    assert same.code == 0 and " ".join(same.stdout.split()).startswith(f"equal: {rows:,} rows of ")


def test_a_row_that_differs_ends_verify_with_1(
    recpoint: Invoke, saved_run: SavedRun, sink: str, tmp_path: Path
) -> None:
    name = next(iter(saved_run.newest))
    assert recpoint("publish-to", sink, saved_run.directory, "--table", name).code == 0
    with sqlite3.connect(tmp_path / "served.db") as connection:
        connection.execute("DELETE FROM rows_1_0 WHERE id = 3")
    connection.close()
    ended = recpoint("sink", "verify", sink, saved_run.directory)
    assert ended.code == 1
    shown = " ".join(ended.stdout.split())
    assert f"row 3 of table {name!r} is missing in the sink" in shown and "not equal: " in shown
    document = recpoint("sink", "verify", sink, saved_run.directory, "--json").json
    assert document["equal"] is False and document["rows_compared"] == len(saved_run.newest[name])
    assert len(document["differences"]) == 2 and document["more_differences"] == 0
    with sqlite3.connect(tmp_path / "served.db") as connection:
        connection.execute("DROP TABLE rows_1_0")
    connection.close()
    unreadable = recpoint("sink", "verify", sink, saved_run.directory)
    assert unreadable.code == 3 and "no such table: rows_1_0" in unreadable.stderr


def test_another_run_takes_a_sink_only_if_told(
    recpoint: Invoke, saved_run: SavedRun, sink: str, tmp_path: Path
) -> None:
    empty = new_run(tmp_path / "other")
    assert "nothing to publish yet" in recpoint("publish-to", sink, empty.store.url).stdout
    assert recpoint("publish-to", sink, saved_run.directory).code == 0
    refused = recpoint("publish-to", sink, tmp_path / "other")
    assert refused.code != 0
    assert saved_run.run.id in refused.stderr and "--replace" in refused.stderr
    assert recpoint("sink", "verify", sink, tmp_path / "other").code not in (0, 1)
    assert recpoint("publish-to", sink, tmp_path / "other", "--replace").code == 0


def test_what_a_budget_defers_is_said_and_proven(
    recpoint: Invoke, sink: str, tmp_path: Path
) -> None:
    run = new_run(tmp_path / "run")
    run.claim(None)
    trainer = Trainer(run, [Table("users", torch.randn(50, 4))])
    first = trainer.commit(1)
    url = tmp_path / "run"
    assert recpoint("publish-to", sink, url, "--budget", "72 B").code == 0
    rows = trainer.commit(2).dirty_rows - 3
    options = ("--budget", "0.072kB", "--most-versions", "5")
    shown = " ".join(recpoint("publish-to", sink, url, *options).stdout.split())
    assert "3 rows (changes of step 1)" in shown
    assert f"; {rows} rows ({16 * rows} B) deferred, the oldest at {first.ref}" in shown
    proven = recpoint("sink", "verify", sink, url)
    shown = " ".join(proven.stdout.split())
    assert proven.code == 0 and shown.startswith("as the sink says: 50 rows of step 2 ")
    assert f"{rows} rows equal to the older checkpoints that they stand at" in shown
    document = recpoint("sink", "verify", sink, url, "--json").json
    assert (document["equal"], document["rows_of_older_checkpoints"]) == (False, rows)
    assert document["changes"][0]["deferred"]["rows"] == rows
    assert "deferred" not in recpoint("publish-to", sink, url).stdout
    assert recpoint("sink", "verify", sink, url, "--json").json["equal"] is True
    for wrong in (("--budget", "64 parsecs"), ("--budget", "0"), ("--most-versions", "3")):
        assert recpoint("publish-to", sink, url, *wrong).code == 2


def test_what_cannot_be_done_is_said_without_passwords(
    recpoint: Invoke, saved_run: SavedRun, sink: str
) -> None:
    for url in (
        "mysql://me:secret@host/0",
        "redis://:secret@host/0?grace=x",
        "redis://host/0?password=secret&grace=x",
        "redis://:secret/more@host/0",
        "redis://:secret#more@host/0",
        "redis://me:secret@host:secret/0",
        "redis://me:secret@[host/0",
    ):
        ended = recpoint("publish-to", url, saved_run.directory)
        assert ended.code == 2, (url, ended)
        assert "secret" not in ended.stdout + ended.stderr
    unknown = recpoint("publish-to", sink, saved_run.directory, "--table", "prices")
    assert unknown.code != 0 and "prices" in unknown.stderr
    assert recpoint("publish-to", sink, saved_run.directory, "--channel", "best").code == 2
    assert recpoint("sink", "verify", sink, saved_run.directory).code not in (0, 1)
