"""Defines what a message to an embedding server is, and how a server is called.

A *message* is what a caller says. Rows go beside it, as tensors: slots, and for some messages
records. A server has one reply for each message: an answer, and for some messages tensors.
`EmbeddingServer` answers messages in the server's process. A `Transport`, such as `TcpTransport`,
passes them on to one server from another process.

A server that starts has no rows. Each start draws a new number, its *incarnation*. A trainer reads
it once, by `Greet`, and names it in each further message. A server refuses messages that name
another incarnation, so a server that was started again is never read as if it had the rows of
before.

A server works for one training at a time, its *owner*. A training that begins takes over servers
that an earlier one has left, with `Begin`: the server forgets all rows and takes a new incarnation.
It then refuses whatever the earlier training still sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Annotated, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar

from pydantic import Field
from torch import Tensor

from recpoint.embeddings.parity.peers import MOST_TABLES
from recpoint.format.records import Part

__all__ = [
    "MOST_PARTS",
    "MOST_REQUEST_BYTES",
    "MOST_SERVERS",
    "Done",
    "Greet",
    "Greeting",
    "Hosts",
    "Message",
    "Name",
    "Names",
    "Number",
    "Positive",
    "RecordUse",
    "Reply",
    "RowMessage",
    "SlotRows",
    "TablesMessage",
    "Transport",
    "greeting_seconds",
]

AnswerT = TypeVar("AnswerT", bound=Part)

#: Bytes of slots and records in one call.
MOST_REQUEST_BYTES: Final = 16 << 20
#: Tables, or messages with differences, of one call.
MOST_PARTS: Final = MOST_TABLES
MOST_SERVERS: Final = 4_096
_MOST_NAME_CHARACTERS: Final = 1_024


Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Positive = Annotated[int, Field(ge=1, lt=1 << 63)]
Name = Annotated[str, Field(max_length=_MOST_NAME_CHARACTERS)]
Names = Annotated[tuple[Name, ...], Field(max_length=MOST_PARTS)]
Hosts = Annotated[tuple[Name, ...], Field(max_length=MOST_SERVERS)]


class RecordUse(IntEnum):
    """What a call does with the records that stand beside slots."""

    NONE = 0  # there are none
    SENT = 1  # they go to the server
    FILLED = 2  # they are memory, into which the server's records go


class SlotRows(NamedTuple):
    """Rows that go beside a message.

    Attributes:
        slots: int64 [n], ascending, contiguous, on the CPU.
        records: uint8 [n, record_bytes], contiguous, on the CPU; None if the message has
            `RecordUse.NONE`.
    """

    slots: Tensor
    records: Tensor | None = None


class Message(Part, Generic[AnswerT]):
    """One call to a server. Its subclasses are all calls that there are.

    Attributes:
        kind: names the message on the wire.
    """

    kind: str

    @classmethod
    @cache
    def answer_type(cls) -> type[Part]:
        """Return the type of the answer."""
        for base in cls.__mro__:
            answers = getattr(base, "__pydantic_generic_metadata__", {}).get("args")
            if answers:
                answer: type[Part] = answers[0]
                return answer
        raise TypeError(f"{cls.__name__} has no type of answer")


class RowMessage(Message[AnswerT], Generic[AnswerT]):
    """A message with rows beside it.

    Attributes:
        records: what the call does with records of the rows.
    """

    records: ClassVar[RecordUse] = RecordUse.NONE

    @property
    def parts(self) -> int:
        """How many `SlotRows` go beside the message."""
        return 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the reply's tensors, for `RecordUse.NONE`."""
        return 0

    def room(self, rows: Sequence[SlotRows]) -> list[Tensor]:
        """Return memory for the reply's tensors, apart from records that are filled."""
        return []


class Done(Part):
    """The call is done."""


@dataclass(frozen=True)
class Reply(Generic[AnswerT]):
    """What a server answers.

    Attributes:
        answer: what is no tensor.
        tensors: on the CPU, contiguous; the message says which.
    """

    answer: AnswerT
    tensors: Sequence[Tensor] = field(default=())


def greeting_seconds(timeout_seconds: float) -> float:
    """Return how long a server may take to say that it lives, which waits for nothing there.

    Args:
        timeout_seconds: how long other calls may take.
    """
    return min(timeout_seconds, max(1.0, timeout_seconds / 4))


class Transport(ABC):
    """Calls one embedding server.

    All calls may come from several threads at the same time. A call that fails may or may not have
    reached the server, and may be repeated as it was: the server does each write once.

    Attributes:
        listens_at: host and port for calls of other servers; None: they cannot call it.
    """

    listens_at: tuple[str, int] | None = None

    @abstractmethod
    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        """Have the server answer a message.

        Args:
            message: says what is wanted.
            rows: tensors that go beside the message, or that the server's records go into.
            within_seconds: the longest time for the call; None: the transport's.

        Raises:
            ServerLost: the server does not answer in time, has ended, or has another incarnation.
                The error names the server.
            HomeError: the server answers that the call is against the contract of `Home`.
            OutOfStep: the server takes part in parity, and is not ready; the call may be repeated.
            ValueError: the message or its rows fit no table.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the connection up. The server goes on. A second call does nothing."""

    def hello(self, *, within_seconds: float | None = None) -> Greeting:
        """Ask the server who it is."""
        return self.call(Greet(), within_seconds=within_seconds).answer


class Greeting(Part):
    """What a server says of itself.

    Attributes:
        incarnation: number of this start of the server. No two starts share one.
        host: name of the machine.
        pid: process id of the server there.
        owner: number of the training that the server works for; 0: none has begun yet.
        unreached: incarnations of servers that it has just called, and that answered neither the
            call nor a greeting.
    """

    incarnation: Positive
    host: str
    pid: Number
    owner: Number = 0
    unreached: tuple[Number, ...] = ()


class Greet(Message[Greeting]):
    """Asks the server who it is. The only message that names no incarnation."""

    kind: Literal["greet"] = "greet"


class TablesMessage(RowMessage[AnswerT], Generic[AnswerT]):
    """Goes with rows of tables, each table at most once: one `SlotRows` for each name."""

    incarnation: Number
    tables: Names

    @property
    def parts(self) -> int:
        """One for each table."""
        return len(self.tables)
