"""Calls over TCP: the contract of homes, broken and slow connections, tokens, and garbage."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recpoint.embeddings.home.contract import Home, TableRows
from recpoint.embeddings.parity.peers import OutOfStep, Peer, TableSlots
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server import server, tcp
from recpoint.embeddings.server.all_messages import AnyMessage
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.messages import Begin
from recpoint.embeddings.server.parity_calls import TO_LEADER, TO_SERVERS
from recpoint.embeddings.server.parity_messages import PeerAddress, Protect
from recpoint.embeddings.server.protected_home import made_home
from recpoint.embeddings.server.receive_buffers import ReceiveBuffers
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.stream import (
    _GREETING,
    _REFUSED,
    SEAL,
    Piece,
    Refused,
    Request,
    RowsForm,
    Stream,
    TokenRefused,
    prove_client,
    prove_server,
    receive_reply,
    request_pieces,
)
from recpoint.embeddings.server.tcp import _MOST_UNPROVEN, TcpServer, TcpTransport
from recpoint.embeddings.server.tcp_peer import TcpPeer, reach_with
from recpoint.embeddings.server.transport import MOST_REQUEST_BYTES, Greet, RecordUse
from recpoint.errors import HomeError, ServerLost
from recpoint.testing.homes import HomeSuite, fetched, ids_of, records_of
from tests.example_counts import examples
from tests.no_threads import no_threads
from tests.polling import until
from tests.server_calls import add_table, fetch_rows, write_rows

TOKEN = b"a token that only these tests know"


@pytest.fixture
def served() -> Iterator[TcpServer]:
    server = EmbeddingServer()
    with TcpServer(server, TOKEN) as served:
        yield served
    server.end()


class TestTcpHome(HomeSuite):
    @pytest.fixture(params=[1, 2, 3])
    def home(self, request: pytest.FixtureRequest) -> Iterator[Home]:
        with ExitStack() as opened:
            served = [
                opened.enter_context(TcpServer(EmbeddingServer(), TOKEN))
                for _ in range(request.param)
            ]
            yield opened.enter_context(
                ServedHome([TcpTransport(one.address, TOKEN) for one in served])
            )


def with_table(transport: TcpTransport, *, rows: int = 100, record_bytes: int = 8) -> int:
    incarnation = transport.hello().incarnation
    add_table(transport, incarnation, rows=rows, record_bytes=record_bytes)
    return incarnation


def test_a_greeting_names_the_process(served: TcpServer) -> None:
    transport = TcpTransport(served.address, TOKEN)
    greeting = transport.hello()
    assert (greeting.pid, greeting.host) == (os.getpid(), socket.gethostname())
    assert greeting == transport.hello()
    transport.close()


def test_errors_of_the_server_are_raised_here(served: TcpServer) -> None:
    """And the connection is used again."""
    transport = TcpTransport(served.address, TOKEN)
    incarnation = with_table(transport)
    opened = list(served._open)
    out = torch.zeros(1, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="ids: 100, expected 0 <= id < 100"):
        fetch_rows(transport, [TableRows("t", ids_of([100]), out)], incarnation=incarnation)
    with pytest.raises(ValueError, match="shape"):
        fetch_rows(
            transport,
            [TableRows("t", ids_of([1]), out[:, :4].contiguous())],
            incarnation=incarnation,
        )
    with pytest.raises(HomeError, match="'u'.*no such table"):
        fetch_rows(transport, [TableRows("u", ids_of([1]), out)], incarnation=incarnation)
    with pytest.raises(ServerLost, match="started again"):
        fetch_rows(transport, [TableRows("t", ids_of([1]), out)], incarnation=incarnation % 7 + 1)
    assert not fetch_rows(transport, [TableRows("t", ids_of([1]), out)], incarnation=incarnation)[
        0
    ].any()
    assert list(served._open) == opened
    transport.close()
    with pytest.raises(HomeError, match=r"close\(\)"):
        transport.hello()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_servers_listen_and_are_called_over_ipv6() -> None:
    servers = [EmbeddingServer(reach=reach_with(TOKEN)) for _ in range(2)]
    with ExitStack() as opened:
        for one in servers:
            opened.callback(one.end)
        served = [opened.enter_context(TcpServer(one, TOKEN, host="::1")) for one in servers]
        assert [one.address[0] for one in served] == ["::1", "::1"]
        transports = [TcpTransport(one.address, TOKEN, timeout_seconds=20.0) for one in served]
        # With parity, servers call each other, at the address that a trainer tells them.
        home = opened.enter_context(
            made_home(
                transports,
                parity=Parity(data=1),
                timeout_seconds=20.0,
                revive=transports.__getitem__,
            )
        )
        home.add_table("t", rows=10, record_bytes=8)
        written = records_of(range(10), 8)
        home.write_back("t", ids_of(range(10)), written, batch=1)
        out = torch.zeros_like(written)
        assert home.fetch("t", ids_of(range(10)), out).all() and torch.equal(out, written)
        port = served[0].address[1]
        with pytest.raises(ServerLost, match=rf"server at \[::1\]:{port}.*the token"):
            TcpTransport(served[0].address, b"guessed").hello()


def test_another_token_is_refused(served: TcpServer) -> None:
    with pytest.raises(ServerLost, match=f"server at 127.0.0.1:{served.address[1]}.*the token"):
        TcpTransport(served.address, b"guessed").hello()
    with pytest.raises(ValueError, match="token"):
        TcpServer(EmbeddingServer(), b"")


def test_a_guessed_proof_is_answered_by_no_proof(served: TcpServer) -> None:
    """A true answer would let its receiver pass for a server."""
    client = Stream(socket.create_connection(served.address, timeout=20.0))
    client.receive(len(_GREETING) + 32)
    client.send([b"n" * 32, b"p" * 32])
    assert client.receive(32) == _REFUSED
    with pytest.raises(EOFError):
        client.receive(1)
    assert not served._proven
    client.close()


def test_a_server_must_know_the_token_too() -> None:
    def impostor(stream: Stream) -> None:
        prove_server(stream, b"guessed")

    with fake_server(impostor) as address, pytest.raises(ServerLost, match="the token"):
        TcpTransport(address, TOKEN).hello()


def test_another_server_of_the_training_proves_for_no_other(served: TcpServer) -> None:
    """Else a process that takes a lost server's port could have a live one prove for it."""
    with passing_on(served.address) as address:
        with pytest.raises(ServerLost, match="listens at another address"):
            TcpTransport(address, TOKEN, timeout_seconds=20.0).hello()
        known = TcpTransport(address, TOKEN, timeout_seconds=20.0)
        known.listens_at = served.address
        assert known.hello().owner == 0
        known.close()


