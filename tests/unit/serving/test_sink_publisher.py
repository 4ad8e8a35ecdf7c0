"""A publisher brings a sink to each checkpoint, row for row, whatever happened before."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import recpoint
from recpoint.catalog.run.leases import read_leases
from recpoint.catalog.run.publications import publish as publish_checkpoint
from recpoint.catalog.run.run import Run
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import Clocks
from recpoint.catalog.store.store import open_store
from recpoint.errors import (
    ForeignObject,
    IncompatibleModel,
    NotServing,
    SettingsError,
    SinkError,
    UnknownRow,
)
from recpoint.format.naming import MANIFEST_KEY, ManifestName
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.opening import open_sink, shown_url
from recpoint.serving.sinks.publisher import SinkPublisher
from recpoint.serving.sinks.reader import SinkReader
from recpoint.serving.sinks.verification import verify
from tests.catalog_builder import Table, new_run, tables
from tests.consolidation import merge
from tests.followed_run import Trainer, validated
from tests.grown_training import MORE_ROWS, RULE, training
from tests.polling import until
from tests.redis_server import redis_server
from tests.training_builder import ROWS, Place, checkpointer, train


class _Stopped(Exception):
    """Ends a publisher at a step, as a kill does."""


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The sink's URL; in SQLite, unless a test asks for another one."""
    kind = getattr(request, "param", "sqlite")
    if kind != "redis":
        return f"{kind}:{tmp_path}/served"
    return f"{request.getfixturevalue('redis_url')}?prefix={secrets.token_hex(8)}&grace=0"


in_each = pytest.mark.parametrize("url", ["sqlite", "parquet", "redis"], indirect=True)


@pytest.fixture
def sink(url: str) -> Sink:
    """An empty sink."""
    return open_sink(url)


def require(sink: Sink, trainer: Trainer, step: int) -> None:
    """Require that the sink has this step, bit for bit, in the eyes of readers and of `verify`."""
    reader = SinkReader(sink.url)
    with reader.reading() as version:
        assert version.checkpoint.step == step
        assert bool((version.dense()["top.weight"] == step).all())
        for table, values in zip(trainer.tables, trainer.at[step], strict=True):
            rows = version.lookup(table.name, torch.arange(table.rows))
            assert torch.equal(rows.view(torch.uint8), values.view(torch.uint8))
    comparison = verify(Run.open(trainer.run.store), sink)
    assert comparison.differences == []
    assert comparison.rows == sum(table.rows for table in trainer.tables)


@in_each
@pytest.mark.parametrize("bits", [None, 4])
def test_each_checkpoint_arrives(trainer: Trainer, sink: Sink, bits: int | None) -> None:
    trainer.tables[0].bits = bits
    publisher = SinkPublisher(trainer.run.url, sink)
    for step in range(1, 6):
        made = trainer.commit(step, full=step == 5)
        if step == 2:
            continue  # the next poll brings two at once
        committed = publisher.poll()
        assert committed is not None and committed.version.checkpoint == made.ref
        require(sink, trainer, step)
        assert publisher.poll() == committed
    assert read_leases(trainer.run, Clocks.read()) == []


def test_an_increment_brings_changed_rows_only(trainer: Trainer, sink: Sink) -> None:
    publisher = SinkPublisher(trainer.run.url, sink)
    trainer.commit(1)
    first = publisher.poll()
    made = trainer.commit(2)
    second = publisher.poll()
    assert first is not None and second is not None
    assert first.parent is None and second.parent == first.version.checkpoint
    changed = {
        spec.name: sum(entry.row_count or 0 for entry in made.chunks if entry.table == index)
        for index, spec in enumerate(made.tables)
    }
    assert {change.table: change.rows_put for change in second.changes} == changed
    assert 0 < sum(changed.values()) < sum(table.rows for table in trainer.tables)


def test_merges_and_lost_manifests_are_ways_too(trainer: Trainer, sink: Sink) -> None:
    publisher = SinkPublisher(trainer.run.url, sink)
    made = [trainer.commit(step) for step in (1, 2, 3, 4, 5)]
    publisher.poll()
    made += [trainer.commit(step) for step in (6, 7)]
    merge(trainer.run, made[-1], links=2)
    trainer.run.store.delete(MANIFEST_KEY.of(6, 1))
    publisher.poll()
    require(sink, trainer, 7)


def test_a_published_older_checkpoint_takes_the_sink_back(trainer: Trainer, sink: Sink) -> None:
    publisher = SinkPublisher(trainer.run.url, sink, channel="published")
    for step in (1, 2, 3):
        trainer.commit(step)
    assert publisher.poll() is None
    for step in (3, 1, 2):
        name = ManifestName(step, 1)
        publish_checkpoint(
            trainer.run,
            name,
            held=False,
            release=True,
            force=True,
            why="",
        )
        publisher.poll()
        require(sink, trainer, step)


