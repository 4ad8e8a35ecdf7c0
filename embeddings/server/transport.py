"""Defines how a trainer calls an embedding server: seven calls.

`EmbeddingServer` answers them in the server's process. A transport, such as `TcpTransport`, has the
same seven calls in the trainer's process, and passes each on to one server.

A server that starts has no rows. Each start draws a new number, its *incarnation*. A trainer reads
it once, in `hello`, and names it in each call. A server refuses calls that name another
incarnation, so a server that was started again is never read as if it had the rows of before.

A server works for one training at a time, its *owner*. A training that begins takes over servers
that an earlier one has left, with the command "begin": the server forgets all rows and takes a new
incarnation. It then refuses whatever the earlier training still sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from recpoint.embeddings.home.contract import TableRows

__all__ = ["Greeting", "Transport", "Value", "greeting_seconds"]

#: What a command takes and returns: what JSON can carry.
Value = int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """What a server says of itself.

    Attributes:
        incarnation: number of this start of the server, 1 to 2^63 - 1. No two starts share one.
        host: name of the machine.
        pid: process id of the server there.
        owner: number of the training that the server works for; 0: none has begun yet.
        unreached: incarnations of servers that it has just called, and that answered neither the
            call nor a greeting.
    """

    incarnation: int
    host: str
    pid: int
    owner: int = 0
    unreached: tuple[int, ...] = ()


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

    Raises:
        ServerLost: the server does not answer in time, has ended, or has another incarnation. The
            error names the server.
        HomeError: the server answers that the call is against the contract of `Home`.
        OutOfStep: the server takes part in parity, and is not ready; the call may be repeated.

    Attributes:
        listens_at: host and port for calls of other servers; None: they cannot call it.
    """

    listens_at: tuple[str, int] | None = None

    @abstractmethod
    def hello(self, *, within_seconds: float | None = None) -> Greeting:
        """Ask the server who it is. The only call that names no incarnation.

        Args:
            within_seconds: the longest time for the call; None: that of the other calls.
        """

    @abstractmethod
    def command(
        self, name: str, arguments: Mapping[str, Value], *, incarnation: int
    ) -> Mapping[str, Value]:
        """Do something small, such as "begin", "add_table", "freeze", "release", "clear", "sizes".

        Args:
            name: what to do.
            arguments: depend on the name; `EmbeddingServer` says which.
            incarnation: of the server that is meant.
        """

    @abstractmethod
    def fetch(
        self, wanted: Sequence[TableRows], *, incarnation: int, frozen: int | None = None
    ) -> list[Tensor]:
        """Read records, as `Home.fetch_all` does.

        Args:
            wanted: rows of each table, by their places on this server.
            incarnation: of the server that is meant.
            frozen: number that the command "freeze" returned, for rows of its table alone; None:
                the rows as they are now.

        Returns:
            For each table bool [n]: whether the server has the row.
        """

    @abstractmethod
    def write_back(
        self, changed: Sequence[TableRows], *, incarnation: int, trainer: int, batch: int
    ) -> None:
        """Store records, as `Home.write_back_all` does.

        Args:
            changed: rows of each table, by their places on this server.
            incarnation: of the server that is meant.
            trainer: number of the trainer that writes.
            batch: increases with each write of this trainer to a table. A write that comes again is
                acknowledged and not done again, also if later writes were done since.
        """

    @abstractmethod
    def check(self, table: str, slots: Tensor, *, incarnation: int) -> Tensor:
        """Compare stripes with their parity, as `StripeMember.check` does.

        Args:
            table: name of the table.
            slots: of first parity rows on this server, int64 [n], ascending.
            incarnation: of the server that is meant.

        Returns:
            `StripeVerdict`s, uint8 [n].
        """

    @abstractmethod
    def stage(
        self,
        frozen: int,
        slots: Tensor,
        records: Tensor | None = None,
        *,
        incarnation: int,
        first: int = 0,
    ) -> Tensor:
        """Have the server stage rows of a checkpoint, as `PartStager` says; see "stage".

        Args:
            frozen: number of the reader from which the rows are taken.
            slots: int64 [n], ascending.
            records: uint8 [n, bytes], of rows that the server does not have, and that were named
                before; None: the rows are named.
            incarnation: of the server that is meant.
            first: how many rows were named before these.

        Returns:
            bool [n]: the row's record is there. The others must come with a record.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the connection up. The server goes on. A second call does nothing."""