@pytest.mark.parametrize(
    ("of_server", "change"),
    [
        (False, "changed"),
        (False, "left out"),
        (True, "changed"),
        (True, "left out"),
        (True, "sent again"),
    ],
)
def test_bytes_that_somebody_changes_are_refused(
    served: TcpServer, of_server: bool, change: str
) -> None:
    """Whoever is between both sides has seen both proofs pass by, and then changes rows."""
    direct = TcpTransport(served.address, TOKEN)
    incarnation = with_table(direct)
    record = records_of([1], 8)
    one = [TableRows("t", ids_of([1]), record)]
    write_rows(direct, one, incarnation=incarnation, trainer=0, batch=1)
    is_armed = threading.Event()

    def changed(data: bytes, is_of_server: bool) -> bytes:
        where = data.find(record.numpy().tobytes())
        if is_of_server is not of_server or where < 0 or not is_armed.is_set():
            return data
        if change == "changed":
            return data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]
        return data[:where] + data[where + 8 :] if change == "left out" else data + data

    with passing_on(served.address, changed) as address:
        through = TcpTransport(address, TOKEN, timeout_seconds=0.5)
        through.listens_at = served.address
        assert through.hello().owner == 0
        is_armed.set()
        with pytest.raises(ServerLost):
            for batch in (2, 3):
                write_rows(through, one, incarnation=incarnation, trainer=0, batch=batch)
                out = torch.zeros_like(record)
                fetch_rows(through, [TableRows("t", ids_of([1]), out)], incarnation=incarnation)
                assert torch.equal(out, record)
        through.close()
    out = torch.zeros_like(record)
    assert fetch_rows(direct, [TableRows("t", ids_of([1]), out)], incarnation=incarnation)[0].all()
    assert torch.equal(out, record)
    direct.close()


