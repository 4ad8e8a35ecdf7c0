"""Defines the messages of parity to an embedding server, and the server's answers.

First come those of the training's leader (`Leader` says in which order it sends them; trainers send
`AskKnown`, too), and then those of other servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from recpoint.embeddings.parity.differences import Unsettled
from recpoint.embeddings.parity.peers import MOST_TABLES, Differences, Moment, Sent, TableShare
from recpoint.embeddings.server.transport import (
    MOST_PARTS,
    MOST_REQUEST_BYTES,
    MOST_SERVERS,
    Done,
    Hosts,
    Message,
    Name,
    Number,
    RecordUse,
    RowMessage,
    SlotRows,
    TablesMessage,
)
from recpoint.format.records import Part

__all__ = [
    "AskKnown",
    "DecodeRows",
    "GetParityRows",
    "GetRows",
    "GiveUp",
    "JoinServer",
    "KnownRows",
    "ListTables",
    "LoseServer",
    "LossReport",
    "MembersNote",
    "OpenServer",
    "PeerAddress",
    "Protect",
    "SendDifferences",
    "SentNote",
    "TableForms",
    "TakeBack",
    "UnsettledNote",
]

#: Number of a server, its incarnation, and the number of a message of differences.
_Share: TypeAlias = tuple[Number, Number, Number]


class PeerAddress(Part):
    """Another server: its number and incarnation, and where it listens."""

    server: Number
    incarnation: Number
    host: Name
    port: Annotated[int, Field(ge=0, lt=1 << 16)]


class Protect(Message[Done]):
    """Has the server take part in parity.

    Attributes:
        number: of the server.
        data, parity: the form of a stripe.
        hosts: for each server the name of its host.
        peers: all other servers that live.
    """

    kind: Literal["protect"] = "protect"
    incarnation: Number
    number: Number
    data: Number
    parity: Number
    hosts: Hosts
    peers: Annotated[tuple[PeerAddress, ...], Field(max_length=MOST_SERVERS)]


class JoinServer(Message[Done]):
    """Has the server exchange messages with another one."""

    kind: Literal["join"] = "join"
    incarnation: Number
    peer: PeerAddress


class OpenServer(Message[Done]):
    """Has the server answer trainers from now on, and recover what it has lost."""

    kind: Literal["open"] = "open"
    incarnation: Number


class UnsettledNote(Part):
    """A part of `Unsettled`, whose attributes it has."""

    receiver: Number
    incarnation: Number
    applied: Number
    writes: tuple[tuple[_Share, ...], ...]

    @staticmethod
    def of(unsettled: Unsettled) -> UnsettledNote:
        """Return what says the same."""
        return UnsettledNote(
            receiver=unsettled.receiver,
            incarnation=unsettled.incarnation,
            applied=unsettled.applied,
            writes=tuple(_shares_of(shares) for shares in unsettled.writes),
        )

    @property
    def unsettled(self) -> Unsettled:
        """What it was made of."""
        return Unsettled(
            receiver=self.receiver,
            incarnation=self.incarnation,
            applied=self.applied,
            writes=[_by_receiver(shares) for shares in self.writes],
        )


class LossReport(Part):
    """What a server has received from a lost one.

    Attributes:
        unsettled: a part of it; None: the server knows of no such loss any more.
        are_all: whether no further writes follow.
    """

    unsettled: UnsettledNote | None
    are_all: bool


class LoseServer(Message[LossReport]):
    """Has the server stop listening to a lost one.

    Attributes:
        server: number of the lost server.
        of_incarnation: of the lost server.
        start: how many writes have been reported already.
    """

    kind: Literal["lose"] = "lose"
    incarnation: Number
    server: Number
    of_incarnation: Number
    start: Number


class TakeBack(Message[Done]):
    """Has the server take back messages of a lost one.

    Attributes:
        server: number of the lost server.
        of_incarnation: of the lost server.
        numbers: of the messages.
        are_all: whether no further numbers follow.
    """

    kind: Literal["take_back"] = "take_back"
    incarnation: Number
    server: Number
    of_incarnation: Number
    numbers: tuple[Number, ...]
    are_all: bool


class GiveUp(Message[Done]):
    """Says that more servers are lost than parity makes up for."""

    kind: Literal["give_up"] = "give_up"
    incarnation: Number


class TableForms(Part):
    """Tables of a server: name, rows on all servers, bytes of a record, generation.

    Attributes:
        tables: some of them, in the order of their names.
        are_all: whether no further tables follow.
    """

    tables: tuple[tuple[Name, Number, Number, Number], ...]
    are_all: bool


class ListTables(Message[TableForms]):
    """Asks which tables the server has, from a place on."""

    kind: Literal["tables"] = "tables"
    incarnation: Number
    start: Number


class KnownRows(Part):
    """How many rows and parity rows a server has, of how many; and what it knows of the leader."""

    known_rows: Number
    all_rows: Number
    has_given_up: bool


class AskKnown(Message[KnownRows]):
    """Asks how far the server's recovery is. Trainers ask it, too."""

    kind: Literal["known"] = "known"
    incarnation: Number


