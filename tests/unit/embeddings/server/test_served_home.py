"""A home on embedding servers keeps the contract of homes, and never reads a new server as old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from recpoint.embeddings.home.contract import FrozenRows, Home
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.transport import Transport
from recpoint.errors import HomeError, ServerLost
from recpoint.testing.homes import HomeSuite, fetched, ids_of, records_of
from tests.simulated_network import PassedOn

T = TypeVar("T")


@pytest.fixture(params=[1, 2, 3])
def servers(request: pytest.FixtureRequest) -> Iterator[list[EmbeddingServer]]:
    servers = [EmbeddingServer(name=f"server {number}") for number in range(request.param)]
    yield servers
    for server in servers:
        server.end()


class TestServedHome(HomeSuite):
    @pytest.fixture
    def home(self, servers: list[EmbeddingServer]) -> Iterator[Home]:
        with ServedHome(servers) as home:
            yield home


def test_files_keep_rows_too(tmp_path: Path) -> None:
    servers = [EmbeddingServer(directory=tmp_path / str(number)) for number in range(2)]
    with ServedHome(servers) as home:
        home.add_table("t", rows=100, record_bytes=24)
        home.write_back("t", ids_of(range(0, 100, 3)), records_of(range(0, 100, 3), 24), batch=0)
        with home.freeze("t", range(100)) as frozen:
            home.write_back("t", ids_of([3]), records_of([3], 24, version=1), batch=1)
            assert len(fetched(frozen.fetch, range(100), 24)) == 34
        assert home.size_bytes()["index"] > 0
        home.clear("t")
        assert fetched(partial(home.fetch, "t"), range(100), 24) == {}
    for server in servers:
        server.end()
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["home.lock"]


def two_servers() -> tuple[list[EmbeddingServer], list[PassedOn]]:
    servers = [EmbeddingServer(name=f"server {number}") for number in range(2)]
    return servers, [PassedOn(server) for server in servers]


def test_large_calls_go_in_pieces() -> None:
    _, transports = two_servers()
    rows, size = range(30), 1 << 20
    with ServedHome(transports) as home:
        home.add_table("t", rows=30, record_bytes=size)
        home.write_back("t", ids_of(rows), records_of(rows, size), batch=0)
        out = torch.zeros(30, size, dtype=torch.uint8)
        assert home.fetch("t", ids_of(rows), out).all()
        assert torch.equal(out, records_of(rows, size))
    for transport in transports:
        assert 3 << 20 < transport.most_bytes <= 4 << 20
        assert transport.names.count("fetch") == transport.names.count("write_back") == 5
        assert transport.names[-1] == "close"


def calls(home: Home, frozen: FrozenRows) -> dict[str, Callable[[], object]]:
    """Calls for table "t" that ask both servers."""
    ids = ids_of(range(10))
    return {
        "fetch": lambda: home.fetch("t", ids, torch.zeros(10, 8, dtype=torch.uint8)),
        "write_back": lambda: home.write_back("t", ids, records_of(range(10), 8), batch=9),
        "freeze": lambda: home.freeze("t", range(10)),
        "frozen": lambda: frozen.fetch(ids, torch.zeros(10, 8, dtype=torch.uint8)),
    }


def test_a_server_that_was_started_again_is_not_read_as_if_it_had_rows() -> None:
    servers, transports = two_servers()
    with ServedHome(transports) as home:
        for table in ("t", "u"):
            home.add_table(table, rows=10, record_bytes=8)
            home.write_back(table, ids_of(range(10)), records_of(range(10), 8), batch=5)
        frozen = home.freeze("t", range(10))
        servers[1].end()
        lost = calls(home, frozen)
        for call in lost.values():
            with pytest.raises(ServerLost, match="server 1.*after its end"):
                call()
        transports[1].server = EmbeddingServer(name="the new server 1")
        for call in lost.values():
            with pytest.raises(ServerLost, match="the new server 1: found a server that was start"):
                call()
        home.add_table("t", rows=10, record_bytes=8)  # is known: changes nothing
        with pytest.raises(ServerLost):
            lost["fetch"]()
        frozen.release()
        home.clear("t")
        assert fetched(partial(home.fetch, "t"), range(10), 8) == {}
        home.write_back("t", ids_of([2, 3]), records_of([2, 3], 8), batch=0)
        assert len(fetched(partial(home.fetch, "t"), range(10), 8)) == 2
        with pytest.raises(ServerLost, match="the new server 1"):
            fetched(partial(home.fetch, "u"), range(10), 8)
        home.clear("u")
        assert fetched(partial(home.fetch, "u"), range(10), 8) == {}
        home.add_table("v", rows=10, record_bytes=8)
        assert fetched(partial(home.fetch, "v"), range(10), 8) == {}


def test_a_trainer_adds_no_table_at_a_server_that_has_lost_what_another_wrote() -> None:
    """Else rows that the other has written would look like rows that nobody has."""
    servers, transports = two_servers()
    with ServedHome(transports, trainers=2) as first:
        others = [PassedOn(server) for server in servers]
        with ServedHome(others, owner=first.owner, trainer=1, trainers=2) as second:
            first.add_table("t", rows=10, record_bytes=8)
            first.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=1)
            transports[1].server = others[1].server = EmbeddingServer(name="the new server 1")
            with pytest.raises(ServerLost, match="server 2 of 2: found a server that was started"):
                first.add_table("u", rows=10, record_bytes=8)
            with pytest.raises(ServerLost, match="server 2 of 2: found a server that was started"):
                second.add_table("t", rows=10, record_bytes=8)
            # All go back to a checkpoint now, and write its rows.
            first.clear("t")
            second.add_table("t", rows=10, record_bytes=8)
            second.clear("t")
            first.write_back("t", ids_of([2, 3]), records_of([2, 3], 8), batch=0)
            assert len(fetched(partial(second.fetch, "t"), range(10), 8)) == 2


def test_a_dead_server_is_replaced_when_a_table_is_cleared_or_added() -> None:
    servers, transports = two_servers()
    revived: list[int] = []

    def revive(number: int) -> Transport:
        revived.append(number)
        servers[number] = EmbeddingServer(name=f"server {number}, again")
        return servers[number]

    with ServedHome(transports, revive=revive) as home:
        home.add_table("t", rows=10, record_bytes=8)
        home.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=5)
        servers[0].end()
        with pytest.raises(ServerLost):
            home.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=6)
        assert revived == []
        home.clear("t")
        assert revived == [0] and transports[0].names[-1] == "close"
        home.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=1)
        assert len(fetched(partial(home.fetch, "t"), range(10), 8)) == 10
        servers[1].end()
        home.add_table("u", rows=10, record_bytes=8)
        assert revived == [0, 1]
        with pytest.raises(ServerLost):
            fetched(partial(home.fetch, "t"), range(10), 8)


def test_a_training_that_begins_takes_servers_over() -> None:
    """The training before gets nothing any more, and cannot take the servers back."""
    servers, _ = two_servers()
    old = ServedHome(servers)
    old.add_table("t", rows=10, record_bytes=8)
    old.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=5)
    frozen = old.freeze("t", range(10))
    with ServedHome(servers) as new:
        new.add_table("t", rows=20, record_bytes=16)
        assert fetched(partial(new.fetch, "t"), range(20), 16) == {}
        new.write_back("t", ids_of([1, 2]), records_of([1, 2], 16), batch=0)
        for call in calls(old, frozen).values():
            with pytest.raises(ServerLost, match="works for another training"):
                call()
        with pytest.raises(ServerLost):
            old.size_bytes()
        frozen.release()
        with pytest.raises(ServerLost, match="embedding server . of 2 .*another training"):
            old.clear("t")
        assert len(fetched(partial(new.fetch, "t"), range(20), 16)) == 2
    old.close()


def test_other_ranks_join_the_servers_of_their_training() -> None:
    servers, _ = two_servers()
    with ServedHome(servers) as first:
        first.add_table("t", rows=10, record_bytes=8)
        first.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=5)
        with ServedHome(servers, owner=first.owner, trainer=1) as second:
            second.add_table("t", rows=10, record_bytes=8)
            assert len(fetched(partial(second.fetch, "t"), range(10), 8)) == 10
            second.write_back("t", ids_of([1]), records_of([1], 8, version=1), batch=0)
            found = fetched(partial(first.fetch, "t"), [1], 8)
            assert found == fetched(partial(second.fetch, "t"), [1], 8)
            assert torch.equal(torch.tensor(list(found[1])), records_of([1], 8, version=1)[0])
        with pytest.raises(ServerLost, match="another training"):
            ServedHome(servers, owner=first.owner + 1)


def test_a_freeze_that_failed_keeps_no_rows() -> None:
    """Neither where it succeeded, nor, after the next freeze, where its answer was lost."""

    class LosesAnswers(PassedOn):
        loses = False

        def deliver(self, name: str, call: Callable[[], T]) -> T:
            answer = super().deliver(name, call)
            if self.loses:
                raise ServerLost("s", found="no answer", expected="an answer", next_step="wait")
            return answer

    servers, _ = two_servers()
    transports = [LosesAnswers(server) for server in servers]
    with ServedHome(transports) as home:
        home.add_table("t", rows=10, record_bytes=8)
        ids = ids_of(range(10))
        home.write_back("t", ids, records_of(range(10), 8), batch=0)
        held = home.freeze("t", range(10))
        transports[1].loses = True
        with pytest.raises(ServerLost, match="no answer"):
            home.freeze("t", range(10))
        assert [len(server._tables["t"].frozen) for server in servers] == [1, 2]
        transports[1].loses = False
        held.release()
        home.freeze("t", range(10)).release()
        assert [len(server._tables["t"].frozen) for server in servers] == [0, 0]
        home.clear("t")


def test_rows_that_cannot_be_released_do_not_stop_a_clear() -> None:
    """As when the transport to a lost server was closed meanwhile."""

    class Refuses(PassedOn):
        def deliver(self, name: str, call: Callable[[], T]) -> T:
            if name == "release":
                raise HomeError("s", found="a call after close()", expected="no", next_step="none")
            return super().deliver(name, call)

    servers, passed_on = two_servers()
    with ServedHome([Refuses(servers[0]), passed_on[1]]) as home:
        home.add_table("t", rows=10, record_bytes=8)
        home.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=0)
        home.freeze("t", range(10)).release()
        assert [len(server._tables["t"].frozen) for server in servers] == [1, 0]
        home.clear("t")
        assert [len(server._tables["t"].frozen) for server in servers] == [0, 0]


def test_a_home_needs_servers() -> None:
    with pytest.raises(ValueError, match="one for each server"):
        ServedHome([])


def test_small_tables_need_not_have_rows_on_each_server() -> None:
    servers = [EmbeddingServer() for _ in range(5)]
    with ServedHome(servers) as home:
        for rows in (1, 2, 4):
            table = f"of {rows}"
            home.add_table(table, rows=rows, record_bytes=8)
            home.write_back(table, ids_of(range(rows)), records_of(range(rows), 8), batch=0)
            with home.freeze(table, range(rows)) as frozen:
                assert len(fetched(frozen.fetch, range(rows), 8)) == rows
            assert len(fetched(partial(home.fetch, table), range(rows), 8)) == rows
            with home.freeze(table, range(rows, rows)) as frozen:
                assert fetched(frozen.fetch, [], 8) == {}