@contextmanager
def passing_on(
    to: tuple[str, int], changed: Callable[[bytes, bool], bytes] = lambda data, _: data
) -> Iterator[tuple[str, int]]:
    """Pass bytes on to a server, and have `changed` see them and who has sent them."""

    def copy(source: socket.socket, dest: socket.socket, is_of_server: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                dest.sendall(changed(data, is_of_server))
        for ended in (source, dest):
            with suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)

    def pass_on(stream: Stream) -> None:
        with socket.create_connection(to) as upstream:
            sends = threading.Thread(target=copy, args=(stream._socket, upstream, False))
            sends.start()
            copy(upstream, stream._socket, True)
            sends.join()

    with fake_server(pass_on) as address:
        yield address


def test_a_server_of_another_version_is_refused_by_name() -> None:
    def older(stream: Stream) -> None:
        stream.send([b"recpoint embedding server 6\n"])

    with (
        fake_server(older) as address,
        pytest.raises(ServerLost, match="version 6 of the protocol, and this process version 7"),
    ):
        TcpTransport(address, TOKEN).hello()


def test_an_address_where_nothing_listens_is_lost_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    began = time.monotonic()
    with pytest.raises(ServerLost, match=r"server 3 of 4 \(pid 9\).*it has ended"):
        TcpTransport(address, TOKEN, name="embedding server 3 of 4 (pid 9)").hello()
    assert time.monotonic() - began < 30  # of 60


@contextmanager
def fake_server(act: Callable[[Stream], None]) -> Iterator[tuple[str, int]]:
    """Have `act` talk to each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[Stream] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                stream = Stream(listener.accept()[0])
                opened.append(stream)
                with suppress(OSError, EOFError, TokenRefused):
                    act(stream)

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    for stream in opened:
        stream.close()
    thread.join()
    listener.close()


@pytest.mark.parametrize("when", ["before the proof", "after it"])
def test_a_server_that_is_silent_is_named_when_time_is_over(when: str) -> None:
    def silent(stream: Stream) -> None:
        if when == "after it":
            prove_server(stream, TOKEN)
        stream.receive(1 << 30)

    with fake_server(silent) as address, pytest.raises(ServerLost, match="the slow one.*0.2 s"):
        TcpTransport(address, TOKEN, name="the slow one", timeout_seconds=0.2).hello()


@pytest.mark.parametrize("when", ["before the proof", "after it"])
def test_closing_a_peer_ends_calls_to_a_server_that_is_silent(when: str) -> None:
    """Else a write would wait a minute for a lost server, after the others have forgotten it."""
    asked = threading.Event()

    def silent(stream: Stream) -> None:
        if when == "after it":
            prove_server(stream, TOKEN)
            stream.receive(1)
        asked.set()
        stream.receive(1 << 30)

    ended: list[BaseException] = []

    def ask() -> None:
        try:
            peer.rows([TableSlots("t", torch.tensor([0]))], recover=False)
        except OutOfStep as error:
            ended.append(error)

    with fake_server(silent) as (host, port):
        peer = reach_with(TOKEN, timeout_seconds=50.0)(host, port, 1, {"t": 8})
        caller = threading.Thread(target=ask, daemon=True)
        caller.start()
        assert asked.wait(30.0)
        peer.close()
        caller.join(10.0)
        assert not caller.is_alive() and len(ended) == 1


def test_a_process_that_was_stopped_looks_once_more(served: TcpServer) -> None:
    """Its time is over when it goes on, and the answer has come meanwhile."""
    calls = []
    with closing(TcpTransport(served.address, TOKEN, timeout_seconds=0.5)) as transport:

        def ask(stream: Stream) -> int:
            stream.send(request_pieces(Greet(), []))
            calls.append(stream)
            if len(calls) == 1:
                until(stream.has_bytes)
                stream.deadline = time.monotonic()
            return receive_reply(stream, Greet(), []).answer.owner

        assert transport._exchange(ask, None) == 0
        assert len(calls) == 2
        assert transport.hello().owner == 0


@pytest.mark.parametrize("greets", [True, False])
def test_a_server_says_which_one_it_does_not_reach(greets: bool) -> None:
    """Not one whose calls only take long, and for no longer than it is so."""
    served = EmbeddingServer(reach=reach_with(TOKEN))
    with TcpServer(served, TOKEN) as listening:
        transport = TcpTransport(listening.address, TOKEN, timeout_seconds=0.5)
        peer = TcpPeer(transport, 1, {"t": 9}, greeting_seconds=20.0)
        if not greets:
            listening.close()
        with pytest.raises(ServerLost):  # another incarnation
            peer.rows([TableSlots("t", ids_of([0]))], recover=False)
        assert peer.is_unreached is not greets
        peer.close()
    served.end()


def test_calls_between_servers_take_as_long_as_they_are_told() -> None:
    with fake_server(lambda stream: prove_server(stream, TOKEN)) as (host, port):
        peer = reach_with(TOKEN, timeout_seconds=0.2)(host, port, 1, {"t": 8})
        with pytest.raises(ServerLost, match=r"0\.2 s"):
            peer.rows([TableSlots("t", torch.tensor([0]))], recover=False)
        peer.close()


# In the proof of 92 bytes, in the answers to the writes, 52 bytes each, and in the fetched rows.
@pytest.mark.parametrize("after_bytes", [50, 92, 100, 150, 240])
def test_a_broken_connection_is_opened_again(served: TcpServer, after_bytes: int) -> None:
    """The call is made again: before it was sent, and after it was done."""
    transport = TcpTransport(served.address, TOKEN)
    incarnation = with_table(transport)
    for _ in range(2):
        for stream in list(served._open):
            stream.close()
        until(lambda: not served._open)
        assert transport.hello().incarnation == incarnation
    with broken_once(served.address, after_bytes=after_bytes) as address:
        through = TcpTransport(address, TOKEN)
        through.listens_at = served.address
        for batch in (1, 2):  # the answer to one of them is cut off
            write_rows(
                through,
                [TableRows("t", ids_of([batch]), records_of([batch], 8))],
                incarnation=incarnation,
                trainer=0,
                batch=batch,
            )

        def fetch(slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return fetch_rows(through, [TableRows("t", slots, out)], incarnation=incarnation)[0]

        found = fetched(fetch, range(5), 8)
        assert found.keys() == {1, 2}
        through.close()
    transport.close()


@contextmanager
def broken_once(to: tuple[str, int], *, after_bytes: int) -> Iterator[tuple[str, int]]:
    """A proxy whose first connection breaks after some bytes of the server's."""
    broken: list[bool] = []

    def pass_on(stream: Stream) -> None:
        upstream = socket.create_connection(to)
        sends = threading.Thread(target=copy, args=(stream._socket, upstream, None), daemon=True)
        sends.start()
        limit = None if broken else after_bytes
        broken.append(True)
        copy(upstream, stream._socket, limit)
        stream.close()
        sends.join()
        upstream.close()

    def copy(source: socket.socket, dest: socket.socket, limit: int | None) -> None:
        with suppress(OSError):
            while limit is None or limit > 0:
                data = source.recv(1 << 16 if limit is None else min(limit, 1 << 16))
                if not data:
                    break
                dest.sendall(data)
                limit = None if limit is None else limit - len(data)
        with suppress(OSError):
            dest.shutdown(socket.SHUT_RDWR)

    with fake_server(pass_on) as address:
        yield address
    assert len(broken) > 1


