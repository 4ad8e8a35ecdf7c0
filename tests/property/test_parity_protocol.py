"""The servers' protocol on a simulated network: whatever is lost, every acknowledged row is there.

Each server is a `StripeMember` with its rows in memory. Calls between servers go through a network
that loses requests and answers, delivers a request twice, the second time late, and runs other
things at any message: a write elsewhere, a death, a batch of a recovery.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import TypeVar

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from recpoint.embeddings.home import TableRows
from recpoint.embeddings.home_in_memory import MemoryHome
from recpoint.embeddings.parity.differences import Unsettled
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import Differences, Members, OutOfStep, Peer, Sent
from recpoint.embeddings.parity.recovery import Recovery
from recpoint.embeddings.parity.stripes import Parity, Stripes, stripes_of
from recpoint.errors import ServerLost
from recpoint.kernels import erasure

T = TypeVar("T")

TABLE = "items"
RECORD_BYTES = 5


class Killed(Exception):
    """Ends what a server was doing when it was killed."""


class Process:
    """A server: one start of it."""

    def __init__(self, number: int, incarnation: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.is_alive = True
        self.home = MemoryHome()
        self.member: StripeMember | None = None

    def begin(self, member: StripeMember, stripes: Stripes, *, is_lost: bool) -> None:
        self.member = member
        slots = stripes.slots(self.number)
        self.home.add_table(TABLE, rows=slots, record_bytes=RECORD_BYTES)
        member.add_table(TABLE, stripes, RECORD_BYTES, is_lost=is_lost)

    @property
    def protects(self) -> StripeMember:
        assert self.member is not None
        return self.member


class Line(Peer):
    """Calls from one server to another one over the simulated network."""

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._network = network
        self._source = source
        self._target = target

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        for sent, given in messages:  # a call may end between two of them
            copied = replace(given, slots=given.slots.clone(), rows=given.rows.clone())
            receive = partial(self._target.protects.receive, [(sent, copied)])
            self._call(receive, may_come_again=True)

    def rows(self, table: str, slots: Tensor, *, recover: bool) -> Members:
        if self._network.is_busy(self._target.number):
            raise _lost(self._target)  # it takes too long
        return self._call(lambda: self._target.protects.rows(table, slots, recover=recover))

    def parity_rows(self, table: str, slots: Tensor, at: Mapping[int, tuple[int, int]]) -> Members:
        return self._call(lambda: self._target.protects.parity_rows(table, slots, at))

    def close(self) -> None:
        """Nothing is open."""

    def _call(self, act: Callable[[], T], *, may_come_again: bool = False) -> T:
        return self._network.call(self._source, self._target, act, may_come_again)


class Control:
    """Calls from the trainer that leads a recovery to a server."""

    def __init__(self, network: Network, target: Process) -> None:
        self._network = network
        self._target = target

    def lose(self, server: int, incarnation: int) -> Unsettled | None:
        return self._call(lambda: self._target.protects.lose(server, incarnation))

    def take_back(self, server: int, incarnation: int, numbers: Sequence[int]) -> None:
        self._call(lambda: self._target.protects.take_back(server, incarnation, numbers))

    def join(self, server: int, incarnation: int, peer: Peer) -> None:
        self._call(lambda: self._target.protects.join(server, incarnation, peer))

    def _call(self, act: Callable[[], T]) -> T:
        return self._network.call(None, self._target, act, False)


class Network:
    """Carries calls. `fates` says what happens to the next ones; without any, all goes well."""

    def __init__(self, interrupt: Callable[[str], None]) -> None:
        self.fates: Iterator[str] = iter(())
        self.late: list[tuple[Process, Callable[[], object]]] = []
        # All is in one thread: who waits for a server that does something would wait for ever.
        self.answering: list[int] = []
        self.busy: set[int] = set()
        self._interrupt = interrupt
        self._depth = 0

    def is_busy(self, number: int) -> bool:
        return number in self.busy or number in self.answering

    def call(
        self, source: Process | None, target: Process, act: Callable[[], T], may_come_again: bool
    ) -> T:
        self._happen(source)
        fate = next(self.fates, "well")
        if not target.is_alive or fate == "request lost":
            raise _lost(target)
        self.answering.append(target.number)
        try:
            found = act()
        except Killed:
            if target.is_alive:
                raise
            raise _lost(target) from None
        finally:
            self.answering.pop()
        if fate == "twice, later" and may_come_again:
            self.late.append((target, act))
        self._happen(source)
        if not target.is_alive or fate == "answer lost":
            raise _lost(target)
        return found

    def _happen(self, source: Process | None) -> None:
        """Let something else happen between a request and its answer."""
        fate = next(self.fates, "well")
        if self._depth < 2 and fate in ("write", "kill", "recover", "late"):
            self._depth += 1
            try:
                self._interrupt(fate)
            finally:
                self._depth -= 1
        if fate == "the sender dies" and source is not None:
            self._interrupt(f"{fate}: {source.number}")
        if source is not None and not source.is_alive:
            raise Killed


def _lost(target: Process) -> ServerLost:
    return ServerLost(f"server {target.number + 1}", found="no", expected="yes", next_step="")


def one_by_one(calls: Sequence[Callable[[], T]]) -> list[T]:
    return [call() for call in calls]


FATES = st.lists(
    st.sampled_from(
        ["well"] * 5
        + ["write"] * 3
        + ["request lost", "answer lost", "twice, later", "kill", "recover", "late"]
    ),
    min_size=12,
    max_size=40,
)

#: What comes between messages of a recovery that gets to its end.
BUSY = st.lists(
    st.sampled_from(["well", "well", "write", "write", "late", "twice, later"]),
    min_size=12,
    max_size=40,
)


class ParityMachine(RuleBasedStateMachine):
    """Writes rows, kills servers, recovers them."""

    @initialize(
        data=st.integers(1, 3),
        parity=st.integers(1, 2),
        more=st.integers(0, 2),
        rows=st.integers(1, 24),
        choices=st.randoms(use_true_random=False),
    )
    def begin(self, data: int, parity: int, more: int, rows: int, choices: Random) -> None:
        self.choose = choices
        self.form = Parity(data=data, parity=parity)
        self.count = data + parity + more
        hosts = [f"host {one}" for one in range(self.count)]
        self.stripes = stripes_of(TABLE, rows=rows, parity=self.form, hosts=hosts)
        self.rows = rows
        self.incarnations = itertools.count(1)
        self.versions = itertools.count(1)
        self.network = Network(self.interrupt)
        self.recovery = Recovery()
        #: What must be there, and for rows whose write was not acknowledged what may be there.
        self.acknowledged: dict[int, bytes] = {}
        self.pending: dict[int, bytes] = {}
        self.lost: set[int] = set()
        self.servers = [Process(one, next(self.incarnations)) for one in range(self.count)]
        for server in self.servers:
            self.start(server, self.servers, is_lost=False)

    def start(self, server: Process, others: list[Process], *, is_lost: bool) -> None:
        peers: dict[int, tuple[int, Peer]] = {
            other.number: (other.incarnation, Line(self.network, server, other))
            for other in others
            if other is not server
        }
        member = StripeMember(
            server.number,
            server.incarnation,
            server.home,
            peers,
            together=one_by_one,
        )
        server.begin(member, self.stripes, is_lost=is_lost)

    # What a trainer does.

    @rule(fates=FATES, count=st.integers(1, 6))
    def write(self, fates: list[str], count: int) -> None:
        self.network.fates = iter(fates)
        self.write_some(count)
        self.network.fates = iter(())

    def write_some(self, count: int) -> None:
        server = self.servers[self.choose.randrange(self.count)]
        if self.network.is_busy(server.number):
            return
        slots = len(self.stripes.slots_of(server.number, range(self.rows)))
        if not slots:
            return
        chosen = sorted({self.choose.randrange(slots) for _ in range(count)})
        here = torch.tensor(chosen, dtype=torch.int64)
        ids = self.stripes.ids(server.number, here).tolist()
        # A row whose write failed is written again as it was.
        records = {
            one: self.pending.get(one) or bytes([next(self.versions) % 251 + 1] * RECORD_BYTES)
            for one in ids
        }
        self.pending.update(records)
        self.network.busy.add(server.number)
        try:
            self.send(server, here, [records[one] for one in ids])
        except (ServerLost, OutOfStep, Killed):
            return
        finally:
            self.network.busy.discard(server.number)
        for one in ids:
            self.acknowledged[one] = self.pending.pop(one)

    def send(self, server: Process, slots: Tensor, records: list[bytes]) -> None:
        if not server.is_alive:
            raise _lost(server)
        server.protects.recover(TABLE, slots)
        rows = torch.tensor([list(one) for one in records], dtype=torch.uint8)
        server.protects.write([TableRows(TABLE, slots, rows)])
        server.protects.flush()
        if not server.is_alive:
            raise _lost(server)

    @rule(row=st.integers(0, 23), fates=FATES)
    def read(self, row: int, fates: list[str]) -> None:
        row %= self.rows
        self.network.fates = iter(fates)
        try:
            found = self.found(row)
        except (ServerLost, OutOfStep, Killed):
            return
        finally:
            self.network.fates = iter(())
        self.check(row, found)

    def found(self, row: int) -> bytes | None:
        for number, (positions, slots) in enumerate(self.stripes.split(torch.tensor([row]))):
            if not len(positions):
                continue
            server = self.servers[number]
            if not server.is_alive:
                raise _lost(server)
            # What happens meanwhile is in this thread: it must not wait for this recovery.
            self.network.busy.add(number)
            try:
                server.protects.recover(TABLE, slots)
            finally:
                self.network.busy.discard(number)
            if not server.is_alive:
                raise _lost(server)
            record = torch.zeros(1, RECORD_BYTES, dtype=torch.uint8)
            has = server.home.fetch(TABLE, slots, record)
            return bytes(record[0].tolist()) if bool(has[0]) else None
        raise AssertionError("a row is nowhere")

    def check(self, row: int, found: bytes | None) -> None:
        may_be = {self.acknowledged.get(row)}
        if row in self.pending:
            may_be.add(self.pending[row])
        assert found in may_be, (row, found, may_be)

    # What else happens.

    def interrupt(self, what: str) -> None:
        if what == "write":
            self.write_some(4)
        elif what == "kill":
            self.kill(self.choose.randrange(self.count))
        elif what.startswith("the sender dies"):
            self.kill(int(what.rpartition(":")[2]))
        elif what == "recover":
            self.recover_some(self.choose.randrange(self.count))
        else:
            self.deliver_late()

    @rule(number=st.integers(0, 6))
    def die(self, number: int) -> None:
        self.kill(number % self.count)

    def kill(self, number: int) -> None:
        incomplete = {
            one.number
            for one in self.servers
            if not one.is_alive or one.protects.known.known < one.protects.known.all
        }
        if len(incomplete | {number}) <= self.form.parity:
            self.servers[number].is_alive = False

    @rule()
    def deliver_late(self) -> None:
        if not self.network.late:
            return
        target, act = self.network.late.pop(0)
        if target.is_alive:
            try:
                act()
            except OutOfStep:
                pass

    @precondition(lambda self: any(not one.is_alive for one in self.servers))
    @rule(fates=FATES)
    def heal(self, fates: list[str]) -> None:
        self.network.fates = iter(fates)
        try:
            self.replace_lost()
        except (ServerLost, OutOfStep):
            pass  # another one is lost meanwhile: the next time
        self.network.fates = iter(())

    def replace_lost(self) -> None:
        lost = [one for one in self.servers if not one.is_alive]
        living = {one.number: one for one in self.servers if one.is_alive}
        controls = {number: Control(self.network, one) for number, one in living.items()}
        for one in lost:
            self.recovery.forget(one.number, one.incarnation, controls)
        successors = [Process(one.number, next(self.incarnations)) for one in lost]
        everyone = [*living.values(), *successors]
        for one in successors:
            self.start(one, everyone, is_lost=True)
        for one in successors:
            self.servers[one.number] = one
        self.joined = False
        for number, control in controls.items():
            for one in successors:
                control.join(one.number, one.incarnation, Line(self.network, living[number], one))

    def join_all(self) -> None:
        """What the trainer repeats until every server has joined every other."""
        for one in self.servers:
            for other in self.servers:
                if one is not other and one.is_alive and other.is_alive:
                    line = Line(self.network, one, other)
                    one.protects.join(other.number, other.incarnation, line)

    @precondition(lambda self: all(one.is_alive for one in self.servers))
    @rule()
    def join_again(self) -> None:
        self.join_all()

    @rule(number=st.integers(0, 6), fates=FATES)
    def recover(self, number: int, fates: list[str]) -> None:
        self.network.fates = iter(fates)
        self.recover_some(number % self.count)
        self.network.fates = iter(())

    def recover_some(self, number: int) -> None:
        server = self.servers[number]
        if not server.is_alive or self.network.is_busy(number):
            return
        self.network.busy.add(number)
        try:
            server.protects.recover_next()
        except (ServerLost, OutOfStep, Killed):
            pass
        finally:
            self.network.busy.discard(number)

    @rule(messages=st.integers(0, 8))
    def die_while_writing(self, messages: int) -> None:
        """Some of a write's messages have arrived, and some have not."""
        self.network.fates = iter(["well"] * messages + ["the sender dies"])
        self.write_some(6)
        self.network.fates = iter(())
        self.replace_lost()
        self.join_all()

    @rule(number=st.integers(0, 6), fates=BUSY)
    def lose_and_recover(self, number: int, fates: list[str]) -> None:
        """The usual course of things, with whatever may come between its messages."""
        self.write_some(6)
        self.kill(number % self.count)
        try:
            self.replace_lost()
        except OutOfStep:
            return
        self.join_all()
        self.network.fates = iter(fates)
        self.recover_some(number % self.count)
        self.network.fates = iter(())

    # What must hold.

    @invariant()
    def parity_fits_at_quiet_points(self) -> None:
        if any(
            not one.is_alive or one.protects.known.known < one.protects.known.all
            for one in self.servers
        ):
            return
        try:
            for one in self.servers:
                one.protects.flush()
        except OutOfStep:
            return  # not all have joined each other yet
        self.check_stripes()

    def check_stripes(self) -> None:
        for stripe in range(self.stripes.count):
            at = torch.tensor([stripe])
            coded = []
            for position in range(self.form.data):
                row = stripe * self.form.data + position
                found = self.found(row) if row < self.rows else None
                if row < self.rows:
                    self.check(row, found)
                whole = bytes(RECORD_BYTES + 1) if found is None else found + b"\1"
                coded.append(torch.tensor([list(whole)], dtype=torch.uint8))
            for number, expected in enumerate(erasure.encode(coded, self.form.parity)):
                server, slot = self.stripes.parity_in(at, number)
                held = self.servers[int(server)].protects.parity_rows(TABLE, slot, {})
                assert torch.equal(held.rows, expected), (stripe, number)

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        self.network.fates = iter(())
        for _ in range(4):
            if any(not one.is_alive for one in self.servers):
                self.replace_lost()
        self.join_all()
        for _ in range(100):
            if not any([one.protects.recover_next() for one in self.servers]):
                break
        for one in self.servers:
            one.protects.flush()
        assert all(one.protects.known.known == one.protects.known.all for one in self.servers)
        self.check_stripes()
        # Writes that failed are made again, and are then there.
        for row, record in list(self.pending.items()):
            for number, (positions, slots) in enumerate(self.stripes.split(torch.tensor([row]))):
                if len(positions):
                    self.send(self.servers[number], slots, [record])
            self.acknowledged[row] = self.pending.pop(row)
        self.check_stripes()


def test_no_acknowledged_row_is_lost() -> None:
    run_state_machine_as_test(
        ParityMachine, settings=settings(max_examples=100, stateful_step_count=20, deadline=None)
    )
