"""Defines the calls between the servers of one training, and what travels in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from torch import Tensor

__all__ = [
    "MOST_TABLES",
    "Differences",
    "HasMembers",
    "Members",
    "Moment",
    "OutOfStep",
    "Peer",
    "Sent",
    "TableShare",
    "TableSlots",
]

#: Tables of one call, at most.
MOST_TABLES: Final = 128

#: A moment in the life of a server: its incarnation, and for each receiver that one's incarnation
#: and the number of the last message that it had sent there.
Moment = tuple[int, Mapping[int, tuple[int, int]]]


class OutOfStep(Exception):
    """Two servers do not have the same picture of the others yet. The call may be repeated soon."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Identifies a message with differences.

    Attributes:
        source: number of the server that sends it.
        incarnation: of that server.
        number: 1, 2, 3, … for each receiver, without gaps.
        write: number of the write at the source. It has one message for each receiver.
        shares: receiver -> its incarnation and the number, of all messages of the write.
        settled: up to this number, each message to this receiver belongs to a write all of whose
            messages have arrived.
    """

    source: int
    incarnation: int
    number: int
    write: int
    shares: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    settled: int = 0


class TableShare(NamedTuple):
    """What differences have of one table.

    Attributes:
        table: name of the table.
        generation: how often the table had been cleared.
        rows: number of its parity rows.
    """

    table: str
    generation: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Differences:
    """What a write adds to parity rows of one server, in tables whose rows have one length.

    For a first parity row, that is what the row was, XOR what it is now. For a second one, it is
    that times the coefficient of the row's position.

    Attributes:
        tables: the tables, each once.
        slots: parity slots, int64 [n], those of the first table first; those of a table ascend.
        rows: uint8 [n, record_bytes + 1]; the last byte is the difference of "the row is there".
    """

    tables: Sequence[TableShare]
    slots: Tensor
    rows: Tensor


class TableSlots(NamedTuple):
    """Rows or parity rows of one table.

    Attributes:
        table: name of the table.
        slots: int64 [n], ascending: slots of rows, or of parity rows.
    """

    table: str
    slots: Tensor


@dataclass(frozen=True, kw_only=True)
class Members:
    """Rows or parity rows of stripes, as one server has them at one moment.

    Those of the first table that was asked for come first.

    Attributes:
        is_known: bool [n]: False for those that the server has lost and not recovered yet.
        rows: uint8 [n, record_bytes + 1]; the last byte of a row is 1 if it was ever written.
            Zeros where nothing was written, and where nothing is known. Or [n, 8], condensed.
        moment: of the server.
        generations: how often each table had been cleared.
    """

    is_known: Tensor
    rows: Tensor
    moment: Moment
    generations: Sequence[int]


class HasMembers(Protocol):
    """Has rows and parity rows: a server of this process, or another one. See `Peer`.

    A call may be about several tables, each at most once, whose rows have one length.
    """

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        """Return rows, once all messages about them have arrived at their receivers.

        Args:
            wanted: the rows.
            recover: whether the server first recovers those that it has lost.
            is_condensed: whether `stripe_check.condensed` of the rows is wanted.
        """

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        """Return parity rows as they were at given moments of their sources.

        Args:
            wanted: the parity rows.
            at: source -> its incarnation, and the number of its last message that counts.
            is_condensed: whether `stripe_check.condensed` of the rows is wanted.
        """


class Peer(HasMembers, Protocol):
    """Calls another server. Every call may fail, and be made again as it was.

    Raises:
        ServerLost: the server does not answer.
        OutOfStep: the server does not know the caller's incarnation (yet), or no longer keeps the
            messages since the moment that is asked for.
    """

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        """Have differences applied to parity rows, once, however often they are sent.

        Args:
            messages: in the order of their numbers. If the call fails, some may have arrived.
        """

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        """Compute rows that another server has lost, from all servers' rows and parity rows.

        All rows of the answer are known. Its moment is that of the server that decodes.

        Args:
            wanted: rows of that server, in tables whose rows have one length.
            lost: number of that server. Its rows do not change before it has the answer.
        """

    @property
    def is_unreached(self) -> bool:
        """Whether the server has just answered neither a call nor a greeting."""

    def close(self) -> None:
        """Give the connection up. Calls that are under way fail."""
