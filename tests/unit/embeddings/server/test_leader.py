"""Servers with parity in this process: what the leader does when things go wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from recpoint.embeddings.parity.differences import Unsettled
from recpoint.embeddings.parity.leader import Leader
from recpoint.embeddings.parity.peers import (
    Differences,
    Members,
    OutOfStep,
    Peer,
    Sent,
    TableShare,
    TableSlots,
)
from recpoint.embeddings.parity.replacement import LedState
from recpoint.embeddings.parity.stripes import Parity, stripes_of
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.led_server import CommandedServer, Servers
from recpoint.embeddings.server.links import ServerLink
from recpoint.embeddings.server.messages import AddTable, Begin
from recpoint.embeddings.server.parity_messages import (
    AskKnown,
    OpenServer,
    PeerAddress,
    Protect,
)
from recpoint.embeddings.server.protected_home import protected_home
from recpoint.embeddings.server.protection import Reach
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer, TcpTransport
from recpoint.embeddings.server.tcp_peer import TcpPeer, reach_with
from recpoint.embeddings.server.transport import (
    Greeting,
    Message,
    Reply,
    SlotRows,
    Transport,
)
from recpoint.embeddings.server.until_successor import UntilSuccessor
from recpoint.errors import HomeError, ServerLost
from recpoint.format.records import Part
from recpoint.format.servers import ServerFacts
from recpoint.testing.homes import fetched, ids_of, records_of
from tests.no_threads import no_threads
from tests.polling import until
from tests.simulated_network import PassedOn

AnswerT = TypeVar("AnswerT", bound=Part)

TOKEN = b"of this test"
RECORD_BYTES = 20
ROWS = 301
WRITTEN = list(range(0, ROWS, 3))


class Hosts:
    """Servers in this process, which are ended and started again at other ports.

    Attributes:
        refusals: errors that `revive` raises first.
        reach: what successors call other servers with.
        cuts: numbers of a server, and of another one that it does not reach. See `cut`.
    """

    def __init__(self, count: int, transport: Callable[..., TcpTransport] = TcpTransport) -> None:
        self.refusals: list[Exception] = []
        self.reach: Reach = reach_with(TOKEN)
        self.cuts: set[tuple[int, int]] = set()
        self._peers: dict[tuple[int, int], list[TcpTransport]] = {}
        self._transport = transport
        self._running = [self._start(number) for number in range(count)]

    def _start(self, number: int) -> tuple[EmbeddingServer, TcpServer]:
        def reach(host: str, port: int, incarnation: int, row_bytes: Mapping[str, int]) -> Peer:
            peer = self.reach(host, port, incarnation, row_bytes)
            to = next(at for at, (_, there) in enumerate(self._running) if there.address[1] == port)
            if isinstance(peer, TcpPeer):
                self._peers.setdefault((number, to), []).append(peer._transport)
            self.cut(*self.cuts)
            return peer

        server = EmbeddingServer(reach=reach)
        return server, TcpServer(server, TOKEN)

    def cut(self, *pairs: tuple[int, int]) -> None:
        """Have a server call another one at an address where nobody answers."""
        for pair in pairs:
            for transport in self._peers.get(pair, ()):
                transport.address = ("127.0.0.1", 1)
                transport._drop_idle()

    def transport(self, number: int) -> Transport:
        return self._transport(self._running[number][1].address, TOKEN, timeout_seconds=20.0)

    def transports(self) -> list[Transport]:
        return [self.transport(number) for number in range(len(self._running))]

    def lose(self, number: int) -> None:
        server, listening = self._running[number]
        listening.close()
        server.end()

    def revive(self, number: int) -> Transport:
        if self.refusals:
            raise self.refusals.pop()
        self.lose(number)
        self._running[number] = self._start(number)
        return self.transport(number)

    def end(self) -> None:
        for number in range(len(self._running)):
            self.lose(number)


class Disturbed(Peer):
    """Calls another server, after something has happened."""

    def __init__(self, disturb: Callable[[], None], peer: Peer) -> None:
        self._disturb = disturb
        self._peer = peer

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        self._peer.differences(messages)

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        self._disturb()
        return self._peer.rows(wanted, recover=recover, is_condensed=is_condensed)

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        return self._peer.parity_rows(wanted, at, is_condensed=is_condensed)

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        self._disturb()
        return self._peer.decoded(wanted, lost)

    @property
    def is_unreached(self) -> bool:
        return self._peer.is_unreached

    def close(self) -> None:
        self._peer.close()


def disturbed(disturb: Callable[[], None]) -> Reach:
    reach = reach_with(TOKEN)
    return lambda *place: Disturbed(disturb, reach(*place))


@contextmanager
def running(
    count: int = 3, transport: Callable[..., TcpTransport] = TcpTransport, **options: Any
) -> Iterator[tuple[Hosts, ServedHome]]:
    with ExitStack() as stack:
        hosts = Hosts(count, transport)
        stack.callback(hosts.end)
        home = protected_home(
            hosts.transports(), parity=Parity(data=2), revive=hosts.revive, **options
        )
        stack.enter_context(home)
        home.add_table("items", rows=ROWS, record_bytes=RECORD_BYTES)
        home.write_back("items", ids_of(WRITTEN), records_of(WRITTEN, RECORD_BYTES), batch=1)
        yield hosts, home


def leader_of(home: ServedHome) -> Leader:
    assert isinstance(home.calls, UntilSuccessor) and home.calls.leader is not None
    return home.calls.leader


def require_rows(home: ServedHome, table: str = "items") -> None:
    found = fetched(partial(home.fetch, table), range(ROWS), RECORD_BYTES)
    expected = records_of(WRITTEN, RECORD_BYTES)
    assert sorted(found) == WRITTEN
    assert [found[row] for row in WRITTEN] == [bytes(one.tolist()) for one in expected]


def test_a_successor_that_does_not_start_is_started_again() -> None:
    """Training waits for it. An error of one start is no error of a call for rows."""
    with running() as (hosts, home):
        refused = HomeError("a process", found="no", expected="yes", next_step="wait")
        hosts.refusals = [refused, RuntimeError("of a cluster"), refused]
        hosts.lose(1)
        require_rows(home)
        assert not hosts.refusals
        until(lambda: not home.being_recovered)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, MemoryError])
def test_a_recovery_goes_on_after_an_error(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    errors = [error("once"), error("twice")]

    def disturb() -> None:
        if errors:
            raise errors.pop()

    with running() as (hosts, home):
        hosts.reach = disturbed(disturb)
        hosts.lose(0)
        until(lambda: not errors)
        until(lambda: not home.being_recovered)
        require_rows(home)
    said = [one for one in caplog.records if one.levelname == "ERROR"]
    assert len(said) == 1 and "cannot recover its rows" in said[0].message


def test_the_home_says_which_server_recovers_and_since_when_all_are_whole() -> None:
    may_recover = threading.Event()

    def disturb() -> None:
        if not may_recover.is_set():
            raise OutOfStep("not yet")

    def each() -> tuple[ServerFacts, ...]:
        told = home.servers_now()
        assert told is not None and told.parity == 1 and not told.has_given_up
        return told.each

    with running() as (hosts, home):
        assert {(one.state, one.lost_ms) for one in each()} == {("up", None)}
        assert sum(one.rows for one in each()) == ROWS + -(-ROWS // 2), "rows and parity rows"
        hosts.reach = disturbed(disturb)
        hosts.lose(0)
        until(lambda: home.lost_rows > 0)
        lost, *others = each()
        assert (lost.state, lost.known_rows, lost.whole_ms) == ("recovering", 0, None)
        assert {(one.state, one.lost_ms, one.known_rows - one.rows) for one in others} == {
            ("up", None, 0)
        }
        may_recover.set()
        until(lambda: not home.being_recovered)
        again = each()[0]
        assert (again.state, again.known_rows) == ("up", again.rows)
        assert again.lost_ms == lost.lost_ms and again.lost_ms is not None
        assert again.whole_ms is not None and again.whole_ms >= again.lost_ms
    assert home.servers_now() is None, "it is closed"


def test_frozen_rows_of_a_server_that_is_not_ready_are_lost_in_the_end() -> None:
    def disturb() -> None:
        raise OutOfStep("not yet")

    with running(patience_seconds=1.0) as (hosts, home):
        hosts.reach = disturbed(disturb)
        hosts.lose(0)
        until(lambda: home.being_recovered != ())
        until(lambda: home.lost_rows > 0)  # it is open
        with home.freeze("items", range(ROWS)) as frozen:
            out = torch.zeros(ROWS, RECORD_BYTES, dtype=torch.uint8)
            with pytest.raises(ServerLost, match="do not agree"):
                frozen.fetch(ids_of(range(ROWS)), out)


def test_a_table_that_only_another_trainer_has_outlives_a_server() -> None:
    """Its rows are recovered, also if the leader adds the table only after that."""
    with running() as (hosts, home), ExitStack() as stack:
        other = protected_home(
            hosts.transports(),
            parity=Parity(data=2),
            owner=home.owner,
            trainer=1,
            trainers=2,
            revive=hosts.transport,
        )
        stack.enter_context(other)
        for number in range(12):  # more than one answer names
            other.add_table(f"more {number}", rows=ROWS, record_bytes=RECORD_BYTES)
        records = records_of(WRITTEN, RECORD_BYTES)
        other.write_back("more 11", ids_of(WRITTEN), records, batch=1)
        hosts.lose(2)
        require_rows(other, "more 11")
        home.add_table("more 11", rows=ROWS, record_bytes=RECORD_BYTES)
        require_rows(home, "more 11")


class Gated(TcpTransport):
    """Greets its server only while the gate is open."""

    gate = threading.Event()

    def hello(self, *, within_seconds: float | None = None) -> Greeting:
        assert self.gate.wait(60.0)
        return super().hello(within_seconds=within_seconds)


def test_a_clear_needs_no_thread_that_waits_for_it() -> None:
    """All threads of the home wait to lead, because a server is lost. A clear leads meanwhile."""
    Gated.gate.set()
    with running(transport=Gated) as (hosts, home):
        home.add_table("other", rows=ROWS, record_bytes=RECORD_BYTES)
        Gated.gate.clear()
        hosts.lose(0)
        callers = [threading.Thread(target=home.clear, args=("other",), daemon=True)]
        callers += [
            threading.Thread(target=require_rows, args=(home,), daemon=True) for _ in range(16)
        ]
        for one in callers:
            one.start()
        # The pool starts its last thread when all others are busy, with calls that have failed.
        until(lambda: len(home._servers._threads._threads) == 12)
        Gated.gate.set()
        for one in callers:
            one.join(60.0)
        assert not any(one.is_alive() for one in callers)
        require_rows(home)


def test_states_follow_each_other() -> None:
    with running() as (hosts, home):
        leader = leader_of(home)
        assert set(leader.states) == {LedState.WHOLE}
        gate = threading.Event()
        hosts.reach = disturbed(lambda: None if gate.wait(60.0) else None)
        hosts.lose(1)
        until(lambda: leader.states == (LedState.WHOLE, LedState.OPEN, LedState.WHOLE))
        assert home.lost_servers == 1
        gate.set()
        until(lambda: set(leader.states) == {LedState.WHOLE})
        assert home.lost_servers == home.lost_rows == 0


def write_again(home: ServedHome, version: int) -> None:
    records = records_of(WRITTEN, RECORD_BYTES, version=version)
    home.write_back("items", ids_of(WRITTEN), records, batch=version + 1)
    found = fetched(partial(home.fetch, "items"), WRITTEN, RECORD_BYTES)
    assert [found[row] for row in WRITTEN] == [bytes(one.tolist()) for one in records]


def test_of_two_servers_that_do_not_reach_each_other_one_is_replaced() -> None:
    """Both live. The leader hears of it, and the other servers go on with a successor."""
    with running(4) as (hosts, home):
        before = [home.incarnation(one) for one in range(4)]
        hosts.cut((0, 2))
        write_again(home, 1)
        changed = [one for one in range(4) if home.incarnation(one) != before[one]]
        assert changed == [2]
        until(lambda: not home.being_recovered)
        # One that reaches none of the others is taken for lost itself.
        hosts.cut((3, 0), (3, 1), (3, 2))
        write_again(home, 2)
        assert home.incarnation(3) != before[3] and home.incarnation(0) == before[0]


def test_a_network_that_new_processes_do_not_mend_ends_with_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with running(3) as (hosts, home):
        hosts.cuts = {(1, 2), (2, 1)}
        hosts.cut(*hosts.cuts)
        with pytest.raises(ServerLost, match="at most 1 at a time"):  # noqa: PT012
            for version in range(1, 100):
                write_again(home, version)
        assert "do not reach each other (2, 3), and new processes do not" in caplog.text
        hosts.cuts = set()
        home.clear("items")
        write_again(home, 1)


def test_a_call_that_waits_for_another_server_holds_up_no_release_and_no_clear() -> None:
    """Else each read of the server would wait for these."""
    with running() as (hosts, home):
        leader = leader_of(home)
        gate = threading.Event()
        hosts.reach = disturbed(lambda: None if gate.wait(60.0) else None)
        hosts.lose(1)
        until(lambda: leader.states[1] is LedState.OPEN)
        for table in ("later", "empty"):
            home.add_table(table, rows=ROWS, record_bytes=RECORD_BYTES)
        home.write_back("later", ids_of(WRITTEN), records_of(WRITTEN, RECORD_BYTES), batch=1)
        frozen = home.freeze("later", range(ROWS))
        waiting = threading.Thread(target=require_rows, args=(home,), daemon=True)
        waiting.start()
        until(lambda: hosts._running[1][0]._gate._inside > 0)
        calls = [
            threading.Thread(target=frozen.release, daemon=True),
            threading.Thread(target=home.clear, args=("empty",), daemon=True),
            threading.Thread(target=require_rows, args=(home, "later"), daemon=True),
        ]
        for one in calls:
            one.start()
        for one in calls:
            one.join(30.0)
        assert not any(one.is_alive() for one in calls) and waiting.is_alive()
        gate.set()
        waiting.join(60.0)
        assert not waiting.is_alive()


def test_a_server_protects_once_however_many_commands_come() -> None:
    made: list[int] = []

    def reach(host: str, port: int, incarnation: int, row_bytes: Mapping[str, int]) -> Peer:
        made.append(port)
        time.sleep(0.05)
        return TcpPeer(TcpTransport((host, port), TOKEN), incarnation, row_bytes)

    server = EmbeddingServer(reach=reach)
    incarnation = begun(server)
    protect = partial(server.call, protecting(incarnation))
    callers = [threading.Thread(target=protect) for _ in range(4)]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    server.end()
    assert sorted(made) == [1, 2, 3]


def begun(server: EmbeddingServer) -> int:
    message = Begin(incarnation=server.hello().incarnation, owner=5, is_protected=True)
    return server.call(message).answer.incarnation


def protecting(incarnation: int) -> Protect:
    return Protect(
        incarnation=incarnation,
        number=0,
        data=2,
        parity=2,
        hosts=("a", "b", "c", "d"),
        peers=tuple(
            PeerAddress(server=number, incarnation=100 + number, host="127.0.0.1", port=number)
            for number in (1, 2, 3)
        ),
    )


def adding(incarnation: int, *, is_lost: bool = False) -> AddTable:
    stripes = stripes_of("items", rows=ROWS, parity=Parity(data=2, parity=2), hosts="abcd")
    return AddTable(
        incarnation=incarnation,
        table="items",
        rows=stripes.slots(0),
        record_bytes=RECORD_BYTES,
        all_rows=ROWS,
        generation=0,
        is_lost=is_lost,
    )


def test_before_it_is_open_a_server_learns_of_tables_from_the_leader_only() -> None:
    """What another trainer adds would be taken for a table that has no rows yet."""
    server = EmbeddingServer(reach=reach_with(TOKEN))
    incarnation = begun(server)
    with pytest.raises(OutOfStep, match="does not take part in parity yet"):
        server.call(adding(incarnation))
    server.call(protecting(incarnation))
    with pytest.raises(OutOfStep, match="has not joined"):
        server.call(adding(incarnation))
    server.call(adding(incarnation, is_lost=True))
    server.call(OpenServer(incarnation=incarnation))
    server.call(adding(incarnation))
    rows = server.call(AskKnown(incarnation=incarnation)).answer
    assert rows.known_rows == 0 and rows.all_rows > 0
    server.end()


def test_a_server_that_has_no_thread_to_recover_with_does_not_open() -> None:
    server = EmbeddingServer(reach=reach_with(TOKEN))
    incarnation = begun(server)
    server.call(protecting(incarnation))
    with no_threads(), pytest.raises((RuntimeError, MemoryError)):
        server.call(OpenServer(incarnation=incarnation))
    with pytest.raises(OutOfStep, match="has not joined"):
        server.call(adding(incarnation))
    server.call(OpenServer(incarnation=incarnation))
    server.call(adding(incarnation))
    server.end()


def test_a_report_about_many_writes_comes_in_parts_that_fit() -> None:
    server = EmbeddingServer(reach=reach_with(TOKEN))
    incarnation = begun(server)
    server.call(protecting(incarnation))
    server.call(OpenServer(incarnation=incarnation))
    server.call(adding(incarnation))
    count = 5_000
    for number in range(1, count + 1):
        shares = {0: (incarnation, number), 2: (102, 2**62 + number)}
        sent = Sent(source=1, incarnation=101, number=number, write=number, shares=shares)
        rows = torch.full((1, RECORD_BYTES + 1), number % 256, dtype=torch.uint8)
        given = Differences(tables=[TableShare("items", 0, 1)], slots=torch.tensor([0]), rows=rows)
        server.member(incarnation).other_servers.receive([(sent, given)])
    alone = Sent(
        source=1, incarnation=101, number=count + 1, write=0, shares={0: (incarnation, count + 1)}
    )
    server.member(incarnation).other_servers.receive([(alone, given)])
    sizes: list[int] = []

    class Measured(PassedOn):
        def call(
            self,
            message: Message[AnswerT],
            rows: Sequence[SlotRows] = (),
            *,
            within_seconds: float | None = None,
        ) -> Reply[AnswerT]:
            reply = super().call(message, rows, within_seconds=within_seconds)
            sizes.extend(len(part.model_dump_json()) for part in (message, reply.answer))
            return reply

    link = ServerLink(Measured(server))
    link.incarnation = incarnation
    servers = Servers(
        links=[link],
        tables={},
        table=lambda form: pytest.fail("no other table"),
        parity=Parity(data=2),
        hosts="a",
        owner=5,
        trainer=0,
        greeting_seconds=15.0,
        revive=None,
    )
    led = CommandedServer(0, servers)
    for _ in range(2):  # a repeated call has the same answer
        report = led.lose(1, 101)
        assert isinstance(report, Unsettled) and report.applied == count + 1
        numbers = [write[0][1] for write in report.writes]
        assert numbers == list(range(1, count + 1)), "not the write of one message"
    led.take_back(1, 101, numbers)
    assert max(sizes) < 1 << 16
    found = server.member(incarnation).parity_rows([TableSlots("items", torch.tensor([0]))], {})
    assert found.rows[0].tolist() == [count % 256] * (RECORD_BYTES + 1)
    assert led.lose(1, 101) is None
    server.end()