def test_a_server_that_always_closes_is_lost_when_time_is_over(served: TcpServer) -> None:
    served._most = 0
    with pytest.raises(ServerLost, match="a connection that breaks"):
        TcpTransport(served.address, TOKEN, timeout_seconds=0.3).hello()
    served._most = 1
    transport = TcpTransport(served.address, TOKEN, timeout_seconds=60)
    assert transport.hello().owner == 0
    transport.close()


def test_calls_of_many_threads_have_connections_of_their_own(served: TcpServer) -> None:
    transport = TcpTransport(served.address, TOKEN)
    incarnation = with_table(transport, rows=1_600)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        ids = ids_of(range(number, 1_600, 16))
        try:
            for batch in range(10):
                records = records_of(range(number, 1_600, 16), 8, version=batch)
                write_rows(
                    transport,
                    [TableRows("t", ids, records)],
                    incarnation=incarnation,
                    trainer=number,
                    batch=batch,
                )
                out = torch.zeros_like(records)
                assert fetch_rows(transport, [TableRows("t", ids, out)], incarnation=incarnation)[
                    0
                ].all()
                assert torch.equal(out, records)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    until(lambda: len(served._open) <= 8)
    transport.close()
    until(lambda: not served._open)


def talking(served: TcpServer) -> Stream:
    """A connection whose client has proved that it knows the token."""
    stream = Stream(socket.create_connection(served.address))
    stream.deadline = time.monotonic() + 60
    prove_client(stream, TOKEN)
    return stream


