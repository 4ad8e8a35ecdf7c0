"""Sends one server's differences to the other servers, and applies theirs to its parity rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from recpoint.embeddings.parity.differences import Inbox, OfTable, Outbox, Unsettled, Writes
from recpoint.embeddings.parity.gathering import Together
from recpoint.embeddings.parity.own_rows import OwnRows
from recpoint.embeddings.parity.own_tables import OwnTable
from recpoint.embeddings.parity.peers import (
    Differences,
    HasMembers,
    Moment,
    OutOfStep,
    Peer,
    Sent,
)
from recpoint.kernels import erasure

__all__ = ["OtherServers"]


class OtherServers:
    """The other servers of a training, as one server knows them.

    Args:
        rows: of this server. Its lock also guards what this object remembers.
        incarnation: of this server.
        peers: number and incarnation of each other server, with what calls it.
        together: makes calls to several servers.

    Attributes:
        difference_rows: rows of all differences that this server has sent or will send.
    """

    def __init__(
        self,
        rows: OwnRows,
        incarnation: int,
        peers: Mapping[int, tuple[int, Peer]],
        *,
        together: Together,
    ) -> None:
        self._rows = rows
        self._incarnation = incarnation
        self._together = together
        self.difference_rows = 0
        self._writes = Writes()
        self._peers: dict[int, Peer] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._forgotten: set[tuple[int, int]] = set()  # number and incarnation of lost servers
        for server, (peer_incarnation, peer) in peers.items():
            self.join(server, peer_incarnation, peer)

    def join(self, server: int, incarnation: int, peer: Peer) -> None:
        """Begin to exchange messages with a server.

        A second call changes nothing, and neither does a late one, for a server that is lost.
        """
        with self._rows.lock:
            outbox = self._outboxes.get(server)
            has_joined = outbox is not None and outbox.incarnation == incarnation
            if has_joined or (server, incarnation) in self._forgotten:
                unused_peer: Peer | None = peer
            else:
                unused_peer = self._peers.get(server)
                self._peers[server] = peer
                self._outboxes[server] = Outbox(incarnation)
                self._inboxes[server] = Inbox(incarnation)
        if unused_peer is not None:
            unused_peer.close()

    def lose(self, server: int, incarnation: int) -> Unsettled | None:
        """Take no message from a server any more, and send none.

        A second call changes nothing, and neither does a late one, when a successor has joined.

        Args:
            server: number of the lost server.
            incarnation: of the lost server.

        Returns:
            What it had sent; None: it has never joined, or its messages were taken back already.
        """
        with self._rows.lock:
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
            unsettled = inbox.unsettled(self._rows.number, self._incarnation)
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
        with self._rows.lock:
            inbox = self._inboxes.get(server)
            if inbox is None or inbox.incarnation != incarnation:
                return
            if server in self._peers:
                raise OutOfStep(f"server {server + 1} is not lost")
            if inbox.half_added is not None:  # it has not arrived
                inbox.half_added.take_back(self._rows.add_differences)
                inbox.half_added = None
            for number in numbers:
                added = inbox.kept(number)
                if added is not None:
                    added.take_back(self._rows.add_differences)
                    inbox.forget(number)
            if are_all:
                del self._inboxes[server]

    def close(self) -> None:
        """Give all connections up."""
        with self._rows.lock:
            peers = list(self._peers.values())
            self._peers.clear()
        for peer in peers:
            peer.close()

    @property
    def unreached(self) -> tuple[int, ...]:
        """Incarnations of servers that have just answered neither a call nor a greeting."""
        with self._rows.lock:
            peers = [
                (self._outboxes[server].incarnation, peer) for server, peer in self._peers.items()
            ]
        return tuple(incarnation for incarnation, peer in peers if peer.is_unreached)

    @property
    def living(self) -> list[tuple[int, Peer]]:
        """Number and peer of each server that has joined and is not lost, ascending."""
        with self._rows.lock:
            return sorted(self._peers.items())

    def sources(self, own_members: HasMembers) -> dict[int, tuple[int, HasMembers]]:
        """Return all servers that live, this one included: incarnation and rows, by number.

        Args:
            own_members: the rows of this server.
        """
        with self._rows.lock:
            sources: dict[int, tuple[int, HasMembers]] = {
                number: (self._outboxes[number].incarnation, peer)
                for number, peer in self._peers.items()
            }
        sources[self._rows.number] = self._incarnation, own_members
        return dict(sorted(sources.items()))

    def receives(self, server: int) -> bool:
        """Whether messages to a server are sent: it is not lost. The caller holds the lock."""
        return server in self._outboxes

    def queue(self, messages: Mapping[int, Differences]) -> None:
        """Queue the messages of one write, by their receivers; `flush` sends them.

        The caller holds the lock since it has stored the rows.
        """
        write = self._writes.begin(messages)
        shares = {
            receiver: (self._outboxes[receiver].incarnation, self._outboxes[receiver].last + 1)
            for receiver in messages
        }
        for receiver, differences in messages.items():
            sent = Sent(
                source=self._rows.number,
                incarnation=self._incarnation,
                number=shares[receiver][1],
                write=write,
                shares=shares,
            )
            self._outboxes[receiver].add(sent, differences)
            self.difference_rows += len(differences.slots)

    @property
    def moment(self) -> Moment:
        """The moment of this server. The caller holds the lock since it has read rows."""
        return self._incarnation, {
            server: (outbox.incarnation, outbox.last) for server, outbox in self._outboxes.items()
        }

    def flush(self) -> None:
        """Send all queued messages, and wait until they have arrived.

        Raises:
            ServerLost, OutOfStep: a server does not take its messages. They stay queued.
        """
        with self._rows.lock:
            receivers = [server for server, outbox in self._outboxes.items() if outbox.waiting]
        self._together([partial(self._send_all, receiver) for receiver in receivers])

    def _send_all(self, receiver: int) -> None:
        with self._rows.lock:
            outbox, peer = self._outboxes.get(receiver), self._peers.get(receiver)
        if outbox is None or peer is None:
            return
        with outbox.sending:
            while True:
                with self._rows.lock:
                    messages = outbox.oldest(self._writes)
                if not messages:
                    return
                peer.differences(messages)
                with self._rows.lock:
                    if outbox.waiting:  # else the server was declared lost meanwhile
                        for sent, _ in messages:
                            outbox.waiting.popleft()
                            self._writes.arrived(sent.write, receiver)

    def receive(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        """Apply differences of another server to parity rows, once; see `Peer.differences`."""
        with self._rows.lock:
            for sent, differences in messages:
                self._receive(sent, differences)

    def _receive(self, sent: Sent, differences: Differences) -> None:
        inbox = self._inboxes.get(sent.source)
        if inbox is None or sent.source not in self._peers:
            raise OutOfStep(f"server {sent.source + 1} has not joined")
        if not inbox.is_new(sent):
            return
        added = inbox.half_added or self._rows.copied(differences)
        try:
            added.add(self._rows.add_differences)
        except BaseException:
            inbox.half_added = added  # and goes on when the message comes again
            raise
        inbox.add(sent, added)

    def add_later(
        self,
        table: OwnTable,
        slots: Tensor,
        rows: Tensor,
        moments: Mapping[int, tuple[int, int]],
    ) -> None:
        """Add to parity rows the differences that came after moments of their sources.

        A parity row that has these differences already is then as it was at the moments, because
        a XOR a is zero. One that was computed from rows of the moments is then as it is now. The
        caller holds the lock of the rows.

        Args:
            table: the table.
            slots: of the parity rows, int64 [n], ascending.
            rows: the parity rows, uint8 [n, coded_bytes].
            moments: source -> its incarnation, and the number of its last message that counts.

        Raises:
            OutOfStep: a source has not joined, or not all messages since its moment are kept.
        """
        for source, (incarnation, number) in moments.items():
            inbox = self._inboxes.get(source)
            if inbox is None:
                raise OutOfStep(f"server {source + 1} has not joined")
            for added in inbox.after(incarnation, number):
                later_table = added.of_table(table.name, table.generation)
                if later_table is not None and len(slots):
                    _add_matching(later_table, slots, rows)


def _add_matching(later: OfTable, slots: Tensor, rows: Tensor) -> None:
    """Add differences of those parity rows that are in `rows`, by their slots, one or more."""
    places = torch.searchsorted(slots, later.slots).clamp_(max=len(slots) - 1)
    matching = (slots[places] == later.slots).nonzero().view(-1)
    if len(matching):
        erasure.apply(rows, places[matching], later.rows[matching])
