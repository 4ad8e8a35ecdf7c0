"""Publishers of one sink in Redis that overtake each other, and a server that loses writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from recpoint.catalog.store import durable
from recpoint.errors import NotServing, SinkError
from recpoint.serving.sinks.contract import Sink
from recpoint.serving.sinks.opening import open_sink
from recpoint.testing.sinks import (
    bring,
    changes_of,
    ids_of,
    of_step,
    put_rows,
    served_rows,
    sink_version,
)
from tests.redis_server import RedisServer, redis_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server that keeps only what it is told to save."""
    with redis_server(tmp_path) as started:
        yield started


@pytest.fixture
def sink(server: RedisServer) -> Iterator[Sink]:
    """A sink with version 1."""
    with open_sink(f"{server.url}?grace=0") as opened:
        bring(opened, 1, {"users": ids_of(1, 2, 3), "items": ids_of(1)}, parent=None)
        yield opened


def test_rows_of_an_attempt_that_came_meanwhile_are_seen(sink: Sink, server: RedisServer) -> None:
    """An attempt writes rows between another one's look at the position and its beginning."""
    with open_sink(f"{server.url}?grace=0") as newer:

        def overtake(name: str) -> None:
            if name.startswith("sink-begin"):
                durable.set_observer(None)
                newer.begin(sink_version(3), sink_version(1).checkpoint)
                put_rows(newer, 3, {"users": ids_of(1, 2)})

        durable.set_observer(overtake)
        try:
            with pytest.raises(SinkError, match="another publisher"):
                bring(sink, 2, {"users": ids_of(1)}, parent=1)
        finally:
            durable.set_observer(None)
        assert served_rows(sink, "users") == of_step(1, 1, 2, 3)
        put_rows(newer, 3, {"users": ids_of(3)})
        newer.commit({}, [])
        assert served_rows(sink, "users") == of_step(3, 1, 2, 3)


@pytest.mark.parametrize("goes_on_with", ["put", "delete", "commit"])
def test_an_attempt_whose_rows_the_server_lost_is_refused(
    sink: Sink, server: RedisServer, goes_on_with: str
) -> None:
    """A server starts again without the last rows that it acknowledged."""
    rows = {"users": ids_of(1, 2, 3)}
    sink.begin(sink_version(2), sink_version(1).checkpoint)
    put_rows(sink, 2, {"users": ids_of(1)})
    server.command("SAVE")
    put_rows(sink, 2, {"users": ids_of(2)})
    server.restart()
    with pytest.raises(SinkError, match="has lost writes"):
        if goes_on_with == "put":
            put_rows(sink, 2, {"users": ids_of(3)})
        elif goes_on_with == "delete":
            sink.delete("users", ids_of(3))
        else:
            sink.commit({}, changes_of(rows))
    assert served_rows(sink, "users") == of_step(1, 1, 2, 3)
    bring(sink, 2, rows, parent=1)
    assert served_rows(sink, "users") == of_step(2, 1, 2, 3)


def test_a_commit_that_the_server_lost_removes_no_rows(
    sink: Sink, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server loses a version that came anew, while its publisher waits to remove the old rows."""
    sink.begin(sink_version(5), None)
    put_rows(sink, 5, {"users": ids_of(7)})
    server.command("SAVE")

    def restart(seconds: float) -> None:
        monkeypatch.undo()
        server.restart()

    monkeypatch.setattr(time, "sleep", restart)
    with pytest.raises(SinkError, match="has lost writes"):
        sink.commit({}, [])
    assert served_rows(sink, "users") == of_step(1, 1, 2, 3)
    bring(sink, 5, {"users": ids_of(7)}, parent=None)
    assert served_rows(sink, "users") == of_step(5, 7)


def test_a_lookup_of_many_rows_is_whole(sink: Sink) -> None:
    rows = torch.arange(2500)
    bring(sink, 2, {"users": rows}, parent=1)
    with sink.reading() as reading:
        values, present = reading.lookup("users", rows.flip(0))
    assert bool(present.all())
    assert torch.equal(values[:, 0], 2000.0 + rows.flip(0))


def test_a_reader_is_told_that_the_server_has_lost_its_version(
    sink: Sink, server: RedisServer
) -> None:
    """A server starts again without a version, while a reader is in the middle of it."""
    server.command("SAVE")
    bring(sink, 2, {"users": ids_of(1, 2)}, parent=1)
    with sink.reading() as reading:
        reading.lookup("users", ids_of(1))
        server.restart()
        with pytest.raises(NotServing, match="has lost"):
            reading.lookup("users", ids_of(2))
        with pytest.raises(NotServing, match="has lost"):
            reading.dense()
    assert served_rows(sink, "users") == of_step(1, 1, 2, 3)


@pytest.mark.parametrize("versions_after", [1, 2])
def test_a_version_that_took_the_number_of_a_lost_one_is_not_read_for_it(
    sink: Sink, server: RedisServer, versions_after: int
) -> None:
    """A server loses version 2 while it is read, and gets another version 2, and a third."""
    server.command("SAVE")
    bring(sink, 2, {"users": ids_of(1, 2)}, parent=1)
    with sink.reading() as reading:
        reading.lookup("users", ids_of(1))
        server.restart()
        for step in range(5, 5 + versions_after):
            bring(sink, step, {"users": ids_of(2, 3)}, parent=1 if step == 5 else step - 1)
        with pytest.raises(NotServing):
            reading.lookup("users", ids_of(1, 2, 3))
        with pytest.raises(NotServing):
            reading.dense()


def test_a_version_can_be_read_until_the_next_but_one_begins(sink: Sink) -> None:
    with sink.reading() as reading:
        bring(sink, 2, {"users": ids_of(1, 2)}, parent=1)
        values, _ = reading.lookup("users", ids_of(1, 2, 3))
        assert values[:, 0].tolist() == [1001.0, 1002.0, 1003.0]
        assert reading.dense()["top"].tolist() == [1.0, 1.0]
        sink.begin(sink_version(3), sink_version(2).checkpoint)
        with pytest.raises(NotServing, match="being replaced"):
            reading.lookup("users", ids_of(1))


def test_a_prefix_need_not_be_ascii(server: RedisServer) -> None:
    with open_sink(f"{server.url}?grace=0&prefix=%C3%A4ds") as sink:
        for step in (1, 2):  # the second one removes the tables of the first
            bring(sink, step, {"users": ids_of(1, 2), "items": ids_of()}, parent=None)
        assert served_rows(sink, "users") == of_step(2, 1, 2)
        with sink.reading() as reading:
            assert reading.row_count("users") == 2