def test_a_new_connection_takes_the_place_of_one_that_is_idle(served: TcpServer) -> None:
    """Else trainers that have many ranks could find no room. One that is busy is not closed."""
    served._most = 2
    busy = talking(served)
    request = Request(text=b'{"kind":"explode"}')
    busy_bytes = b"".join(busy._guarded(request.pieces))
    busy._socket.sendall(busy_bytes[:40])
    until(lambda: bool(served._open) and not served._idle)
    transports = [TcpTransport(served.address, TOKEN, timeout_seconds=20.0) for _ in range(3)]
    for one in transports * 3:
        assert one.hello().owner == 0
    until(lambda: len(served._open) == 2)
    busy._socket.sendall(busy_bytes[40:])
    assert busy.receive(4) == b"rpea"
    for one in transports:
        one.close()
    busy.close()


def silent_ones(served: TcpServer, count: int, opened: ExitStack) -> list[socket.socket]:
    return [
        opened.enter_context(socket.create_connection(served.address, timeout=20.0))
        for _ in range(count)
    ]


def test_clients_that_prove_nothing_lock_no_trainer_out(served: TcpServer) -> None:
    """Any user of the host can open sockets. They close each other, and take no trainer's place."""
    served._most = 2
    trainers = [TcpTransport(served.address, TOKEN, timeout_seconds=20.0) for _ in range(3)]
    assert trainers[0].hello().owner == 0
    (kept,) = served._proven
    with ExitStack() as opened:
        silent_ones(served, 300, opened)
        until(lambda: len(served._open) <= _MOST_UNPROVEN + 1)
        assert trainers[0].hello().owner == 0 and served._proven == {kept}  # it has stayed
        for one in trainers:
            assert one.hello().owner == 0
        assert len(served._proven) <= 2 and len(served._unproven) <= _MOST_UNPROVEN
    for one in trainers:
        one.close()
    until(lambda: not served._open)


