"""Keeps one server's rows and parity rows, and recovers those that it has lost.

A row is coded as its record and one more byte, which is 1 if the row was ever written. Parity is
computed of these bytes. So a recovered row is equal in each bit, and a row that was never written
is known as such.

A server that takes the place of a lost one knows no row at first. It recovers rows when they are
asked for, and all others in the background, a batch at a time. Each batch is consistent in itself:
the servers tell at which moment they have read their rows, and parity rows are returned as of these
moments, because their servers keep what came since (`Inbox`). So nobody waits for a recovery,
except for the rows that it has not reached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, NoReturn

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.parity.differences import (
    Added,
    Inbox,
    OfTable,
    Outbox,
    Unsettled,
    Writes,
)
from recpoint.embeddings.parity.frozen_while_lost import FrozenWhileLost
from recpoint.embeddings.parity.gathering import Gathering, Together, chosen_rows
from recpoint.embeddings.parity.own_tables import (
    Batch,
    Known,
    OwnTable,
    RowsOfTables,
    first_batch,
    places_of,
)
from recpoint.embeddings.parity.peers import (
    Differences,
    HasMembers,
    Members,
    Moment,
    OutOfStep,
    Peer,
    Sent,
    TableShare,
    TableSlots,
)
from recpoint.embeddings.parity.stripe_check import (
    Verdict,
    condensed,
    verdicts,
)
from recpoint.embeddings.parity.stripes import Stripes, TablesStripes
from recpoint.errors import HomeError
from recpoint.kernels import erasure, row_gather

__all__ = ["StripeMember", "TableHere"]

#: How long the background waits for calls that ask for lost rows, before each batch. It waits no
#: longer, because such calls may come one after another.
_GIVE_WAY_SECONDS: Final = 0.05
#: How often a batch is tried again because servers had moved on meanwhile.
_TRIES: Final = 20


class TableHere(NamedTuple):
    """A table: its rows on all servers, bytes of a row, and how often it was cleared."""

    rows: int
    record_bytes: int
    generation: int


class StripeMember:
    """One server's part in the stripes of a training.

    All calls may come from several threads at the same time, except that writes of one table come
    one after another.

    Args:
        number: of this server.
        incarnation: of this server.
        home: holds rows and parity rows.
        peers: number and incarnation of each other server, with what calls it.
        together: makes calls to several peers.

    Attributes:
        difference_rows: rows of all differences that this server has sent or will send.
        is_open: whether trainers are answered: the leader has said which tables there are.
    """

    def __init__(
        self,
        number: int,
        incarnation: int,
        home: Home,
        peers: Mapping[int, tuple[int, Peer]],
        *,
        together: Together,
    ) -> None:
        self._number = number
        self._incarnation = incarnation
        self._home = home
        self._together = together
        self.difference_rows = 0
        self.is_open = False
        self._tables: dict[str, OwnTable] = {}
        self._writes = Writes()
        self._peers: dict[int, Peer] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._forgotten: set[tuple[int, int]] = set()  # number and incarnation of lost servers
        # Held while rows of this server are read or changed; never during a call to a peer.
        self._lock = threading.Lock()
        # Held while lost rows are recovered. The calls to peers that are made meanwhile never need
        # the lock of this kind of the other server, so none waits for the other.
        self._recovering = threading.Lock()
        self._asking = 0  # calls that wait for lost rows; guarded by `_lock`
        self._nobody_asks = threading.Event()
        self._nobody_asks.set()
        for server, (its, peer) in peers.items():
            self.join(server, its, peer)

    # The other servers.

    def join(self, server: int, incarnation: int, peer: Peer) -> None:
        """Begin to exchange messages with a server.

        A second call changes nothing, and neither does a late one, for a server that is lost.
        """
        with self._lock:
            outbox = self._outboxes.get(server)
            is_known = outbox is not None and outbox.incarnation == incarnation
            if is_known or (server, incarnation) in self._forgotten:
                unused: Peer | None = peer
            else:
                unused = self._peers.get(server)
                self._peers[server] = peer
                self._outboxes[server] = Outbox(incarnation)
                self._inboxes[server] = Inbox(incarnation)
        if unused is not None:
            unused.close()

    def lose(self, server: int, incarnation: int) -> Unsettled | None:
        """Take no message from a server any more, and send none.

        A second call changes nothing, and neither does a late one, when a successor has joined.

        Args:
            server: number of the lost server.
            incarnation: of the lost server.

        Returns:
            What it had sent; None: it has never joined, or its messages were taken back already.
        """
        with self._lock:
            self._forgotten.add((server, incarnation))
            inbox = self._inboxes.get(server)
            if inbox is None or inbox.incarnation != incarnation:
                return None
            peer = self._peers.pop(server, None)
            outbox = self._outboxes.pop(server, None)
            if outbox is not None:
                for sent, _ in outbox.waiting:
                    self._writes.arrived(sent.write, server)
                outbox.waiting.clear()
            unsettled = inbox.unsettled(self._number, self._incarnation)
        if peer is not None:
            peer.close()
        return unsettled

    def take_back(
        self, server: int, incarnation: int, numbers: Sequence[int], *, are_all: bool = True
    ) -> None:
        """Take back messages of a lost server, forget all others. A second call does nothing.

        Args:
            server: number of the lost server.
            incarnation: of the lost server.
            numbers: of the messages.
            are_all: whether no call with more numbers follows.

        Raises:
            OutOfStep: `lose` was not called.
        """
        with self._lock:
            inbox = self._inboxes.get(server)
            if inbox is None or inbox.incarnation != incarnation:
                return
            if server in self._peers:
                raise OutOfStep(f"server {server + 1} is not lost")
            if inbox.half_added is not None:  # it has not arrived
                inbox.half_added.take_back(self._add)
                inbox.half_added = None
            for number in numbers:
                added = inbox.kept(number)
                if added is not None:
                    added.take_back(self._add)
                    inbox.forget(number)
            if are_all:
                del self._inboxes[server]

    def close(self) -> None:
        """Give all connections up."""
        with self._lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()

    # Tables.

    def add_table(
        self,
        table: str,
        stripes: Stripes,
        record_bytes: int,
        *,
        generation: int = 0,
        is_lost: bool = False,
    ) -> None:
        """Make room for a table's parity rows; its rows have theirs. A second call does nothing.

        Args:
            table: name of the table.
            stripes: where its rows and parity rows are.
            record_bytes: of a row.
            generation: how often the other servers have cleared the table.
            is_lost: whether this server has lost the table's rows.

        Raises:
            OutOfStep: the server is not open yet. Only the leader knows whether a successor has
                lost the table's rows, and it says so before it opens the server.
        """
        with self._lock:
            if table in self._tables:
                return
            if not (is_lost or self.is_open):
                raise OutOfStep(f"server {self._number + 1} has not joined the other servers yet")
            made = OwnTable(table, stripes, record_bytes, self._number)
            made.generation = generation
            if is_lost:
                made.lose_all()
            if made.parity_slots:
                self._home.add_table(
                    made.parity_name, rows=made.parity_slots, record_bytes=made.coded_bytes
                )
            self._tables[table] = made

    def clear(self, table: str, generation: int) -> None:
        """Forget all rows and parity rows of a table.

        Messages that were sent before change nothing any more.

        Args:
            table: name of the table.
            generation: how often the table has been cleared, including this time.
        """
        with self._lock:
            here = self._tables[table]
            here.generation = generation
            here.is_known = here.is_parity_known = None
            self._home.clear(table)
            if here.parity_slots:
                self._home.clear(here.parity_name)

    @property
    def tables(self) -> dict[str, TableHere]:
        """All tables, by name."""
        with self._lock:
            return {
                name: TableHere(one.stripes.rows, one.record_bytes, one.generation)
                for name, one in self._tables.items()
            }

    @property
    def known(self) -> Known:
        """How much of all rows and parity rows this server knows."""
        with self._lock:
            counts = [table.known for table in self._tables.values()]
        return Known(sum(one.known for one in counts), sum(one.all for one in counts))

    @property
    def unreached(self) -> tuple[int, ...]:
        """Incarnations of servers that have just answered neither a call nor a greeting."""
        with self._lock:
            peers = [(self._outboxes[to].incarnation, peer) for to, peer in self._peers.items()]
        return tuple(incarnation for incarnation, peer in peers if peer.is_unreached)

    # Rows.

    def write(self, changed: Sequence[TableRows]) -> None:
        """Store rows, and queue their differences. `flush` returns once these have arrived.

        Args:
            changed: rows of each table, by their slots. `recover` has been called for them.
        """
        by_length: dict[int, list[TableRows]] = {}
        for one in changed:
            by_length.setdefault(one.records.shape[1], []).append(one)
        with self._lock:
            for of_one_length in by_length.values():
                self._write(of_one_length)

    def _write(self, changed: Sequence[TableRows]) -> None:
        """Store rows of tables whose rows have one length, and queue their differences."""
        messages = self._messages(changed)
        written = 0
        try:
            for table, slots, records in changed:
                self._home.write_back(table, slots, records, batch=0)
                written += 1
        finally:
            # This needs no memory to speak of, so rows and messages stay together.
            if written < len(changed):
                names = {one.table for one in changed[:written]}
                messages = {to: _of_tables(given, names) for to, given in messages.items()}
            self._queue({to: given for to, given in messages.items() if given.tables})

    def _messages(self, changed: Sequence[TableRows]) -> dict[int, Differences]:
        """Return a message for each server that has parity of rows that are about to be stored.

        Rows that do not change are left out: a call that is made again has no others.
        """
        tables = [self._tables[one.table] for one in changed]
        counts = [len(one.ids) for one in changed]
        slots = torch.cat([one.ids for one in changed])
        records = torch.cat([one.records for one in changed])
        change = self._coded_rows(tables, slots, counts)
        change[:, :-1] ^= records
        change[:, -1] ^= 1
        of = places_of(counts)
        is_changed = torch.from_numpy(change.numpy().max(axis=1, initial=0) > 0)
        if not bool(is_changed.all()):
            slots, change, of = slots[is_changed], change[is_changed], of[is_changed]
        form = TablesStripes([table.stripes for table in tables])
        stripes, positions = form.members_at(of, self._number, slots)
        if form.parity > 1:
            change = torch.cat([change, _times_coefficients(change, positions)])
        messages: dict[int, Differences] = {}
        for receiver, of_tables, places, chosen in form.receivers(of, stripes):
            if receiver in self._outboxes:
                shares = [
                    TableShare(table.name, table.generation, count)
                    for table, count in zip(tables, of_tables, strict=True)
                    if count
                ]
                rows = chosen_rows(change, chosen)
                messages[receiver] = Differences(tables=shares, slots=places, rows=rows)
        return messages

    def _queue(self, messages: Mapping[int, Differences]) -> None:
        write = self._writes.begin(messages)
        shares = {
            receiver: (self._outboxes[receiver].incarnation, self._outboxes[receiver].last + 1)
            for receiver in messages
        }
        for receiver, given in messages.items():
            sent = Sent(
                source=self._number,
                incarnation=self._incarnation,
                number=shares[receiver][1],
                write=write,
                shares=shares,
            )
            self._outboxes[receiver].add(sent, given)
            self.difference_rows += len(given.slots)

    def freeze(self, table: str, slots: range) -> FrozenRows:
        """Freeze rows, also lost ones: they are recovered before they are read.

        Args:
            table: name of the table.
            slots: the slots that will be read.
        """
        here = self._table(table)
        with self._lock:
            reader = self._home.freeze(table, slots)
            if here.is_known is None:
                return reader
            frozen = FrozenWhileLost(
                reader,
                here.is_known.clone(),
                here.record_bytes,
                recover=lambda ids: self.recover([TableSlots(table, ids)]),
                at_release=lambda: self._forget_frozen(here, frozen),
            )
            here.frozen.append(frozen)
            return frozen

    def _forget_frozen(self, table: OwnTable, frozen: FrozenWhileLost) -> None:
        with self._lock:
            if frozen in table.frozen:
                table.frozen.remove(frozen)

    def flush(self) -> None:
        """Send all queued messages, and wait until they have arrived.

        Raises:
            ServerLost, OutOfStep: a server does not take its messages. They stay queued.
        """
        with self._lock:
            waiting = [server for server, outbox in self._outboxes.items() if outbox.waiting]
        self._together([partial(self._send_all, one) for one in waiting])

    def _send_all(self, server: int) -> None:
        with self._lock:
            outbox, peer = self._outboxes.get(server), self._peers.get(server)
        if outbox is None or peer is None:
            return
        with outbox.sending:
            while True:
                with self._lock:
                    messages = outbox.oldest(self._writes)
                if not messages:
                    return
                peer.differences(messages)
                with self._lock:
                    if outbox.waiting:  # else the server was declared lost meanwhile
                        for sent, _ in messages:
                            outbox.waiting.popleft()
                            self._writes.arrived(sent.write, server)

    def receive(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        """Apply differences of another server to parity rows, once; see `Peer.differences`."""
        with self._lock:
            for sent, given in messages:
                self._receive(sent, given)

    def _receive(self, sent: Sent, given: Differences) -> None:
        inbox = self._inboxes.get(sent.source)
        if inbox is None or sent.source not in self._peers:
            raise OutOfStep(f"server {sent.source + 1} has not joined")
        if not inbox.is_new(sent):
            return
        added = inbox.half_added or self._copied(given)
        try:
            added.add(self._add)
        except BaseException:
            inbox.half_added = added  # and goes on when the message comes again
            raise
        inbox.add(sent, added)

    def _copied(self, given: Differences) -> Added:
        """Return differences that can be kept: the caller's memory is used again.

        Raises:
            OutOfStep, ValueError: see `_require_differences`.
        """
        self._require_differences(given)
        # One text for a table's name, however many messages are kept.
        shares = [share._replace(table=self._tables[share.table].name) for share in given.tables]
        return Added(Differences(tables=shares, rows=given.rows.clone(), slots=given.slots.clone()))

    def _require_differences(self, given: Differences) -> None:
        """Refuse differences that do not fit this server's parity rows.

        Raises:
            OutOfStep: a table is not known yet.
            ValueError: says what is expected.
        """
        count = sum(share.rows for share in given.tables)
        if not len(given.slots) == len(given.rows) == count:
            raise ValueError(f"differences: {len(given.slots)} slots, expected {count}")
        if len({share.table for share in given.tables}) != len(given.tables):
            raise ValueError("differences: of one table twice, expected each table at most once")
        added = Added(given)
        for number in range(added.count):
            part = added.part(number)
            here = self._tables.get(part.table)
            if here is None:
                raise OutOfStep(f"no table {part.table!r:.100} yet")
            _require_slots(part.slots, here.parity_slots)
            if part.rows.shape[1] != here.coded_bytes:
                raise ValueError(
                    f"differences: {part.rows.shape[1]} bytes a row, expected {here.coded_bytes}"
                )

    def _add(self, part: OfTable) -> None:
        """Add rows to those parity rows that are known; the others take them up when they are."""
        here = self._tables[part.table]
        if part.generation != here.generation:
            return  # of before the table was cleared
        slots, rows = part.slots, part.rows
        if here.is_parity_known is not None:
            chosen = here.is_parity_known[slots].nonzero().view(-1)
            slots, rows = slots[chosen], rows[chosen]
        if len(slots):
            self._home.exclusive_or(here.parity_name, slots, rows, batch=0)

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        """Return rows of this server to another one; see `Peer.rows`."""
        tables = self._tables_of(wanted)
        slots = torch.cat([one.slots for one in wanted])
        for table, one in zip(tables, wanted, strict=True):
            _require_slots(one.slots, table.slots)
        if recover:
            self.recover(wanted)
        with self._lock:
            coded = self._coded_rows(tables, slots, [len(one.slots) for one in wanted])
            known = [table.are_known(one.slots) for table, one in zip(tables, wanted, strict=True)]
            found = self._members(tables, torch.cat(known), coded)
        self.flush()  # so all messages up to the moment have arrived before the caller learns of it
        return replace(found, rows=condensed(found.rows)) if is_condensed else found

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        """Return parity rows of this server to another one; see `Peer.parity_rows`."""
        tables = self._tables_of(wanted)
        for table, one in zip(tables, wanted, strict=True):
            _require_slots(one.slots, table.parity_slots)
        counts = [len(one.slots) for one in wanted]
        size = sum(counts), tables[0].coded_bytes
        rows = torch.zeros(size, dtype=torch.uint8, device="cpu")
        known = []
        with self._lock:
            for table, one, part in zip(tables, wanted, rows.split(counts), strict=True):
                if len(part):
                    self._home.fetch(table.parity_name, one.slots, part)
                    self._fold(table, one.slots, part, at)
                known.append(table.are_parity_known(one.slots))
            found = self._members(tables, torch.cat(known), rows)
        return replace(found, rows=condensed(found.rows)) if is_condensed else found

    def _tables_of(self, wanted: Sequence[TableSlots]) -> list[OwnTable]:
        """Return the tables of a call.

        Raises:
            OutOfStep: one is not known yet.
            ValueError: a table comes twice, there is none, or rows differ in their length.
        """
        tables = [self._table(one.table) for one in wanted]
        lengths = {table.coded_bytes for table in tables}
        if len(lengths) != 1 or len({one.table for one in wanted}) != len(wanted):
            raise ValueError("tables: expected different ones, whose rows have one length")
        return tables

    def _members(self, tables: Sequence[OwnTable], is_known: Tensor, rows: Tensor) -> Members:
        return Members(
            is_known=is_known,
            rows=rows,
            moment=self._moment(),
            generations=[table.generation for table in tables],
        )

    def _moment(self) -> Moment:
        return self._incarnation, {
            to: (outbox.incarnation, outbox.last) for to, outbox in self._outboxes.items()
        }

    def _fold(
        self, table: OwnTable, slots: Tensor, rows: Tensor, at: Mapping[int, tuple[int, int]]
    ) -> None:
        """Add to parity rows the differences that came after moments of their sources.

        A parity row that has these differences already is then as it was at the moments, because
        a XOR a is zero. One that was computed from rows of the moments is then as it is now.
        """
        for source, (incarnation, number) in at.items():
            inbox = self._inboxes.get(source)
            if inbox is None:
                raise OutOfStep(f"server {source + 1} has not joined")
            for added in inbox.after(incarnation, number):
                later = added.of_table(table.name, table.generation)
                if later is None:
                    continue
                place = torch.searchsorted(slots, later.slots).clamp_(max=max(0, len(slots) - 1))
                both = (
                    (slots[place] == later.slots).nonzero().view(-1)
                    if len(slots)
                    else slots.new_empty(0)
                )
                if len(both):
                    erasure.apply(rows, place[both], later.rows[both])

    # Recovery.

    def recover(self, wanted: Sequence[TableSlots]) -> None:
        """Recover those of these rows that are lost, from the other servers.

        Args:
            wanted: rows of any tables, each at most once.

        Raises:
            ServerLost: more servers are lost than parity makes up for, or one does not answer.
            OutOfStep: servers have moved on; the call may be repeated.
        """
        lost = [
            (here, one.slots)
            for here, one in ((self._table(one.table), one) for one in wanted)
            if here.is_known is not None
        ]
        for here, slots in lost:
            _require_slots(slots, here.slots)
        if not self._missing(lost):
            return  # without a wait for what is being recovered
        with self._lock:
            self._asking += 1
            self._nobody_asks.clear()
        try:
            self._recover_all(lost)
        finally:
            with self._lock:
                self._asking -= 1
                if not self._asking:
                    self._nobody_asks.set()

    def _recover_all(self, wanted: RowsOfTables) -> None:
        is_more = True
        while is_more:
            with self._recovering:  # for a batch, so that others get their turns
                missing = self._missing(wanted)
                is_more = bool(missing)
                if is_more:
                    _repeated(partial(self._recover, missing))

    def _missing(self, wanted: RowsOfTables) -> RowsOfTables:
        """Return those of these rows that are lost, as many as one batch has."""
        with self._lock:
            missing = [
                (here, slots[:0] if here.is_known is None else slots[~here.is_known[slots]])
                for here, slots in wanted
            ]
        return first_batch(missing)

    def recover_next(self) -> bool:
        """Recover one batch of lost rows or lost parity rows; returns False if none is lost.

        It lets those go first who ask for lost rows, for a while.

        Raises:
            ServerLost, OutOfStep: as for `recover`. The call may be repeated.
        """
        self._nobody_asks.wait(_GIVE_WAY_SECONDS)
        with self._lock:
            tables = list(self._tables.values())
            missing = first_batch((here, here.first_missing()) for here in tables)
        if missing:
            self._recover_all(missing)
            return True
        with self._lock:
            missing = first_batch((here, here.first_missing_parity()) for here in tables)
        if missing:
            _repeated(partial(self._recover_parity, missing))
        return bool(missing)

    def _recover(self, missing: RowsOfTables) -> None:
        """Recover rows that are lost. The caller holds `_recovering`."""
        generations = [table.generation for table, _ in missing]
        coded = self._decoded(missing)
        rows = coded.split([len(slots) for _, slots in missing])
        with self._lock:
            for (table, slots), part, generation in zip(missing, rows, generations, strict=True):
                if table.is_known is None or table.generation != generation:
                    continue  # the table was cleared
                if bool((part[:, -1] > 1).any()):
                    self._refuse_misfit(table)
                chosen = part[:, -1].nonzero().view(-1)  # that were ever written
                found, records = slots[chosen], chosen_rows(part[:, :-1].contiguous(), chosen)
                self._home.write_back(table.name, found, records, batch=0)
                for frozen in table.frozen:
                    frozen.reveal(found, records)
                table.set_known(slots)

    def _refuse_misfit(self, table: OwnTable) -> NoReturn:
        raise HomeError(
            f"table {table.name!r} on embedding server {self._number + 1}",
            found="rows and parity that do not fit each other",
            expected="parity that was computed of these rows",
            next_step="restore the last checkpoint, and look at the memory of the machines",
        )

    def _decoded(self, missing: RowsOfTables) -> Tensor:
        """Return lost rows of this server, coded.

        The server with the first parity row of a stripe decodes its lost row. So each server
        receives a share of the rows that are needed, and this one only those that it has lost.
        """
        living = self._living()
        rows = Batch(missing)
        _require_all(len(living) + 1, rows.stripes.servers)
        stripes, _ = rows.stripes.members_at(rows.of, self._number, rows.slots)
        decodes, _ = rows.stripes.parity_in(rows.of, stripes, 0)
        chosen_of, calls = [], []
        for one, peer in living:
            chosen = (decodes == one).nonzero().view(-1)
            if len(chosen):
                chosen_of.append(chosen)
                _, wanted = rows.wanted(rows.of[chosen], rows.slots[chosen])
                calls.append(partial(peer.decoded, wanted, self._number))
        size = len(rows.slots), rows.tables[0].coded_bytes
        out = torch.empty(size, dtype=torch.uint8, device="cpu")
        for chosen, found in zip(chosen_of, self._together(calls), strict=True):
            row_gather.scatter(found.rows, chosen, out)
        return out

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        """Compute rows that a server has lost; see `Peer.decoded`."""
        tables = self._tables_of(wanted)
        rows = Batch([(here, one.slots) for here, one in zip(tables, wanted, strict=True)])
        form = rows.stripes
        # Once for all: if a server is lost meanwhile, its call fails, or tells a moment. If it were
        # left out, one parity row could have a message of it, and another one could not.
        sources = self._sources()
        _require_all(len(sources), form.servers)
        if not 0 <= lost < form.servers:
            raise ValueError(f"server {lost}, expected one of {form.servers}")
        for here, one in zip(tables, wanted, strict=True):
            _require_slots(one.slots, len(here.stripes.slots_of(lost, range(here.stripes.rows))))
        stripes, own = form.members_at(rows.of, lost, rows.slots)
        del sources[lost]  # it has not these rows
        gathering = Gathering(rows, stripes, sources, self._together, recover=False)
        found = gathering.lost_rows(own, lost)
        gathering.require_one_generation()
        with self._lock:
            moment = self._moment()
        return Members(
            is_known=torch.ones(len(rows.slots), dtype=torch.bool, device="cpu"),
            rows=found,
            moment=moment,
            generations=[here.generation for here in tables],
        )

    def _recover_parity(self, missing: RowsOfTables) -> None:
        """Compute parity rows that are lost. One thread at a time does this."""
        rows = Batch(missing)
        stripes, numbers = rows.stripes.parity_at(rows.of, self._number, rows.slots)
        generations = [table.generation for table, _ in missing]
        # Lost rows of these stripes are recovered at their servers first.
        gathering = Gathering(rows, stripes, self._sources(), self._together, recover=True)
        out = gathering.parity_rows(numbers)
        at = gathering.seen_by(self._number)
        parts = out.split([len(slots) for _, slots in missing])
        with self._lock:
            for (table, slots), part, generation in zip(missing, parts, generations, strict=True):
                if table.is_parity_known is None or table.generation != generation:
                    continue  # the table was cleared
                self._fold(table, slots, part, at)
                self._home.write_back(table.parity_name, slots, part, batch=0)
                table.set_parity_known(slots)

    def _living(self) -> list[tuple[int, Peer]]:
        with self._lock:
            return sorted(self._peers.items())

    def _sources(self) -> dict[int, tuple[int, HasMembers]]:
        """All servers that live, this one included: incarnation and rows, by number."""
        with self._lock:
            found: dict[int, tuple[int, HasMembers]] = {
                number: (self._outboxes[number].incarnation, peer)
                for number, peer in self._peers.items()
            }
        found[self._number] = self._incarnation, self
        return dict(sorted(found.items()))

    # Checks.

    def check(self, table: str, slots: Tensor) -> Tensor:
        """Compare stripes whose first parity row is here with this row, while training goes on.

        Args:
            table: name of the table.
            slots: of these parity rows, int64 [n], ascending.

        Returns:
            `Verdict`s, uint8 [n].

        Raises:
            ServerLost, OutOfStep: a server does not answer, or has moved on too often.
            ValueError: slots that have no first parity row.
        """
        here = self._table(table)
        _require_slots(slots, here.parity_slots)
        found = torch.full_like(slots, int(Verdict.UNKNOWN), dtype=torch.uint8)
        for first in range(0, len(slots), here.batch_rows):
            part = slice(first, first + here.batch_rows)
            _repeated(partial(self._check, here, slots[part], found[part]))
        return found

    def _check(self, table: OwnTable, slots: Tensor, out: Tensor) -> None:
        rows = Batch([(table, slots)])
        stripes, numbers = rows.stripes.parity_at(rows.of, self._number, slots)
        if bool(numbers.any()):
            raise ValueError("slots: of a second parity row, expected those of a first one")
        gathering = Gathering(
            rows, stripes, self._sources(), self._together, recover=False, is_condensed=True
        )
        for number in range(table.stripes.parity):
            gathering.ask_for_parity(number)
        gathering.require_one_generation()
        members, is_known = gathering.members()
        are_all_known = is_known.all(0)
        out[are_all_known] = verdicts(members.unbind(), table.stripes.data)[are_all_known]

    # What the home has.

    def _coded_rows(
        self, tables: Sequence[OwnTable], slots: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Return rows of tables whose rows have one length; `counts` has how many of each."""
        size = len(slots), tables[0].record_bytes
        records = torch.empty(size, dtype=torch.uint8, device="cpu")
        parts = zip(tables, slots.split(counts), records.split(counts), strict=True)
        # Not `fetch_all`: it may wait for threads that read for trainers, and others wait for this.
        has = torch.cat([self._home.fetch(table.name, *part) for table, *part in parts])
        coded = torch.empty(len(slots), size[1] + 1, dtype=torch.uint8, device="cpu")
        if not bool(has.all()):
            records[~has] = 0  # a fetch leaves them alone
        coded[:, -1] = has
        coded[:, :-1] = records
        return coded

    def _table(self, table: str) -> OwnTable:
        with self._lock:
            here = self._tables.get(table)
        if here is None:
            raise OutOfStep(f"no table {table!r:.100} yet")
        return here


