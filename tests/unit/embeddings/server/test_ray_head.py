"""A Ray cluster's head that goes away, comes back and stays away; no Ray is needed for that."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from recpoint.embeddings.server import ray_head
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.ray_head import Head, WatchedTransport, patience_of_ray
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer, TcpTransport
from recpoint.errors import ClusterLost, ServerLost
from recpoint.testing.homes import HomeSuite, fetched, ids_of, records_of
from tests.polling import until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "_LOOK_SECONDS", 0.02)


def _listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(_listening()) as listener:
        yield listener


def _address(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


class TestWatchedHome(HomeSuite):
    """The contract of homes, while the head answers."""

    @pytest.fixture
    def home(self, listener: socket.socket) -> Iterator[ServedHome]:
        head = Head(_address(listener), seconds=60.0, give_up=lambda: None)
        with TcpServer(EmbeddingServer(), b"t") as server:
            transport = WatchedTransport(TcpTransport(server.address, b"t"), head)
            assert transport.listens_at == server.address
            with ServedHome([transport]) as home:
                yield home
        head.stop()


def test_a_head_that_comes_back_is_kept(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    given_up = threading.Event()
    address = _address(listener)
    head = Head(address, seconds=60.0, give_up=given_up.set)
    head.wait()
    port = listener.getsockname()[1]
    listener.close()
    until(lambda: "does not answer; training goes on for 60 s" in caplog.text)
    waits = threading.Thread(target=head.wait)
    waits.start()
    head.require_kept()
    assert waits.is_alive()
    with closing(_listening(port)):
        until(lambda: "answers again" in caplog.text)
        waits.join()
    head.stop()
    with pytest.raises(ServerLost, match=f"head of the Ray cluster at {address}: found no answer"):
        head.wait()
    assert len(caplog.records) == 2 and not given_up.is_set()


def test_calls_end_once_a_head_was_away_too_long(listener: socket.socket) -> None:
    given_up = threading.Event()
    head = Head(_address(listener), seconds=0.3, give_up=given_up.set)
    with (
        TcpServer(EmbeddingServer(), b"t") as server,
        ServedHome([WatchedTransport(TcpTransport(server.address, b"t"), head)]) as home,
    ):
        home.add_table("t", rows=10, record_bytes=8)
        home.write_back("t", ids_of([3]), records_of([3], 8), batch=0)
        fetch = partial(fetched, partial(home.fetch, "t"), [3], 8)
        listener.close()
        assert not given_up.is_set() and len(fetch()) == 1
        assert given_up.wait(60)
        for call in (fetch, partial(home.clear, "t"), home.size_bytes, head.wait):
            with pytest.raises(ClusterLost, match=r"for 0\.3 s; .* Next: start a Ray cluster"):
                call()


def test_the_time_is_that_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_gcs_rpc_server_reconnect_timeout_s"
    monkeypatch.delenv(name, raising=False)
    assert patience_of_ray() == 60.0
    monkeypatch.setenv(name, "600")
    assert patience_of_ray() == 600.0