def test_a_client_that_proves_nothing_is_closed_in_time(
    served: TcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tcp._PROOF_SECONDS <= 2
    monkeypatch.setattr(tcp, "_PROOF_SECONDS", 0.05)
    with ExitStack() as opened:
        (silent,) = silent_ones(served, 1, opened)
        while silent.recv(100):
            pass  # the greeting; then the server closes
        until(lambda: not served._open)


def test_idle_connections_keep_bounded_memory(served: TcpServer) -> None:
    """Each kept the memory of its largest request: at 256 connections, gigabytes."""
    transports = [TcpTransport(served.address, TOKEN) for _ in range(6)]
    incarnation = with_table(transports[0], rows=100_000, record_bytes=120)
    ids = ids_of(range(100_000))
    out = torch.zeros(100_000, 120, dtype=torch.uint8)
    for one in transports:
        for rows in (100_000, 10):
            fetch_rows(one, [TableRows("t", ids[:rows], out[:rows])], incarnation=incarnation)
    until(lambda: served.buffers.lent_bytes == 0)
    assert len(served._open) == 6
    assert 0 < served.buffers.kept_bytes <= 2 * 100_000 * 128
    for one in transports:
        one.close()


def test_kept_memory_is_the_newest_within_its_bound() -> None:
    buffers = ReceiveBuffers(most_kept_bytes=100)
    with buffers.lent(60) as first, buffers.lent(50) as second:
        assert (len(first), len(second), buffers.lent_bytes) == (60, 50, 110)
    assert (buffers.lent_bytes, buffers.kept_bytes) == (0, 60)  # 50 came back before 60
    with buffers.lent(40) as again:
        assert len(again) == 40 and again.data_ptr() == first.data_ptr()
        assert (buffers.lent_bytes, buffers.kept_bytes) == (60, 0)
    with buffers.lent(101):
        assert buffers.kept_bytes == 60
    assert (buffers.lent_bytes, buffers.kept_bytes) == (0, 60)  # 101 is more than is ever kept


def test_a_server_that_gets_no_thread_accepts_further_connections(
    served: TcpServer,
) -> None:
    with no_threads():
        refused = Stream(socket.create_connection(served.address))
        refused.deadline = time.monotonic() + 20
        with pytest.raises((EOFError, ConnectionResetError)):
            refused.receive(1)
    refused.close()
    transport = TcpTransport(served.address, TOKEN, timeout_seconds=20.0)
    assert transport.hello().owner == 0
    assert len(served._open) == 1
    transport.close()


@pytest.mark.parametrize("parity", [None, Parity(data=1)])
def test_a_home_that_cannot_be_made_closes_its_transports(parity: Parity | None) -> None:
    with ExitStack() as opened:
        servers = [EmbeddingServer(reach=reach_with(TOKEN)) for _ in range(2)]
        addresses = [opened.enter_context(TcpServer(one, TOKEN)).address for one in servers]
        opened.enter_context(ServedHome([TcpTransport(one, TOKEN) for one in addresses]))
        transports = [TcpTransport(one, TOKEN) for one in addresses]
        with pytest.raises(ServerLost, match="another training has taken over"):
            made_home(
                transports,
                parity=parity,
                timeout_seconds=20.0,
                owner=7,
                revive=transports.__getitem__,
            )
        for one in transports:
            with pytest.raises(HomeError, match=r"close\(\)"):
                one.hello()


@pytest.mark.parametrize(
    ("record_bytes", "count"),
    [(8, 1 << 40), (1 << 31, 1), (8, MOST_REQUEST_BYTES // 16 + 1), (0, 5)],
)
def test_a_request_that_is_too_large_is_not_made_room_for(
    served: TcpServer, record_bytes: int, count: int
) -> None:
    stream = talking(served)
    forms = [RowsForm(1, 1), RowsForm(record_bytes, count)]
    stream.send(Request(text=b"{}", records=RecordUse.FILLED, forms=forms).pieces)
    with pytest.raises((EOFError, ConnectionResetError)):
        stream.receive(1)
    stream.close()


FIELDS = st.builds(
    lambda magic, *numbers: struct.pack("<4sB3xII", magic, *numbers),
    st.sampled_from([b"rpeq", b"rpea", b"\0\0\0\0"]),
    st.integers(0, 3),
    st.sampled_from([0, 1, 2, 70, 1 << 16, 1 << 32 - 1]),
    st.sampled_from([0, 1, 2, 128, 129, (1 << 32) - 1]),
)
PARTS = st.lists(
    st.builds(
        lambda *numbers: struct.pack("<IQ", *numbers),
        st.sampled_from([0, 1, 8, 1 << 24, (1 << 32) - 1]),
        st.sampled_from([0, 1, 9, 1 << 20, 1 << 63]),
    ),
    max_size=3,
).map(b"".join)
TEXTS = st.sampled_from(
    [
        b"t",
        b"{}",
        b'{"kind":"fetch","incarnation":1,"tables":["t"]}',
        b'{"kind":"fetch","incarnation":1,"tables":[1]}',
        b'{"kind":"differences","incarnation":1,"messages":[{}]}',
        b"[" * 60,
        b'{"kind":"sizes","incarnation":-3}',
        b"\xff\xfe",
        b'{"kind":1}',
    ]
)


@settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    garbage=st.binary(max_size=300) | st.tuples(FIELDS, PARTS, TEXTS).map(b"".join),
    proved=st.booleans(),
)
def test_garbage_ends_its_connection_only(garbage: bytes, proved: bool) -> None:
    served, good = _garbage_server()
    if proved:
        stream = talking(served)
    else:
        stream = Stream(socket.create_connection(served.address))
    with suppress(OSError):
        stream.send([garbage, SEAL])
    stream.close()
    assert good.hello().owner == 0
    assert served._thread.is_alive()


_FOR_GARBAGE: list[tuple[TcpServer, TcpTransport]] = []


def _garbage_server() -> tuple[TcpServer, TcpTransport]:
    if not _FOR_GARBAGE:
        served = TcpServer(EmbeddingServer(), TOKEN)
        _FOR_GARBAGE.append((served, TcpTransport(served.address, TOKEN)))
    return _FOR_GARBAGE[0]


@pytest.fixture(scope="module", autouse=True)
def end_garbage_server() -> Iterator[None]:
    yield
    for served, transport in _FOR_GARBAGE:
        transport.close()
        served.close()
    _FOR_GARBAGE.clear()


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        [struct.pack("<4s?3xIQ", b"rpea", False, 0, 1 << 60)],
        [struct.pack("<4s?3xIQ", b"rpea", False, 1 << 31, 0)],
        [struct.pack("<4s?3xIQ", b"rpea", True, 2, 0) + b"{}", SEAL],
        [struct.pack("<4s?3xIQ", b"rpea", True, 1, 0) + b"{", SEAL],
        [struct.pack("<4s?3xIQ", b"rpea", False, 0, 1), SEAL, b"\x00", SEAL],
        [struct.pack("<4s?3xIQ", b"rpea", False, 2, 1) + b"{}", SEAL, b"\x00", SEAL, SEAL],
    ],
)
def test_an_answer_that_is_none_is_refused(answer: list[Piece]) -> None:
    """Also one that is larger than what was asked for."""

    def malformed(stream: Stream) -> None:
        prove_server(stream, TOKEN)
        Request.receive(Request.header_from(stream), stream)
        stream.send(answer)

    out = torch.zeros(2, 8, dtype=torch.uint8)
    with fake_server(malformed) as address, pytest.raises(ServerLost, match="no embedding server"):
        fetch_rows(
            TcpTransport(address, TOKEN), [TableRows("t", ids_of([0, 1]), out)], incarnation=1
        )


