"""Keeps parity of one server's rows: a server's part in the stripes of a training.

`StripeMember` stores rows and queues their differences, under one lock, so rows and messages never
part. It reads rows and parity rows for other servers, with the moment of each answer, and compares
stripes. Its `other_servers` sends the differences, and applies theirs. Its `recovery`
recovers what the server has lost.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.parity.frozen_while_lost import FrozenWhileLost
from recpoint.embeddings.parity.gathering import Gathering, Together, chosen_rows
from recpoint.embeddings.parity.other_servers import OtherServers
from recpoint.embeddings.parity.own_rows import OwnRows, require_slots
from recpoint.embeddings.parity.own_tables import Batch, Known, OwnTable, RowsOfTables, places_of
from recpoint.embeddings.parity.peers import (
    Differences,
    HasMembers,
    Members,
    OutOfStep,
    Peer,
    TableShare,
    TableSlots,
)
from recpoint.embeddings.parity.recover import Recovery, in_step
from recpoint.embeddings.parity.stripe_check import StripeVerdict, condensed, verdicts
from recpoint.embeddings.parity.stripes import Stripes, TablesStripes
from recpoint.kernels import erasure

__all__ = ["ProtectedTable", "StripeMember"]


class ProtectedTable(NamedTuple):
    """A table: its rows on all servers, bytes of a row, and how often it was cleared."""

    rows: int
    record_bytes: int
    generation: int


class StripeMember(HasMembers):
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
        other_servers: the other servers.
        recovery: of what this server has lost.
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
        self._together = together
        self._rows = OwnRows(number, home)
        self.other_servers = OtherServers(self._rows, incarnation, peers, together=together)
        self.recovery = Recovery(self._rows, self.other_servers, self, together=together)
        self.is_open = False

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
        with self._rows.lock:
            if self._rows.has_table(table):
                return
            if not (is_lost or self.is_open):
                number = self._rows.number
                raise OutOfStep(f"server {number + 1} has not joined the other servers yet")
            own_table = OwnTable(table, stripes, record_bytes, self._rows.number)
            own_table.generation = generation
            if is_lost:
                own_table.lose_all()
            self._rows.add_table(own_table)

    def clear(self, table: str, generation: int) -> None:
        """Forget all rows and parity rows of a table.

        Messages that were sent before change nothing any more.

        Args:
            table: name of the table.
            generation: how often the table has been cleared, including this time.
        """
        with self._rows.lock:
            self._rows.clear(table, generation)

    @property
    def tables(self) -> dict[str, ProtectedTable]:
        """All tables, by name."""
        with self._rows.lock:
            return {
                table.name: ProtectedTable(table.stripes.rows, table.record_bytes, table.generation)
                for table in self._rows.tables
            }

    @property
    def known(self) -> Known:
        """How much of all rows and parity rows this server knows."""
        with self._rows.lock:
            counts = [table.known for table in self._rows.tables]
        return Known(sum(count.known for count in counts), sum(count.all for count in counts))

    def write(self, changed: Sequence[TableRows]) -> None:
        """Store rows, and queue their differences. `OtherServers.flush` sends these.

        Args:
            changed: rows of each table, by their slots. `Recovery.recover` has been called for
                them.
        """
        by_length: dict[int, list[TableRows]] = {}
        for rows in changed:
            by_length.setdefault(rows.records.shape[1], []).append(rows)
        with self._rows.lock:
            for of_one_length in by_length.values():
                self._write(of_one_length)

    def _write(self, changed: Sequence[TableRows]) -> None:
        """Store rows of tables whose rows have one length, and queue their differences."""
        messages = self._messages(changed)
        written = 0
        try:
            for table, slots, records in changed:
                self._rows.store(table, slots, records)
                written += 1
        finally:
            # This needs no memory to speak of, so rows and messages stay together.
            if written < len(changed):
                names = {rows.table for rows in changed[:written]}
                messages = {
                    receiver: _of_tables(differences, names)
                    for receiver, differences in messages.items()
                }
            self.other_servers.queue(
                {
                    receiver: differences
                    for receiver, differences in messages.items()
                    if differences.tables
                }
            )

    def _messages(self, changed: Sequence[TableRows]) -> dict[int, Differences]:
        """Return a message for each server that has parity of rows that are about to be stored.

        Rows that do not change are left out: a call that is made again has no others.
        """
        tables = [self._rows.of_name(rows.table) for rows in changed]
        counts = [len(rows.ids) for rows in changed]
        slots = torch.cat([rows.ids for rows in changed])
        records = torch.cat([rows.records for rows in changed])
        change = self._rows.coded(tables, slots, counts)
        change[:, :-1] ^= records
        change[:, -1] ^= 1
        table_places = places_of(counts)
        is_changed = torch.from_numpy(change.numpy().max(axis=1, initial=0) > 0)
        if not bool(is_changed.all()):
            slots, change, table_places = (
                slots[is_changed],
                change[is_changed],
                table_places[is_changed],
            )
        form = TablesStripes([table.stripes for table in tables])
        stripes, positions = form.members_at(table_places, self._rows.number, slots)
        if form.parity > 1:
            change = torch.cat([change, _times_coefficients(change, positions)])
        messages: dict[int, Differences] = {}
        for receiver, row_counts, parity_slots, chosen in form.receivers(table_places, stripes):
            if self.other_servers.receives(receiver):
                shares = [
                    TableShare(table.name, table.generation, count)
                    for table, count in zip(tables, row_counts, strict=True)
                    if count
                ]
                rows = chosen_rows(change, chosen)
                messages[receiver] = Differences(tables=shares, slots=parity_slots, rows=rows)
        return messages

    def freeze(self, table: str, slots: range) -> FrozenRows:
        """Freeze rows, also lost ones: they are recovered before they are read.

        Args:
            table: name of the table.
            slots: the slots that will be read.
        """
        own_table = self._rows.table(table)
        with self._rows.lock:
            reader = self._rows.freeze(table, slots)
            if own_table.is_known is None:
                return reader
            frozen = FrozenWhileLost(
                reader,
                own_table.is_known.clone(),
                own_table.record_bytes,
                recover=lambda ids: self.recovery.recover([TableSlots(table, ids)]),
                at_release=lambda: self._forget_frozen(own_table, frozen),
            )
            own_table.frozen.append(frozen)
            return frozen

    def _forget_frozen(self, table: OwnTable, frozen: FrozenWhileLost) -> None:
        with self._rows.lock:
            if frozen in table.frozen:
                table.frozen.remove(frozen)

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        """Return rows of this server to another one; see `Peer.rows`."""
        named = self._rows.same_length(wanted)
        for table, slots in named:
            require_slots(slots, table.slots)
        if recover:
            self.recovery.recover(wanted)
        tables = [table for table, _ in named]
        all_slots = torch.cat([slots for _, slots in named])
        with self._rows.lock:
            coded = self._rows.coded(tables, all_slots, [len(slots) for _, slots in named])
            is_known = torch.cat([table.are_known(slots) for table, slots in named])
            members = self._members(named, is_known, coded)
        # Deliver all queued messages first: the caller compares with this moment.
        self.other_servers.flush()
        return replace(members, rows=condensed(members.rows)) if is_condensed else members

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        """Return parity rows of this server to another one; see `Peer.parity_rows`."""
        named = self._rows.same_length(wanted)
        for table, slots in named:
            require_slots(slots, table.parity_slots)
        counts = [len(slots) for _, slots in named]
        size = sum(counts), named[0][0].coded_bytes
        rows = torch.zeros(size, dtype=torch.uint8, device="cpu")
        with self._rows.lock:
            for (table, slots), part in zip(named, rows.split(counts), strict=True):
                if len(part):
                    self._rows.read_parity(table, slots, part)
                    self.other_servers.add_later(table, slots, part, at)
            is_known = torch.cat([table.are_parity_known(slots) for table, slots in named])
            members = self._members(named, is_known, rows)
        return replace(members, rows=condensed(members.rows)) if is_condensed else members

    def _members(self, named: RowsOfTables, is_known: Tensor, rows: Tensor) -> Members:
        return Members(
            is_known=is_known,
            rows=rows,
            moment=self.other_servers.moment,
            generations=[table.generation for table, _ in named],
        )

    def check(self, table: str, slots: Tensor) -> Tensor:
        """Compare stripes whose first parity row is here with this row, while training goes on.

        Args:
            table: name of the table.
            slots: of these parity rows, int64 [n], ascending.

        Returns:
            `StripeVerdict`s, uint8 [n].

        Raises:
            ServerLost, OutOfStep: a server does not answer, or has moved on too often.
            ValueError: slots that have no first parity row.
        """
        own_table = self._rows.table(table)
        require_slots(slots, own_table.parity_slots)
        all_verdicts = torch.full_like(slots, int(StripeVerdict.UNKNOWN), dtype=torch.uint8)
        for first in range(0, len(slots), own_table.batch_rows):
            part = slice(first, first + own_table.batch_rows)
            in_step(partial(self._check, own_table, slots[part], all_verdicts[part]))
        return all_verdicts

    def _check(self, table: OwnTable, slots: Tensor, out: Tensor) -> None:
        rows = Batch([(table, slots)])
        stripes, numbers = rows.stripes.parity_at(rows.table_places, self._rows.number, slots)
        if bool(numbers.any()):
            raise ValueError("slots: of a second parity row, expected those of a first one")
        sources = self.other_servers.sources(self)
        gathering = Gathering(
            rows, stripes, sources, self._together, recover=False, is_condensed=True
        )
        for number in range(table.stripes.parity):
            gathering.ask_for_parity(number)
        gathering.require_one_generation()
        members, is_known = gathering.members()
        are_all_known = is_known.all(0)
        out[are_all_known] = verdicts(members.unbind(), table.stripes.data)[are_all_known]


def _of_tables(differences: Differences, names: Container[str]) -> Differences:
    """Return the differences of some tables, which come before those of all others."""
    shares = [share for share in differences.tables if share.table in names]
    count = sum(share.rows for share in shares)
    return Differences(
        tables=shares, slots=differences.slots[:count], rows=differences.rows[:count]
    )


def _times_coefficients(change: Tensor, positions: Tensor) -> Tensor:
    """Return what changes of rows at positions of their stripes add to second parity rows."""
    products = torch.zeros_like(change)
    rows = torch.arange(len(change), dtype=torch.int64, device="cpu")
    erasure.apply(products, rows, change, positions)
    return products
