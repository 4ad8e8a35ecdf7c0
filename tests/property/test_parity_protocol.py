"""The servers' protocol on a simulated network: whatever is lost, every acknowledged row is there.

Each server is a `StripeMember` with its rows in memory. A `Leader` replaces those that are killed,
and clears tables. Calls between servers, and those of the leader, go through a network that loses
requests and answers, delivers a request twice, the second time late, and runs other things at any
message: a write elsewhere, a death, a batch of a recovery, a table that a trainer adds.
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
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from recpoint.embeddings.home.contract import TableRows
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.embeddings.parity.differences import Unsettled
from recpoint.embeddings.parity.leader import Leader
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.own_tables import Known
from recpoint.embeddings.parity.peers import Differences, Members, OutOfStep, Peer, Sent, TableSlots
from recpoint.embeddings.parity.replacement import LedServer, LedState
from recpoint.embeddings.parity.stripe_check import StripeVerdict
from recpoint.embeddings.parity.stripes import Parity, Stripes, TablesStripes, stripes_of
from recpoint.errors import ServerLost
from recpoint.kernels import erasure
from tests.example_counts import examples

T = TypeVar("T")

#: What may happen between a request and its answer.
INTERRUPTS = ("write", "kill", "recover", "late", "compare", "add")

TABLE = "items"
RECORD_BYTES = 5

#: A table, and a row of it.
Row = tuple[str, int]


class Killed(Exception):
    """Ends what a server was doing when it was killed."""


class Process:
    """A server: one start of it, or one beginning."""

    def __init__(self, number: int, incarnation: int, beginning: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.beginning = beginning
        self.is_alive = True
        self.is_silent = False  # it lives, and the leader does not reach it
        self.home = MemoryHome()
        self.member: StripeMember | None = None
        self.cleared: dict[str, int] = {}  # table -> number of the last clear

    @property
    def protects(self) -> StripeMember:
        if self.member is None:
            raise OutOfStep("it does not take part in parity yet")
        return self.member

    @property
    def is_open(self) -> bool:
        return self.member is not None and self.member.is_open

    @property
    def is_whole(self) -> bool:
        if not self.is_alive or self.is_silent or not self.is_open:
            return False
        known = self.protects.known
        return known.known == known.all


class Line(Peer):
    """Calls from one server to another one over the simulated network."""

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._network = network
        self._source = source
        self._target = target

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        for sent, given in messages:  # a call may end between two of them
            copied = replace(given, slots=given.slots.clone(), rows=given.rows.clone())
            receive = partial(self._target.protects.other_servers.receive, [(sent, copied)])
            self._call(receive, may_come_again=True)

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        if self._network.is_busy(self._target.number):
            raise _lost(self._target)  # it takes too long
        return self._call(
            lambda: self._target.protects.rows(wanted, recover=recover, is_condensed=is_condensed)
        )

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        return self._call(
            lambda: self._target.protects.parity_rows(wanted, at, is_condensed=is_condensed)
        )

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        if self._network.is_busy(self._target.number):
            raise _lost(self._target)
        return self._call(lambda: self._target.protects.recovery.decoded(wanted, lost))

    @property
    def is_unreached(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""

    def _call(self, act: Callable[[], T], *, may_come_again: bool = False) -> T:
        return self._network.call(self._source, self._target, act, may_come_again)


class Led(LedServer):
    """Calls from the leader to a server, or to its successor, over the simulated network."""

    def __init__(self, machine: ParityMachine, number: int) -> None:
        self._machine = machine
        self._number = number
        self._its = machine.servers[number].incarnation

    @property
    def incarnation(self) -> int:
        return self._its

    @property
    def _process(self) -> Process:
        return self._machine.servers[self._number]

    def lives(self) -> bool:
        # Whoever is asked for its name answers, unless it has ended.
        here = self._process
        return here.is_alive and not here.is_silent and here.incarnation == self._its

    @property
    def unreached(self) -> tuple[int, ...]:
        return ()

    def begin(self, number_of_beginning: int) -> None:
        machine, number = self._machine, self._number

        def begin() -> int:
            if self._process.beginning != number_of_beginning:
                machine.servers[number] = machine.new_process(number, number_of_beginning)
            return machine.servers[number].incarnation

        self._its = machine.network.call(None, self._process, begin, False)

    def succeed(self, number_of_beginning: int) -> None:
        if not self._process.is_silent:
            self._process.is_alive = False
        self._machine.servers[self._number] = self._machine.new_process(self._number, -1)
        self.begin(number_of_beginning)

    def protect(self) -> None:
        peers = {one: self._machine.led[one].incarnation for one in range(self._machine.count)}
        del peers[self._number]
        self._call(lambda server: self._machine.protect(server, peers))

    def tables(self) -> Mapping[str, int]:
        return self._call(
            lambda server: {name: one.generation for name, one in server.protects.tables.items()}
        )

    def add_table(self, table: str, generation: int, *, is_lost: bool) -> None:
        self._call(lambda server: self._machine.add_table(server, table, generation, is_lost))

    def join(self, other: int) -> None:
        incarnation = self._machine.led[other].incarnation
        self._call(
            lambda server: server.protects.other_servers.join(
                other, incarnation, self._machine.line(server, incarnation)
            ),
            may_come_again=True,
        )

    def open(self) -> None:
        def open_(server: Process) -> None:
            server.protects.is_open = True

        self._call(open_)

    def known(self) -> Known:
        # It answers, too: else the leader could give up though all rows are recovered.
        return self._process.protects.known

    def clear(self, table: str, generation: int) -> None:
        number = next(self._machine.clears)

        def clear(server: Process) -> None:
            if number > server.cleared.get(table, 0):  # as `EmbeddingServer` does it once
                server.cleared[table] = number
                server.protects.clear(table, generation)

        self._call(clear, may_come_again=True)

    def give_up(self) -> None:
        self._call(lambda server: None)

    def lose(self, server: int, incarnation: int) -> Unsettled | None:
        return self._call(
            lambda here: here.protects.other_servers.lose(server, incarnation), may_come_again=True
        )

    def take_back(self, server: int, incarnation: int, numbers: Sequence[int]) -> None:
        def take_back(here: Process) -> None:
            for number in numbers:  # in parts
                here.protects.other_servers.take_back(server, incarnation, [number], are_all=False)
            here.protects.other_servers.take_back(server, incarnation, [])

        self._call(take_back, may_come_again=True)

    def _call(self, act: Callable[[Process], T], *, may_come_again: bool = False) -> T:
        process = self._process
        if process.incarnation != self._its:
            raise _lost(process)
        if may_come_again and self._machine.choose.random() < 0.3:
            self._machine.network.late.append((process, lambda: act(process)))
        return self._machine.network.call(None, process, lambda: act(process), may_come_again)


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
        if self._depth < 2 and fate in INTERRUPTS:
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
        + ["request lost", "answer lost", "twice, later", "kill", "recover", "late", "compare"]
        + ["add"]
    ),
    min_size=12,
    max_size=40,
)

#: What comes between messages of a recovery that gets to its end.
BUSY = st.lists(
    st.sampled_from(["well", "well", "write", "write", "late", "twice, later", "compare", "add"]),
    min_size=12,
    max_size=40,
)


def record_bytes(table: str) -> int:
    """Tables have rows of two lengths, so one write has messages of its own for each."""
    return RECORD_BYTES + (2 if table.endswith("1") else 0)


def first_parity(stripes: Stripes, server: int) -> torch.Tensor:
    """The slots of a server that have first parity rows."""
    slots = torch.arange(stripes.parity_slots(server), dtype=torch.int64)
    of = torch.zeros_like(slots)
    return slots[TablesStripes([stripes]).parity_at(of, server, slots)[1] == 0]


class ParityMachine(RuleBasedStateMachine):
    """Writes rows, kills servers, and has a `Leader` replace them."""

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
        self.hosts = [f"host {one}" for one in range(self.count)]
        self.rows = rows
        self.stripes: dict[str, Stripes] = {}
        self.incarnations = itertools.count(1)
        self.versions = itertools.count(1)
        self.clears = itertools.count(1)
        self.network = Network(self.interrupt)
        self.processes: dict[int, Process] = {}  # by incarnation
        #: What must be there, and for rows whose write was not acknowledged what may be there.
        self.acknowledged: dict[Row, bytes] = {}
        self.pending: dict[Row, bytes] = {}
        self.adds_at: int | None = None  # where trainers add tables; None: anywhere
        self.servers = [self.new_process(one, 0) for one in range(self.count)]
        self.led = [Led(self, one) for one in range(self.count)]
        self.leader = Leader(self.led, parity)
        self.add_new_table(TABLE, by_leader=True)

    # What servers are, and how they are reached.

    def new_process(self, number: int, beginning: int) -> Process:
        made = Process(number, next(self.incarnations), beginning)
        self.processes[made.incarnation] = made
        return made

    def line(self, source: Process, incarnation: int) -> Line:
        return Line(self.network, source, self.processes[incarnation])

    def protect(self, server: Process, peers: Mapping[int, int]) -> None:
        if server.member is None:
            server.member = StripeMember(
                server.number,
                server.incarnation,
                server.home,
                {one: (its, self.line(server, its)) for one, its in peers.items()},
                together=one_by_one,
            )

    def add_table(self, server: Process, table: str, generation: int, is_lost: bool) -> None:
        stripes = self.stripes[table]
        slots = stripes.slots(server.number)
        server.home.add_table(table, rows=slots, record_bytes=record_bytes(table))
        server.protects.add_table(
            table, stripes, record_bytes(table), generation=generation, is_lost=is_lost
        )

    # What trainers do.

    @rule(by_leader=st.booleans())
    def add_another_table(self, by_leader: bool) -> None:
        if len(self.stripes) < 3 and all(one.is_open and one.is_alive for one in self.servers):
            self.add_new_table(f"{TABLE} {len(self.stripes)}", by_leader=by_leader)

    def add_new_table(self, table: str, *, by_leader: bool) -> None:
        """Add a table, as the leader's trainer or as another one, which the leader hears from."""
        self.stripes[table] = stripes_of(table, rows=self.rows, parity=self.form, hosts=self.hosts)
        generation = self.leader.add_table(table) if by_leader else 0
        for server in self.servers:
            self.add_table(server, table, generation, False)

    @rule(number=st.integers(0, 6))
    def add_again(self, number: int) -> None:
        self.add_some(number % self.count)

    def add_some(self, number: int) -> None:
        """Add a table at a server, as a trainer does that comes to it after the others."""
        table = self.choose.choice(sorted(self.stripes))
        try:
            self.add_table(self.servers[number], table, 0, False)
        except OutOfStep:
            pass  # it tries again

    @rule(fates=st.lists(st.sampled_from(["well", "add", "add", "write"]), max_size=60))
    def add_while_a_server_is_replaced(self, fates: list[str]) -> None:
        """Whatever a trainer adds at a successor, this recovers the rows that it has lost."""
        number = self.choose.randrange(self.count)
        self.write_some(6)
        self.kill(number)
        self.adds_at = number
        self.network.fates = itertools.chain(fates, itertools.repeat("add"))
        self.leader.look()
        self.network.fates = iter(())
        self.adds_at = None

    @rule(fates=FATES, count=st.integers(1, 6))
    def write(self, fates: list[str], count: int) -> None:
        self.network.fates = iter(fates)
        self.write_some(count)
        self.network.fates = iter(())

    def write_some(self, count: int) -> None:
        server = self.servers[self.choose.randrange(self.count)]
        if self.network.is_busy(server.number):
            return
        tables = sorted(self.stripes)
        slots: dict[str, Tensor] = {}
        ids: list[Row] = []
        for table in self.choose.sample(tables, self.choose.randint(1, len(tables))):
            stripes = self.stripes[table]
            most = len(stripes.slots_of(server.number, range(self.rows)))
            if not most:
                continue
            chosen = sorted({self.choose.randrange(most) for _ in range(count)})
            slots[table] = torch.tensor(chosen, dtype=torch.int64)
            ids += [(table, one) for one in stripes.ids(server.number, slots[table]).tolist()]
        if not slots:
            return
        # A row whose write failed is written again as it was.
        records = {
            one: self.pending.get(one)
            or bytes([next(self.versions) % 251 + 1] * record_bytes(one[0]))
            for one in ids
        }
        self.pending.update(records)
        self.network.busy.add(server.number)
        try:
            self.send(server, slots, [records[one] for one in ids])
        except (ServerLost, OutOfStep, Killed):
            return
        finally:
            self.network.busy.discard(server.number)
        for one in ids:
            self.acknowledged[one] = self.pending.pop(one)

    def send(self, server: Process, slots: Mapping[str, Tensor], records: list[bytes]) -> None:
        """Write rows of several tables in one call; `records` has those of each in turn."""
        self.require_open(server)
        server.protects.recovery.recover([TableSlots(*one) for one in slots.items()])
        left = iter(records)
        changed = []
        for table, chosen in slots.items():
            rows = [list(next(left)) for _ in chosen]
            changed.append(TableRows(table, chosen, torch.tensor(rows, dtype=torch.uint8)))
        server.protects.write(changed)
        server.protects.other_servers.flush()
        self.require_open(server)

    def require_open(self, server: Process) -> None:
        if not server.is_alive or self.servers[server.number] is not server:
            raise _lost(server)
        if not server.is_open:
            raise OutOfStep("it is not open")

    @rule(row=st.integers(0, 23), fates=FATES)
    def read(self, row: int, fates: list[str]) -> None:
        row %= self.rows
        table = self.choose.choice(sorted(self.stripes))
        self.network.fates = iter(fates)
        try:
            found = self.found(table, row)
        except (ServerLost, OutOfStep, Killed):
            return
        finally:
            self.network.fates = iter(())
        self.check(table, row, found)

    def found(self, table: str, row: int) -> bytes | None:
        split = self.stripes[table].split(torch.tensor([row]))
        for number, (positions, slots) in enumerate(split):
            if not len(positions):
                continue
            server = self.servers[number]
            self.require_open(server)
            # What happens meanwhile is in this thread: it must not wait for this recovery.
            self.network.busy.add(number)
            try:
                server.protects.recovery.recover([TableSlots(table, slots)])
            finally:
                self.network.busy.discard(number)
            self.require_open(server)
            record = torch.zeros(1, record_bytes(table), dtype=torch.uint8)
            has = server.home.fetch(table, slots, record)
            return bytes(record[0].tolist()) if bool(has[0]) else None
        raise AssertionError("a row is nowhere")

    def check(self, table: str, row: int, found: bytes | None) -> None:
        may_be = {self.acknowledged.get((table, row))}
        if (table, row) in self.pending:
            may_be.add(self.pending[table, row])
        assert found in may_be, (table, row, found, may_be)

    @rule(fates=FATES)
    def clear(self, fates: list[str]) -> None:
        """A restore. It goes on until all tables are cleared; nothing is written meanwhile."""
        instead = {"write": "compare", "recover": "compare", "kill": "well"}
        self.clear_all([instead.get(fate, fate) for fate in fates])

    def clear_all(self, fates: list[str]) -> None:
        self.network.fates = iter(fates)
        for table in list(self.stripes):
            while True:
                try:
                    self.leader.clear(table)
                except (ServerLost, OutOfStep):
                    continue
                break
        self.network.fates = iter(())
        self.acknowledged.clear()
        self.pending.clear()

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
        elif what == "add":
            at = self.adds_at
            self.add_some(self.choose.randrange(self.count) if at is None else at)
        elif what == "compare":
            self.compare_some(self.choose.randrange(self.count))
        else:
            self.deliver_late()

    @rule(number=st.integers(0, 6))
    def die(self, number: int) -> None:
        self.kill(number % self.count)

    @rule(number=st.integers(0, 6), fates=FATES)
    def fall_silent(self, number: int, fates: list[str]) -> None:
        """The leader takes a server for lost that goes on, and what it does then counts no more."""
        number %= self.count
        server = self.servers[number]
        if not server.is_alive or not self.may_lose(number):
            return
        server.is_silent = True
        self.write_some(4)
        self.network.fates = iter(fates)
        self.leader.look()
        self.network.fates = iter(())
        self.network.busy.add(number)
        try:
            self.go_on(server)
        finally:
            self.network.busy.discard(number)

    def go_on(self, server: Process) -> None:
        """Write at a server, though a successor may have its place."""
        slots = len(self.stripes[TABLE].slots_of(server.number, range(self.rows)))
        if slots and server.member is not None and server is not self.servers[server.number]:
            here = torch.arange(slots, dtype=torch.int64)
            try:
                server.protects.recovery.recover([TableSlots(TABLE, here)])
                records = torch.full((slots, RECORD_BYTES), 252, dtype=torch.uint8)
                server.protects.write([TableRows(TABLE, here, records)])
                server.protects.other_servers.flush()
            except (ServerLost, OutOfStep, Killed):
                return
            raise AssertionError("other servers take what a server sends that has a successor")

    def kill(self, number: int) -> None:
        """Kill a server, if parity makes up for it."""
        if self.may_lose(number):
            self.servers[number].is_alive = False

    def may_lose(self, number: int) -> bool:
        incomplete = {one.number for one in self.servers if not one.is_whole}
        return len(incomplete | {number}) <= self.form.parity

    @rule(fates=FATES)
    def lose_too_many(self, fates: list[str]) -> None:
        """More than parity makes up for. All rows are written anew after that."""
        for server in self.servers[: self.form.parity + 1]:
            server.is_alive = False
        self.leader.look()
        assert self.leader.has_given_up
        self.clear(fates)
        assert not self.leader.has_given_up
        assert all(one.is_whole for one in self.servers)

    @rule()
    def deliver_all_late(self) -> None:
        for _ in range(len(self.network.late)):
            self.deliver_late()

    @rule()
    def deliver_late(self) -> None:
        if not self.network.late:
            return
        target, act = self.network.late.pop(self.choose.randrange(len(self.network.late)))
        if target.is_alive:
            try:
                act()
            except OutOfStep:
                pass

    @rule(fates=FATES)
    def heal(self, fates: list[str]) -> None:
        self.network.fates = iter(fates)
        self.leader.look()
        self.network.fates = iter(())
        assert not self.leader.has_given_up, "no more were killed than parity makes up for"

    @rule(number=st.integers(0, 6), fates=FATES)
    def recover(self, number: int, fates: list[str]) -> None:
        self.network.fates = iter(fates)
        self.recover_some(number % self.count)
        self.network.fates = iter(())

    def recover_some(self, number: int) -> None:
        server = self.servers[number]
        if not server.is_alive or not server.is_open or self.network.is_busy(number):
            return
        self.network.busy.add(number)
        try:
            server.protects.recovery.recover_next()
        except (ServerLost, OutOfStep, Killed):
            pass
        finally:
            self.network.busy.discard(number)

    @rule(number=st.integers(0, 6), fates=FATES)
    def compare(self, number: int, fates: list[str]) -> None:
        self.network.fates = iter(fates)
        self.compare_some(number % self.count)
        self.network.fates = iter(())

    def compare_some(self, number: int) -> None:
        """Whatever happens meanwhile, no stripe is taken for damaged."""
        server = self.servers[number]
        if self.network.is_busy(number):
            return
        try:
            self.require_open(server)
            for table, stripes in self.stripes.items():
                found = server.protects.check(table, first_parity(stripes, number))
                assert set(found.tolist()) <= {StripeVerdict.FITS, StripeVerdict.UNKNOWN}, (
                    table,
                    found,
                )
        except (ServerLost, OutOfStep, Killed):
            pass

    @rule(messages=st.integers(0, 8))
    def die_while_writing(self, messages: int) -> None:
        """Some of a write's messages have arrived, and some have not."""
        self.network.fates = iter(["well"] * messages + ["the sender dies"])
        self.write_some(6)
        self.network.fates = iter(())
        self.leader.look()

    @rule(number=st.integers(0, 6), fates=BUSY)
    def lose_and_recover(self, number: int, fates: list[str]) -> None:
        """The usual course of things, with whatever may come between its messages."""
        self.write_some(6)
        self.kill(number % self.count)
        self.leader.look()
        self.network.fates = iter(fates)
        self.recover_some(number % self.count)
        self.network.fates = iter(())

    # What must hold.

    @invariant()
    def parity_fits_at_quiet_points(self) -> None:
        if not all(one.is_whole for one in self.servers):
            return
        try:
            for one in self.servers:
                one.protects.other_servers.flush()
        except OutOfStep:
            return  # not all have joined each other yet
        self.check_stripes()

    def check_stripes(self) -> None:
        for table, stripes in self.stripes.items():
            for stripe in range(stripes.count):
                self.check_stripe(table, stripes, stripe)
            for number, server in enumerate(self.servers):
                found = server.protects.check(table, first_parity(stripes, number))
                assert bool((found == StripeVerdict.FITS).all()), (table, number, found)

    def check_stripe(self, table: str, stripes: Stripes, stripe: int) -> None:
        at = torch.tensor([stripe])
        coded = []
        for position in range(self.form.data):
            row = stripe * self.form.data + position
            found = self.found(table, row) if row < self.rows else None
            if row < self.rows:
                self.check(table, row, found)
            whole = bytes(record_bytes(table) + 1) if found is None else found + b"\1"
            coded.append(torch.tensor([list(whole)], dtype=torch.uint8))
        for number, expected in enumerate(erasure.encode(coded, self.form.parity)):
            server, slot = stripes.parity_in(at, number)
            held = self.servers[int(server)].protects.parity_rows([TableSlots(table, slot)], {})
            assert torch.equal(held.rows, expected), (table, stripe, number)

    def teardown(self) -> None:
        if not hasattr(self, "leader"):
            return
        self.network.fates = iter(())
        self.leader.look()
        assert all(one.is_alive and one.is_open and not one.is_silent for one in self.servers)
        for _ in range(100):
            if not any([one.protects.recovery.recover_next() for one in self.servers]):
                break
        for one in self.servers:
            one.protects.other_servers.flush()
        assert all(one.is_whole for one in self.servers)
        self.leader.look()
        assert set(self.leader.states) == {LedState.WHOLE} and self.leader.lost_rows == 0
        self.check_stripes()
        # Writes that failed are made again, and are then there.
        for (table, row), record in list(self.pending.items()):
            split = self.stripes[table].split(torch.tensor([row]))
            for number, (positions, slots) in enumerate(split):
                if len(positions):
                    self.send(self.servers[number], {table: slots}, [record])
            self.acknowledged[table, row] = self.pending.pop((table, row))
        self.check_stripes()


def test_no_acknowledged_row_is_lost() -> None:
    run_state_machine_as_test(
        ParityMachine,
        settings=settings(max_examples=examples(100), stateful_step_count=20, deadline=None),
    )
