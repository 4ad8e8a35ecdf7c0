"""Keeps the messages that servers exchange about changed rows, as long as anybody may need them.

`Outbox` is the sender's side of one pair of servers, `Inbox` the receiver's. Messages of a pair
arrive in the order of their numbers, each once.

A write is *acknowledged* when all its messages have arrived. The receiver keeps the messages of
writes that may be not acknowledged. If the sender is lost before all messages of a write have
arrived, those that have arrived are taken back, so that all parity rows of a stripe agree. The
receiver also keeps some older messages: they tell what a parity row was at an earlier moment of the
sender.

A message has differences of several tables. They are added to parity rows table by table, and each
may fail, for want of memory for instance. `Added` counts the tables, so a message that comes again
goes on where it failed.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch import Tensor

from recpoint.embeddings.parity.peers import Differences, OutOfStep, Sent

__all__ = ["KEPT_BYTES", "Added", "Inbox", "OfTable", "Outbox", "Unsettled", "Writes", "taken_back"]

#: Messages of one call between servers, and their bytes unless the first has more.
_MOST_MESSAGES: Final = 128
_CALL_BYTES: Final = 4 << 20
#: Bytes of what a call says of its messages, at most.
_NOTE_BYTES: Final = 1 << 19
#: Bytes of rows that an `Inbox` keeps; what may have to be taken back is kept in any case. The
#: other messages serve readers of an earlier moment, which is as long ago as rows of a batch
#: travel.
KEPT_BYTES: Final = 64 << 20
#: What a message takes in memory besides its rows and slots, each of its shares, and each of its
#: tables. Measured.
_MESSAGE_BYTES: Final = 2_048
_SHARE_BYTES: Final = 192
_TABLE_BYTES: Final = 384
#: Shares of writes in one answer. As text, each takes less than 64 bytes.
_MOST_SHARES: Final = 512


class Writes:
    """The writes of a server that are not acknowledged yet, oldest first."""

    def __init__(self) -> None:
        self._count = 0
        self._missing: dict[int, set[int]] = {}

    def begin(self, receivers: Iterable[int]) -> int:
        """Begin a write with a message for each of these servers; return its number."""
        self._count += 1
        if missing := set(receivers):
            self._missing[self._count] = missing
        return self._count

    def arrived(self, write: int, receiver: int) -> None:
        """Note that a message of a write has arrived, or that its receiver is lost."""
        missing = self._missing.get(write)
        if missing is not None:
            missing.discard(receiver)
            if not missing:
                del self._missing[write]

    def is_acknowledged(self, write: int) -> bool:
        """Whether all messages of a write have arrived."""
        return write not in self._missing


class Outbox:
    """Messages from this server to another one that may not have arrived yet.

    Args:
        incarnation: of the receiver.

    Attributes:
        last: number of the newest message.
        sending: held while messages are sent, so that they arrive in their order.
    """

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.last = 0
        self.sending = threading.Lock()
        self.waiting: deque[tuple[Sent, Differences]] = deque()
        self._open: deque[tuple[int, int]] = deque()  # number and write, not known to be settled

    def add(self, sent: Sent, differences: Differences) -> None:
        """Add the next message."""
        assert sent.number == self.last + 1
        self.last = sent.number
        self._open.append((sent.number, sent.write))
        self.waiting.append((sent, differences))

    def oldest(self, writes: Writes) -> list[tuple[Sent, Differences]]:
        """Return the oldest messages that may not have arrived, as many as one call carries."""
        while self._open and writes.is_acknowledged(self._open[0][1]):
            self._open.popleft()
        settled = self._open[0][0] - 1 if self._open else self.last
        messages: list[tuple[Sent, Differences]] = []
        size = notes = 0
        for sent, differences in itertools.islice(self.waiting, _MOST_MESSAGES):
            size += differences.slots.nbytes + differences.rows.nbytes
            notes += 512 + 64 * len(sent.shares)
            notes += sum(64 + 6 * len(share.table) for share in differences.tables)
            if messages and (size > _CALL_BYTES or notes > _NOTE_BYTES):
                break
            messages.append((replace(sent, settled=settled), differences))
        return messages


@dataclass(frozen=True, kw_only=True)
class Unsettled:
    """What a server has received from a lost server.

    Attributes:
        receiver: number of the server.
        incarnation: of that server.
        applied: number of the last message that has arrived.
        writes: the shares (see `Sent`) of writes that may be not acknowledged, and whose messages
            have arrived here. Writes that have one message only are left out: it has arrived.
    """

    receiver: int
    incarnation: int
    applied: int
    writes: Sequence[Mapping[int, tuple[int, int]]]

    def part(self, start: int) -> Unsettled:
        """Return it with as many of the writes as one answer carries, from a place on."""
        writes: list[Mapping[int, tuple[int, int]]] = []
        shares = 0
        for write in self.writes[start:]:
            shares += len(write)
            if writes and shares > _MOST_SHARES:
                break
            writes.append(write)
        return replace(self, writes=writes)


def taken_back(reports: Iterable[Unsettled]) -> dict[int, list[int]]:
    """Return which messages of a lost server are to be taken back, by receiver.

    A write stays if all receivers that live have its message. Otherwise it was not acknowledged,
    and its trainer makes it again.

    Args:
        reports: of all servers that live.
    """
    reports_by_receiver = {(report.receiver, report.incarnation): report for report in reports}

    def has_arrived(receiver: int, incarnation: int, number: int) -> bool:
        # A lost receiver has no parity rows left that could disagree.
        report = reports_by_receiver.get((receiver, incarnation))
        return report is None or report.applied >= number

    numbers_by_receiver: dict[int, list[int]] = {}
    for report in reports_by_receiver.values():
        numbers = [
            shares[report.receiver][1]
            for shares in report.writes
            if not all(has_arrived(receiver, *share) for receiver, share in shares.items())
        ]
        if numbers:
            numbers_by_receiver[report.receiver] = sorted(numbers)
    return numbers_by_receiver


class OfTable(NamedTuple):
    """Differences of one table; see `Differences`."""

    table: str
    generation: int
    slots: Tensor
    rows: Tensor


class Added:
    """Differences that were added to parity rows, of all tables or of the first ones.

    Args:
        differences: the differences. They are kept as they are.

    Attributes:
        tables: how many tables of them were added.
    """

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        self._ends = [0, *itertools.accumulate(share.rows for share in differences.tables)]
        self._places = {
            (share.table, share.generation): place for place, share in enumerate(differences.tables)
        }
        self.tables = 0

    @property
    def is_whole(self) -> bool:
        """Whether all tables were added."""
        return self.tables == self.count

    @property
    def count(self) -> int:
        """Number of tables."""
        return len(self._differences.tables)

    @property
    def size_bytes(self) -> int:
        """Memory of slots and rows."""
        return self._differences.slots.nbytes + self._differences.rows.nbytes

    def part(self, number: int) -> OfTable:
        """Return the differences of a table by its place."""
        share, differences = self._differences.tables[number], self._differences
        rows = slice(self._ends[number], self._ends[number + 1])
        return OfTable(
            share.table, share.generation, differences.slots[rows], differences.rows[rows]
        )

    def add(self, to_parity: Callable[[OfTable], None]) -> None:
        """Add the tables that were not. If one fails, those before it were added."""
        while not self.is_whole:
            to_parity(self.part(self.tables))
            self.tables += 1

    def take_back(self, to_parity: Callable[[OfTable], None]) -> None:
        """Add once more, and so take away, what was added. If a table fails, it is still added."""
        while self.tables:
            to_parity(self.part(self.tables - 1))
            self.tables -= 1

    def of_table(self, table: str, generation: int) -> OfTable | None:
        """Return what was added to a table; None: nothing."""
        place = self._places.get((table, generation), self.tables)
        return self.part(place) if place < self.tables else None


class Inbox:
    """Messages from one server that have arrived.

    Args:
        incarnation: of the sender.

    Attributes:
        applied: number of the last message.
        half_added: the message after that, if one of its tables has failed.
    """

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.applied = 0
        self.half_added: Added | None = None
        self._settled = 0
        self._kept_messages: OrderedDict[int, tuple[Sent, Added]] = OrderedDict()
        self._kept_bytes = 0

    def is_new(self, sent: Sent) -> bool:
        """Whether a message has not arrived before.

        Raises:
            OutOfStep: another incarnation has sent it, or one before it is missing.
        """
        if sent.incarnation != self.incarnation:
            raise OutOfStep(f"a message of another incarnation of server {sent.source + 1}")
        if sent.number > self.applied + 1:
            raise OutOfStep(f"message {sent.number} after message {self.applied}")
        return sent.number > self.applied

    def add(self, sent: Sent, added: Added) -> None:
        """Keep a new message, whose differences were added to parity rows."""
        self.applied = sent.number
        self.half_added = None
        self._settled = max(self._settled, sent.settled)
        self._kept_messages[sent.number] = sent, added
        self._kept_bytes += _size_bytes(sent, added)
        while self._kept_bytes > KEPT_BYTES:
            number, oldest = next(iter(self._kept_messages.items()))
            if number > self._settled:
                break
            del self._kept_messages[number]
            self._kept_bytes -= _size_bytes(*oldest)

    def after(self, incarnation: int, number: int) -> Iterator[Added]:
        """Return what was added to parity rows after a message, oldest first.

        Raises:
            OutOfStep: the message has not arrived, or another incarnation has sent it, or not all
                that came after it is kept any more.
        """
        if incarnation != self.incarnation:
            raise OutOfStep("a moment of another incarnation")
        if number > self.applied:
            # Its sender has taken this server for lost, and did not wait until it had arrived.
            raise OutOfStep(f"message {number}, which has not arrived")
        if number < self.applied and number + 1 not in self._kept_messages:
            raise OutOfStep(f"message {number} of {self.applied}, which is too long ago")
        # Few of those that are kept came after: they are at the end.
        newer_numbers = itertools.takewhile(
            lambda newer: newer > number, reversed(self._kept_messages)
        )
        for newer in reversed(list(newer_numbers)):
            yield self._kept_messages[newer][1]
        if self.half_added is not None:
            yield self.half_added

    def unsettled(self, receiver: int, incarnation: int) -> Unsettled:
        """Return what may have to be taken back if the sender is lost.

        Args:
            receiver: number of this server.
            incarnation: of this server.
        """
        return Unsettled(
            receiver=receiver,
            incarnation=incarnation,
            applied=self.applied,
            writes=[
                sent.shares
                for number, (sent, _) in self._kept_messages.items()
                if number > self._settled and len(sent.shares) > 1
            ],
        )

    def kept(self, number: int) -> Added | None:
        """Return what a message has added to parity rows; None: it is not kept."""
        message = self._kept_messages.get(number)
        return None if message is None else message[1]

    def forget(self, number: int) -> None:
        """Forget a message, whose differences the caller has taken back."""
        message = self._kept_messages.pop(number, None)
        if message is not None:
            self._kept_bytes -= _size_bytes(*message)


def _size_bytes(sent: Sent, added: Added) -> int:
    """Return about how much memory a message takes."""
    shares = len(sent.shares) * _SHARE_BYTES + added.count * _TABLE_BYTES
    return added.size_bytes + _MESSAGE_BYTES + shares