class SentNote(Part):
    """Identifies a message with differences, as `Sent`, and names its tables.

    Attributes:
        tables: name, generation, number of parity rows.
    """

    source: Number
    incarnation: Number
    number: Number
    write: Number
    settled: Number
    shares: tuple[_Share, ...]
    tables: Annotated[tuple[tuple[Name, Number, Number], ...], Field(max_length=MOST_TABLES)]

    @staticmethod
    def of(sent: Sent, differences: Differences) -> SentNote:
        """Return what says the same."""
        return SentNote(
            source=sent.source,
            incarnation=sent.incarnation,
            number=sent.number,
            write=sent.write,
            settled=sent.settled,
            shares=_shares_of(sent.shares),
            tables=tuple(
                (share.table, share.generation, share.rows) for share in differences.tables
            ),
        )

    @property
    def sent(self) -> Sent:
        """What identifies the message."""
        return Sent(
            source=self.source,
            incarnation=self.incarnation,
            number=self.number,
            write=self.write,
            shares=_by_receiver(self.shares),
            settled=self.settled,
        )

    @property
    def table_shares(self) -> list[TableShare]:
        """What the differences have of each table."""
        return [TableShare(*share) for share in self.tables]


class SendDifferences(RowMessage[Done]):
    """Adds differences to parity rows; see `Peer.differences`. Rows go with each of `messages`."""

    records: ClassVar[RecordUse] = RecordUse.SENT
    kind: Literal["differences"] = "differences"
    incarnation: Number
    messages: Annotated[tuple[SentNote, ...], Field(max_length=MOST_PARTS)]

    @property
    def parts(self) -> int:
        """One for each message."""
        return len(self.messages)


class MembersNote(Part):
    """What `Members` has beside tensors.

    Attributes:
        of_incarnation, last: the moment of the server.
        generations: how often each table had been cleared.
    """

    of_incarnation: Number
    last: tuple[_Share, ...]
    generations: tuple[Number, ...]

    @staticmethod
    def of(moment: Moment, generations: Sequence[int]) -> MembersNote:
        """Return what says the same."""
        incarnation, last = moment
        return MembersNote(
            of_incarnation=incarnation, last=_shares_of(last), generations=tuple(generations)
        )

    @property
    def moment(self) -> Moment:
        """The moment of the server."""
        return self.of_incarnation, _by_receiver(self.last)


class _OfMembers(TablesMessage[MembersNote]):
    """Asks for members of stripes. The reply's tensors: bool [n] and uint8 [n, row_bytes].

    Attributes:
        tables: names; their rows have one length.
        each_bytes: bytes of a row in the reply.
    """

    each_bytes: Annotated[int, Field(ge=1, le=MOST_REQUEST_BYTES)]

    @property
    def row_bytes(self) -> int:
        """As was asked for."""
        return self.each_bytes

    def room(self, rows: Sequence[SlotRows]) -> list[Tensor]:
        """Return memory for whether rows are known, and for rows."""
        count = sum(len(part.slots) for part in rows)
        return [
            torch.empty(count, dtype=torch.bool, device="cpu"),
            torch.empty(count, self.each_bytes, dtype=torch.uint8, device="cpu"),
        ]


class GetRows(_OfMembers):
    """Asks for rows; see `HasMembers.rows`."""

    kind: Literal["rows"] = "rows"
    recover: bool
    is_condensed: bool


class GetParityRows(_OfMembers):
    """Asks for parity rows as they were at given moments; see `HasMembers.parity_rows`."""

    kind: Literal["parity_rows"] = "parity_rows"
    moments: tuple[_Share, ...]
    is_condensed: bool

    @staticmethod
    def moments_of(at: Mapping[int, tuple[int, int]]) -> tuple[_Share, ...]:
        """Return `at` of `HasMembers.parity_rows`, as a message has it."""
        return _shares_of(at)

    @property
    def at(self) -> dict[int, tuple[int, int]]:
        """The moments, as `HasMembers.parity_rows` has them."""
        return _by_receiver(self.moments)


class DecodeRows(_OfMembers):
    """Asks for rows that another server has lost; see `Peer.decoded`."""

    kind: Literal["decoded"] = "decoded"
    lost: Number


def _shares_of(shares: Mapping[int, tuple[int, int]]) -> tuple[_Share, ...]:
    return tuple((server, *share) for server, share in shares.items())


def _by_receiver(shares: Sequence[_Share]) -> dict[int, tuple[int, int]]:
    return {server: (incarnation, number) for server, incarnation, number in shares}