@pytest.mark.parametrize(
    "text",
    [
        b"x",
        b"[" * 100_000,
        b'{"kind":"explode"}',
        b'{"kind":"add_table","incarnation":1,"table":"u","rows":true}',
        b'{"kind":"add_table","incarnation":1,"table":"u","rows":-1}',
        b'{"kind":"add_table","incarnation":1,"table":7}',
        b'{"kind":"release","incarnation":1,"number":1.0}',
        b'{"kind":"begin","incarnation":1,"owner":0}',
        b'{"kind":"release","incarnation":1}',
        b'{"kind":"sizes","incarnation":1,"more":1}',
        b'{"kind":"fetch","incarnation":1,"tables":[]}',
    ],
)
def test_messages_of_another_form_are_refused(served: TcpServer, text: bytes) -> None:
    """By an error, after which the connection is used again."""
    stream = talking(served)
    for _ in range(2):
        stream.send(Request(text=text).pieces)
        with pytest.raises(Refused) as refused:
            receive_reply(stream, Greet(), [])
        assert isinstance(refused.value.error, ValueError) and len(str(refused.value)) < 500
    stream.close()


def test_messages_are_bounded(served: TcpServer) -> None:
    transport = TcpTransport(served.address, TOKEN)
    incarnation = with_table(transport)
    with pytest.raises(ValueError, match="1024"):
        add_table(transport, incarnation, table="u" * 2_000, rows=1, record_bytes=8)
    for rows, record_bytes in ((1 << 60, 8), (1, 1 << 30)):
        with pytest.raises(HomeError, match="'u'.*on one server"):
            add_table(transport, incarnation, table="u", rows=rows, record_bytes=record_bytes)
    transport.close()


def test_every_message_has_a_handler_and_a_kind_of_its_own() -> None:
    messages = set(get_args(AnyMessage))
    assert {*server._HANDLERS, *TO_LEADER, *TO_SERVERS} == messages
    assert len({message.model_fields["kind"].default for message in messages}) == len(messages)


def test_an_error_that_no_call_expects_is_answered_too() -> None:
    """Else the caller would make the call again for a minute, and take the server for lost."""

    def reach(host: str, port: int, incarnation: int, row_bytes: Mapping[str, int]) -> Peer:
        raise IndexError("no such peer") if port == 1 else TypeError("no peer at all")

    server = EmbeddingServer(reach=reach)
    with TcpServer(server, TOKEN) as served:
        transport = TcpTransport(served.address, TOKEN)
        first = transport.hello().incarnation
        begin = Begin(incarnation=first, owner=5, is_protected=True)
        incarnation = transport.call(begin).answer.incarnation
        opened = list(served._open)
        for port, match in ((1, "IndexError"), (2, "TypeError")):
            peer = PeerAddress(server=1, incarnation=1, host="b", port=port)
            protect = Protect(
                incarnation=incarnation,
                number=0,
                data=1,
                parity=1,
                hosts=("a", "b"),
                peers=(peer,),
            )
            with pytest.raises(HomeError, match=match):
                transport.call(protect)
        assert transport.hello().owner == 5 and list(served._open) == opened
        transport.close()
    server.end()


def test_closing_ends_calls_that_are_under_way(served: TcpServer) -> None:
    stream = talking(served)
    stream.send(request_pieces(Greet(), []))
    assert stream.receive(4) == b"rpea"
    stream.send([Request(text=b"x" * 9).pieces[0]])  # its text never comes
    served.close()
    served.close()
    assert not served._open
    stream.close()
