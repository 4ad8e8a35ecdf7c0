"""A trainer says how its embedding servers are, and training does not notice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.optim import Adagrad

from recpoint import Checkpointer, Lookahead
from recpoint.catalog.overview.overview import ServersSeen
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.servers import read_servers, servers_path
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.homes import local
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.format.servers import AllServers, ServersRecord
from recpoint.trainer_plugin import servers_note
from recpoint.trainer_plugin.servers_note import ServersNote
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from tests.cached_training import ITEMS, USERS, Batches, cached_model
from tests.flat_settings import arguments
from tests.polling import until
from tests.training_builder import Place

SLOTS = {"users": 40, "items": 40}


@pytest.fixture
def running() -> Iterator[list[EmbeddingServer]]:
    servers = [EmbeddingServer(name=f"server {number}") for number in range(2)]
    yield servers
    for one in servers:
        one.end()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_note, "_WRITE_SECONDS", 0.02)
    monkeypatch.setattr(servers_note, "_ASK_SECONDS", 0.02)


class Trained:
    """A training whose rows are in a home."""

    def __init__(self, home: Home, place: Place) -> None:
        self.model, _ = cached_model(SLOTS, home)
        self.optimizer = Adagrad(self.model.parameters(), lr=0.1)
        self.reader = Lookahead(Batches(9), self.model, window=6)
        given: dict[str, Any] = {
            "run": place.run,
            "directory": place.staging,
            "reader": self.reader,
            "interval_batches": 5,
            "close_seconds": 0.0,
            "handle_sigterm": False,
            "announce": False,
        }
        self.checkpoints = Checkpointer(self.model, self.optimizer, **arguments(given))

    @contextmanager
    def begun(self) -> Iterator[Checkpointer]:
        self.checkpoints.restore()
        yield self.checkpoints
        self.checkpoints.close(final=False)

    def train(self, batches: int) -> None:
        for batch in self.checkpoints.batches(total=batches):
            self.optimizer.zero_grad()
            self.model(batch).sum().backward()
            self.optimizer.step()


def told(place: Place) -> ServersRecord | None:
    return read_servers(StagedRun(place.run_directory)) if place.run_directory.exists() else None


def states(place: Place) -> list[str]:
    found = told(place)
    return [] if found is None else [one.state for one in found.servers.each]


def with_sizes(place: Place) -> AllServers | None:
    found = told(place)
    if found is None or any(one.memory_bytes is None for one in found.servers.each):
        return None
    has_all_tables = sum(one.rows for one in found.servers.each) == USERS + ITEMS
    return found.servers if has_all_tables else None


def seen(place: Place) -> ServersSeen | None:
    run = Run.open(open_store(place.run))
    return RunWatch(run, staging=place.staging).refresh().servers


def seen_as_told(place: Place) -> AllServers | None:
    """What a page sees and the note says; None: the note was written anew in between."""
    servers, now = with_sizes(place), seen(place)
    assert now is not None and now.trainer_lives
    return servers if servers == now.servers == with_sizes(place) else None


def test_what_it_says_is_what_a_page_sees(place: Place, running: list[EmbeddingServer]) -> None:
    with ServedHome(running) as home:
        trained = Trained(home, place)
        with trained.begun():
            trained.train(20)  # so many that both tables have rows in the home
            until(lambda: with_sizes(place))
            servers = until(lambda: seen_as_told(place))
            assert [(one.state, one.known_rows) for one in servers.each] == [
                ("up", one.rows) for one in servers.each
            ]
            assert (servers.parity, servers.has_given_up) == (0, False)
            assert [one.pid for one in servers.each] == [one.pid for one in home.greetings]
            running[1].end()
            until(lambda: states(place) == ["up", "lost"])
        now = seen(place)
        assert now is not None and not now.trainer_lives and now.servers is not None
        servers_path(StagedRun(place.run_directory)).write_text("{")
        now = seen(place)
        assert now is not None and now.servers is None and "servers.json" in now.error


def test_what_an_earlier_trainer_said_is_not_shown(
    place: Place, running: list[EmbeddingServer]
) -> None:
    with ServedHome(running) as home:
        trained = Trained(home, place)
        with trained.begun():
            until(lambda: told(place))
    trained = Trained(local(), place)
    with trained.begun():
        assert told(place) is not None and seen(place) is None


def test_a_write_that_fails_is_logged_once_and_training_goes_on(
    place: Place,
    running: list[EmbeddingServer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers_note, "BEAT_SECONDS", 0.0)  # it is written again and again
    caplog.set_level(logging.WARNING, logger="recpoint")

    def said() -> list[str]:
        return [one.message for one in caplog.records if "pages do not show it" in one.message]

    with ServedHome(running) as home:
        trained = Trained(home, place)
        with trained.begun():
            until(lambda: told(place))
            servers_path(StagedRun(place.run_directory)).unlink()
            servers_path(StagedRun(place.run_directory)).mkdir()  # no file can take its place
            until(said)
            trained.train(12)
            assert trained.checkpoints.batches_done == 12
    assert len(said()) == 1 and "Training goes on" in said()[0]


class Area:
    """The staging area of a trainer, with its lock, and a note that is written by hand."""

    def __init__(self, place: Place, home: Home) -> None:
        self.is_stalled = False
        self.area = StagingArea(place.staging, place.run)
        self.area.create()
        self.area.lock()
        self.note = ServersNote(home, self.area, generation=3, is_stalled=lambda: self.is_stalled)


def test_nothing_is_written_in_a_stall_and_little_besides(
    place: Place, running: list[EmbeddingServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServedHome(running) as home:
        here = Area(place, home)
        here.is_stalled = True
        here.note.write()
        assert told(place) is None
        here.is_stalled = False
        here.note.write()
        first = told(place)
        assert first is not None and first.generation == 3
        here.note.write()
        assert told(place) == first, "nothing has changed"
        home.add_table("more", rows=10, record_bytes=8)
        here.note.write()
        second = told(place)
        assert second is not None and sum(one.rows for one in second.servers.each) == 10
        monkeypatch.setattr(servers_note, "BEAT_SECONDS", 0.0)
        until(lambda: now_ms() > second.at_ms)  # a note tells its time in whole milliseconds
        here.note.write()  # at least every few seconds, so that its age says that it is true
        third = told(place)
        assert third is not None and third.at_ms > second.at_ms
        here.area.close()
        home.add_table("again", rows=10, record_bytes=8)
        here.note.write()
        assert told(place) == third, "another trainer may have the run now"


def test_a_home_without_servers_says_nothing(place: Place) -> None:
    with local() as home:
        here = Area(place, home)
        here.note.start()
        here.note.write()
        here.note.ask()
        here.note.end()
        assert told(place) is None
        here.area.close()