@in_each
def test_a_superseded_line_is_left(trainer: Trainer, sink: Sink) -> None:
    publisher = SinkPublisher(trainer.run.url, sink)
    made = [trainer.commit(step) for step in (1, 2, 3)]
    publisher.poll()
    trainer.run.claim(made[1].ref)
    trainer.generation = 2
    trainer.commit(4, parent=made[1])
    committed = publisher.poll()
    assert committed is not None and committed.parent is None  # not made from step 3
    require(sink, trainer, 4)


@in_each
def test_damaged_checkpoints_are_passed_over(trainer: Trainer, sink: Sink) -> None:
    publisher = SinkPublisher(trainer.run.url, sink)
    trainer.commit(1)
    publisher.poll()
    trainer.commit(2)
    damaged = trainer.commit(3)
    trainer.run.store.delete(damaged.chunks[-1].key)
    publisher.poll()  # some rows of step 3 may have come
    require(sink, trainer, 2)
    trainer.commit(4, full=True)
    publisher.poll()
    require(sink, trainer, 4)


def test_only_validated_checkpoints(trainer: Trainer, sink: Sink) -> None:
    publisher = SinkPublisher(trainer.run.url, sink, channel="validated")
    made = [trainer.commit(step) for step in (1, 2, 3)]
    assert publisher.poll() is None
    validated(trainer.run, made[1], "passed")
    publisher.poll()
    require(sink, trainer, 2)


@in_each
def test_other_tables_come_anew(trainer: Trainer, url: str) -> None:
    trainer.commit(1)
    name = trainer.tables[0].name
    SinkPublisher(trainer.run.url, open_sink(url), tables=[name]).poll()
    comparison = verify(trainer.run, open_sink(url))
    assert comparison.differences == [] and comparison.rows == trainer.tables[0].rows
    SinkPublisher(trainer.run.url, open_sink(url)).poll()
    require(open_sink(url), trainer, 1)
    with pytest.raises(IncompatibleModel, match="no such table"):
        SinkPublisher(trainer.run.url, open_sink(url), tables=["prices"]).poll()


@in_each
def test_a_sink_of_another_run_is_left_alone(trainer: Trainer, sink: Sink, tmp_path: Path) -> None:
    trainer.commit(1)
    SinkPublisher(trainer.run.url, sink).poll()
    other = Trainer(new_run(tmp_path / "other"), tables())
    other.run.claim(None)
    other.commit(7)
    with pytest.raises(ForeignObject, match="--replace"):
        SinkPublisher(other.run.url, sink).poll()
    require(sink, trainer, 1)
    with pytest.raises(ForeignObject):
        verify(other.run, sink)
    SinkPublisher(other.run.url, sink, replace=True).poll()
    require(sink, other, 7)


@in_each
def test_verification_names_what_differs(trainer: Trainer, sink: Sink) -> None:
    trainer.commit(1)
    with pytest.raises(NotServing):
        verify(trainer.run, sink)
    committed = SinkPublisher(trainer.run.url, sink).poll()
    assert committed is not None
    name, dim = trainer.tables[0].name, trainer.tables[0].values.shape[1]
    sink.begin(committed.version, committed.version.checkpoint)
    sink.put(name, torch.tensor([4]), torch.full((1, dim), 7.0, dtype=trainer.at[1][0].dtype))
    sink.delete(name, torch.tensor([2]))
    sink.commit({}, [])
    differences = verify(trainer.run, sink).differences
    assert any("row 4" in text and "other values" in text for text in differences)
    assert any("row 2" in text and "missing" in text for text in differences)
    assert any("top.weight" in text for text in differences)
    with SinkReader(sink.url).reading() as version, pytest.raises(UnknownRow, match="no row 2"):
        version.lookup(name, torch.tensor([1, 2]))


@in_each
def test_a_publisher_may_end_at_any_step(trainer: Trainer, url: str) -> None:
    trainer.commit(1)
    SinkPublisher(trainer.run.url, open_sink(url)).poll()
    for step in range(2, 40):
        trainer.commit(step, full=step % 5 == 0)
        steps_left = step - 1

        def stop(name: str) -> None:
            nonlocal steps_left
            if name.startswith("sink-"):
                steps_left -= 1
                if not steps_left:
                    raise _Stopped

        durable.set_observer(stop)
        try:
            SinkPublisher(trainer.run.url, open_sink(url)).poll()
            break  # it takes fewer steps than this
        except _Stopped:
            pass
        finally:
            durable.set_observer(None)
        with SinkReader(url).reading() as version:
            assert version.checkpoint.step == step - 1
        SinkPublisher(trainer.run.url, open_sink(url)).poll()
        require(open_sink(url), trainer, step)
    else:
        pytest.fail("the sweep reached no end")


