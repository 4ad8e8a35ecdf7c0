"""Puts successors in the places of lost servers.

One process of a training, the leader, does this, in six steps (`Replacement.replace`):

1. All living servers stop listening to the lost ones, and say what they have received from them
   (`lose`).
2. Messages of writes that were not acknowledged are taken back. Now all parity rows of a stripe
   agree on the rows of the lost servers.
3. The living servers name their tables.
4. Successors begin, without rows, and learn which tables they have lost.
5. The other servers exchange messages with them (`join`).
6. They answer trainers, and recover their rows (`parity/recover.py`).

Each step may fail, because another server is lost meanwhile or no successor starts. Then `replace`
is called again, with all servers that are lost by then: every call to a server may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from recpoint.embeddings.parity.differences import Unsettled, taken_back
from recpoint.embeddings.parity.own_tables import Known

__all__ = ["LedServer", "Replacement", "LedState"]


class LedState(Enum):
    """What the leader knows of a server. The value says it in words."""

    WHOLE = "has all its rows and parity rows"
    LOST = "does not answer, and other servers may still listen to it"
    FORGOTTEN = "no other server listens to it, and what it left unfinished is taken back"
    BEGUN = "its successor has begun, without rows, and does not answer trainers yet"
    OPEN = "its successor answers trainers, and recovers rows"


class LedServer(Protocol):
    """The calls that the leader makes to one of the servers, or to what is in its place now.

    Raises:
        ServerLost: it does not answer.
        HomeError: it cannot do what it is asked for.
        OutOfStep: it is not that far yet; the call may be repeated.
    """

    @property
    def incarnation(self) -> int:
        """The incarnation that the leader knows of."""

    def lives(self) -> bool:
        """Whether the incarnation that the leader knows of answers.

        Raises:
            ClusterLost: no server can be started again.
        """

    @property
    def unreached(self) -> Sequence[int]:
        """Incarnations of servers that it had not reached when it last answered `lives`."""

    def begin(self, number_of_beginning: int) -> None:
        """Have a server that lives forget everything, and draw an incarnation.

        Args:
            number_of_beginning: a repeated call with the same number does nothing.
        """

    def succeed(self, number_of_beginning: int) -> None:
        """Begin with another process in its place; see `LedServer` for errors.

        What may be left of the server is ended before, if this process has started it. On a Ray
        cluster, nobody ends a process that lives and does not answer. Then there is no successor.
        """

    def protect(self) -> None:
        """Have it take part in parity, and exchange messages with all others as they are now."""

    def tables(self) -> Mapping[str, int]:
        """Return its tables, and how often each was cleared."""

    def add_table(self, table: str, generation: int, *, is_lost: bool) -> None:
        """Have it make room for a table, whose rows it has lost if there ever were any."""

    def lose(self, server: int, incarnation: int) -> Unsettled | None:
        """See `OtherServers.lose`."""

    def take_back(self, server: int, incarnation: int, numbers: Sequence[int]) -> None:
        """See `OtherServers.take_back`."""

    def join(self, other: int) -> None:
        """Have it exchange messages with another server as that is now."""

    def open(self) -> None:
        """Have it answer trainers, and recover what it has lost."""

    def known(self) -> Known:
        """Return how many rows and parity rows it knows."""

    def clear(self, table: str, generation: int) -> None:
        """Have it forget all rows of a table."""

    def give_up(self) -> None:
        """Have it tell trainers that the leader has given up."""


class Replacement:
    """Replaces servers, and has all of them begin anew. One thread at a time calls it.

    Args:
        servers: in the order of their numbers; all have begun.
    """

    def __init__(self, servers: Sequence[LedServer]) -> None:
        self._servers = tuple(servers)
        self._generations: dict[str, int] = {}  # by table, see `StripeMember.clear`
        self._beginnings = 0
        #: Number and incarnation of a lost server -> for each receiver the numbers of messages that
        #: are to be taken back, until that is done.
        self._numbers_to_take_back: dict[tuple[int, int], Mapping[int, Sequence[int]]] = {}

    def add_table(self, table: str) -> int:
        """Have successors get a table, too; return how often the table was cleared."""
        return self._generations.setdefault(table, 0)

    def clear(self, table: str) -> None:
        """Have all servers forget all rows of a table.

        Raises:
            ServerLost, HomeError, OutOfStep: a server is lost meanwhile.
        """
        generation = self._generations[table] = self._generations.get(table, 0) + 1
        # One after another: who leads must not wait for threads that wait to lead.
        for server in self._servers:
            server.add_table(table, generation, is_lost=False)
            server.clear(table, generation)

    def replace(self, lost: Sequence[int], note: Callable[[int, LedState], None]) -> None:
        """Have living servers forget lost ones, and start successors that recover their rows.

        Args:
            lost: numbers of all servers that are lost. Their processes have ended, or cannot write
                any more.
            note: called with the number of a lost server and its state, after each step.

        Raises:
            ServerLost, HomeError, OutOfStep: another server is lost meanwhile, or no successor
                starts.
        """
        living = {
            number: server for number, server in enumerate(self._servers) if number not in lost
        }
        for number in lost:
            self._forget(number, living)
            note(number, LedState.FORGOTTEN)
        for server in living.values():
            # Another trainer may have written to a table that this one has not added yet. It had
            # added the table at all servers before, and no lost server acknowledges writes now.
            for table, generation in server.tables().items():
                self._generations.setdefault(table, generation)
        for number in lost:
            self._succeed(number)
            note(number, LedState.BEGUN)
        for number in lost:
            self._servers[number].protect()
            self._add_tables(number, are_lost=True)
        for server_number, server in enumerate(self._servers):
            for number in lost:
                if number != server_number:
                    server.join(number)
        for number in lost:
            self._servers[number].open()
            note(number, LedState.OPEN)

    def _forget(self, number: int, living: Mapping[int, LedServer]) -> None:
        """Have all living servers forget a lost one.

        If it fails, because another server is lost meanwhile, it is called again without that one.
        """
        incarnation = self._servers[number].incarnation
        key = number, incarnation
        reports = [server.lose(number, incarnation) for server in living.values()]
        if key not in self._numbers_to_take_back:
            # What is taken back is settled once, while no server has forgotten anything yet.
            self._numbers_to_take_back[key] = taken_back(
                report for report in reports if report is not None
            )
        numbers = self._numbers_to_take_back[key]
        for receiver, server in living.items():
            server.take_back(number, incarnation, numbers.get(receiver, []))
        del self._numbers_to_take_back[key]

    def _succeed(self, number: int) -> None:
        # If it is the same process after all, it forgets its rows, because the others have
        # forgotten what it sent.
        self._beginnings += 1
        self._servers[number].succeed(self._beginnings)

    def _add_tables(self, number: int, *, are_lost: bool) -> None:
        for table, generation in self._generations.items():
            self._servers[number].add_table(table, generation, is_lost=are_lost)

    def begin_anew(self, lives: Sequence[bool]) -> None:
        """Have all servers begin without rows, with successors in place of those that are lost.

        Args:
            lives: for each server whether it answers.

        Raises:
            ServerLost, HomeError, OutOfStep: a server is lost meanwhile, or does not start.
        """
        self._beginnings += 1
        beginning = self._beginnings
        # Those that hang first: calls inside the others may be waiting for them.
        for number in sorted(range(len(self._servers)), key=lives.__getitem__):
            if lives[number]:
                self._servers[number].begin(beginning)
            else:
                self._succeed(number)
        self.protect_all()
        for number in range(len(self._servers)):
            self._add_tables(number, are_lost=False)
        self._numbers_to_take_back.clear()

    def protect_all(self) -> None:
        """Have all servers take part in parity, and answer trainers.

        Raises:
            ServerLost, HomeError, OutOfStep: a server is lost meanwhile.
        """
        for server in self._servers:
            server.protect()
        for server in self._servers:
            server.open()