def _require_slots(slots: Tensor, count: int) -> None:
    """Refuse slots that are not ascending, or outside 0 … count - 1.

    Raises:
        ValueError: says what is expected.
    """
    if row_gather.first_unordered(slots, 0, count) >= 0:
        raise ValueError(f"slots: not ascending, or one outside 0 … {count - 1}")


def _require_all(count: int, servers: int) -> None:
    """Refuse to decode before all servers have joined.

    Raises:
        OutOfStep: messages of a lost server may be taken back at some servers only.
    """
    if count < servers:
        raise OutOfStep("a server that was lost has no successor yet")


def _of_tables(given: Differences, names: Container[str]) -> Differences:
    """Return the differences of some tables, which come before those of all others."""
    shares = [share for share in given.tables if share.table in names]
    count = sum(share.rows for share in shares)
    return Differences(tables=shares, slots=given.slots[:count], rows=given.rows[:count])


def _times_coefficients(change: Tensor, positions: Tensor) -> Tensor:
    """Return what changes of rows at positions of their stripes add to second parity rows."""
    found = torch.zeros_like(change)
    rows = torch.arange(len(change), dtype=torch.int64, device="cpu")
    erasure.apply(found, rows, change, positions)
    return found


def _repeated(act: Callable[[], None]) -> None:
    """Call again, as often as servers have moved on meanwhile.

    Raises:
        OutOfStep: too often.
    """
    for left in reversed(range(_TRIES)):
        try:
            act()
            return
        except OutOfStep:
            if not left:
                raise