def test_another_publisher_that_writes_is_named(trainer: Trainer, url: str) -> None:
    trainer.commit(1)
    committed = SinkPublisher(trainer.run.url, open_sink(url)).poll()
    assert committed is not None
    with open_sink(url) as other:
        other.begin(committed.version, committed.version.checkpoint)
        trainer.commit(2)
        with pytest.raises(SinkError, match="alone writes"):
            SinkPublisher(trainer.run.url, open_sink(url)).poll()
    SinkPublisher(trainer.run.url, open_sink(url)).poll()
    require(open_sink(url), trainer, 2)


@in_each
def test_tables_of_other_dtypes_and_in_columns_arrive(tmp_path: Path, sink: Sink) -> None:
    run = new_run(tmp_path / "pieces")
    run.claim(None)
    tables = [
        Table("half", torch.randn(40, 3).bfloat16()),
        Table("double", torch.randn(7, 5).double()),
        *Table("columns", torch.randn(60, 8)).cut([3]),
    ]
    trainer = Trainer(run, tables)
    publisher = SinkPublisher(run.url, sink)
    for step in (1, 2, 3):
        trainer.commit(step)
        publisher.poll()
        whole = {t.name: v for t, v in zip(tables, trainer.at[step], strict=True)}
        with SinkReader(sink.url).reading() as version:
            for name, values in whole.items():
                rows = version.lookup(name, torch.arange(len(values)))
                assert torch.equal(rows.view(torch.uint8), values.view(torch.uint8))
        assert verify(run, sink).differences == []


def test_a_table_that_grew_arrives(tmp_path: Path, sink: Sink) -> None:
    place = Place(str(tmp_path / "grown"), tmp_path / "staging")
    trained = training(ROWS, "sparse adam")
    with place.agent(), checkpointer(trained, place, when_busy="wait") as checkpoints:
        checkpoints.restore()
        publisher = SinkPublisher(place.run, sink)
        for rows in (ROWS, MORE_ROWS):
            if rows > ROWS:
                recpoint.grow(trained.model, trained.optimizers, "users", rows, initial=RULE)
            train(trained, checkpoints, 4)
            until(lambda: checkpoints.stats.committed == checkpoints.batches_done // 2)
            publisher.poll()
            with SinkReader(sink.url).reading() as version:
                weight = version.lookup("users", torch.arange(rows))
            assert torch.equal(weight, trained.model.users.weight.detach())
            assert verify(Run.open(open_store(place.run)), sink).differences == []
        checkpoints.close(final=False)


@pytest.mark.parametrize(
    "wrong_url",
    [
        "redis://h/0?foo=1",
        "redis://h/0?socket_timeout=x",
        "redis://h/0?protocol=7",
        "redis://h/0?grace=601",
        "redis://h/0?pause=x",
        "redis://h/0?pause=nan",
        "redis://h/0?retry=x",
        "rediss://h/0?ssl_cert_reqs=x",
        "redis://h/0?decode_responses=true",
        "sqlite:",
        "parquet://h/a",
        "ftp://h",
    ],
)
def test_a_url_that_names_no_sink_is_refused(wrong_url: str) -> None:
    with pytest.raises(SettingsError, match="publish-to-a-store"):
        open_sink(wrong_url)


@pytest.mark.parametrize(
    "wrong_url",
    [
        "redis:/:hunter2@h/0",
        "redis:///:hunter2@h/0",
        "redis:user:hunter2@h/0",
        "redis//:hunter2@h/0",
        "hunter2@h:6379",
        "redis://:hunter2@[h/0",
        "redis://:hun/ter2@h/0",
        "redis://h/0?PASSWORD=hunter2",
    ],
)
def test_no_error_shows_a_password_of_a_url_that_is_wrong(wrong_url: str) -> None:
    with pytest.raises(SettingsError) as refusal:
        open_sink(wrong_url)
    assert "hunter2" not in str(refusal.value) and "ter2@" not in str(refusal.value)


@pytest.mark.parametrize(
    "url", ["parquet:///srv/a@b", "sqlite:/srv/a", "redis://h/0?", "REDIS://h"]
)
def test_a_url_without_a_password_is_shown_as_it_is(url: str) -> None:
    assert shown_url(url) == url
