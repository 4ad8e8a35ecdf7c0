"""Passes what `Leader` wants of a server on to it, as messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from recpoint.embeddings.home.forms import TableForm
from recpoint.embeddings.parity.differences import Unsettled
from recpoint.embeddings.parity.own_tables import Known
from recpoint.embeddings.parity.replacement import LedServer
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.links import ServerLink
from recpoint.embeddings.server.messages import AddTable, Begin, ClearTable
from recpoint.embeddings.server.parity_messages import (
    AskKnown,
    GiveUp,
    JoinServer,
    ListTables,
    LoseServer,
    OpenServer,
    PeerAddress,
    Protect,
    TakeBack,
)
from recpoint.embeddings.server.placed_rows import ServerTable
from recpoint.embeddings.server.transport import Greeting, Transport
from recpoint.errors import ClusterLost, ServerLost

__all__ = ["CommandedServer", "Servers", "add_table", "begin"]

#: Numbers of messages in one call. As text, each takes at most 20 bytes.
_MOST_NUMBERS: Final = 2_000


@dataclass(frozen=True, kw_only=True)
class Servers:
    """What the leader's commands need to know of all servers.

    Attributes:
        links: to the servers, in their order. The leader renews them.
        tables: all tables, by name. The home adds to it, and so does what learns of others.
        table: returns where rows of a table are.
        parity: the form of a stripe.
        hosts: for each server the name of its host when the training began.
        owner: number of the training.
        trainer: number of the leader among the trainers.
        greeting_seconds: how long a server may take to say that it lives.
        revive: starts a server again; None: nothing does.
    """

    links: Sequence[ServerLink]
    tables: dict[str, ServerTable]
    table: Callable[[TableForm], ServerTable]
    parity: Parity
    hosts: Sequence[str]
    owner: int
    trainer: int
    greeting_seconds: float
    revive: Callable[[int], Transport] | None


class CommandedServer(LedServer):
    """One server.

    Args:
        number: of the server.
        servers: all of them.
    """

    def __init__(self, number: int, servers: Servers) -> None:
        self._number = number
        self._servers = servers
        self._link = servers.links[number]
        self._unreached: tuple[int, ...] = ()

    @property
    def incarnation(self) -> int:
        """See `LedServer`."""
        return self._link.incarnation

    def lives(self) -> bool:
        """See `LedServer`. A server that does not answer is greeted once more.

        This process may have been stopped meanwhile, and has then waited for no answer.
        """
        greeting = self._greeting() or self._greeting()
        self._unreached = () if greeting is None else greeting.unreached
        return greeting is not None and greeting.incarnation == self._link.incarnation

    def _greeting(self) -> Greeting | None:
        try:
            return self._link.transport.hello(within_seconds=self._servers.greeting_seconds)
        except ClusterLost:
            raise  # the server may live, and there can be no successor
        except ServerLost:
            return None

    @property
    def unreached(self) -> tuple[int, ...]:
        """See `LedServer`."""
        return self._unreached

    def begin(self, number_of_beginning: int) -> None:
        """See `LedServer`."""
        link = self._link
        link.incarnation = begin(
            link.transport, link.transport.hello(), self._servers.owner, number_of_beginning
        )
        link.greeting = link.transport.hello()

    def succeed(self, number_of_beginning: int) -> None:
        """See `LedServer`."""
        if self._servers.revive is None:
            raise ServerLost(
                f"embedding server {self._number + 1}",
                found="no way to start it again",
                expected="a home that can start its servers again",
                next_step="restore the last checkpoint",
            )
        old, self._link.transport = self._link.transport, self._servers.revive(self._number)
        old.close()
        self.begin(number_of_beginning)

    def protect(self) -> None:
        """See `LedServer`."""
        numbers = range(len(self._servers.links))
        self._link.transport.call(
            Protect(
                incarnation=self._link.incarnation,
                number=self._number,
                data=self._servers.parity.data,
                parity=self._servers.parity.parity,
                hosts=tuple(self._servers.hosts),
                peers=tuple(
                    self._address_of(number) for number in numbers if number != self._number
                ),
            )
        )

    def _address_of(self, number: int) -> PeerAddress:
        link = self._servers.links[number]
        address = link.transport.listens_at
        assert address is not None  # who makes the home sees to that
        return PeerAddress(
            server=number, incarnation=link.incarnation, host=address[0], port=address[1]
        )

    def tables(self) -> dict[str, int]:
        """See `LedServer`."""
        generations: dict[str, int] = {}
        are_all = False
        while not are_all:
            message = ListTables(incarnation=self._link.incarnation, start=len(generations))
            answer = self._link.transport.call(message).answer
            are_all = answer.are_all
            for table, rows, record_bytes, generation in answer.tables:
                generations[table] = generation
                if table not in self._servers.tables:  # another trainer has added it
                    form = TableForm(table, rows, record_bytes)
                    self._servers.tables[table] = self._servers.table(form)
        return generations

    def add_table(self, table: str, generation: int, *, is_lost: bool) -> None:
        """See `LedServer`."""
        server_table = self._servers.tables[table]
        add_table(self._link, self._number, server_table, generation, is_lost=is_lost)

    def join(self, other: int) -> None:
        """See `LedServer`."""
        message = JoinServer(incarnation=self._link.incarnation, peer=self._address_of(other))
        self._link.transport.call(message)

    def open(self) -> None:
        """See `LedServer`."""
        self._link.transport.call(OpenServer(incarnation=self._link.incarnation))

    def known(self) -> Known:
        """See `LedServer`."""
        message = AskKnown(incarnation=self._link.incarnation)
        answer = self._link.transport.call(message).answer
        return Known(answer.known_rows, answer.all_rows)

    def clear(self, table: str, generation: int) -> None:
        """See `LedServer`."""
        part = self._servers.tables[table].parts[self._number]
        with part.lock:
            part.incarnation = self._link.incarnation
            message = ClearTable(
                incarnation=self._link.incarnation,
                table=table,
                trainer=self._servers.trainer,
                batch=next(self._link.numbers),
                generation=generation,
            )
            self._link.transport.call(message)

    def give_up(self) -> None:
        """See `LedServer`."""
        self._link.transport.call(GiveUp(incarnation=self._link.incarnation))

    def lose(self, server: int, incarnation: int) -> Unsettled | None:
        """See `LedServer`. The answer comes in parts of bounded size."""
        writes: list[Mapping[int, tuple[int, int]]] = []
        while True:
            message = LoseServer(
                incarnation=self._link.incarnation,
                server=server,
                of_incarnation=incarnation,
                start=len(writes),
            )
            answer = self._link.transport.call(message).answer
            if answer.unsettled is None:
                return None
            part = answer.unsettled.unsettled
            writes += part.writes
            if answer.are_all:
                return replace(part, writes=writes)

    def take_back(self, server: int, incarnation: int, numbers: Sequence[int]) -> None:
        """See `LedServer`. The numbers go in calls of bounded size."""
        for first in range(0, max(1, len(numbers)), _MOST_NUMBERS):
            stop = first + _MOST_NUMBERS
            message = TakeBack(
                incarnation=self._link.incarnation,
                server=server,
                of_incarnation=incarnation,
                numbers=tuple(numbers[first:stop]),
                are_all=stop >= len(numbers),
            )
            self._link.transport.call(message)


def begin(transport: Transport, greeting: Greeting, owner: int, number_of_beginning: int) -> int:
    """Have a server begin for a training with parity; return its incarnation."""
    message = Begin(
        incarnation=greeting.incarnation,
        owner=owner,
        round=number_of_beginning,
        is_protected=True,
    )
    return transport.call(message).answer.incarnation


def add_table(
    link: ServerLink, number: int, table: ServerTable, generation: int, *, is_lost: bool = False
) -> None:
    """Have a server make room for its part of a table; see `StripeMember.add_table`."""
    message = AddTable(
        incarnation=link.incarnation,
        table=table.form.table,
        rows=table.placement.slots(number),
        record_bytes=table.form.record_bytes,
        all_rows=table.form.rows,
        generation=generation,
        is_lost=is_lost,
    )
    link.transport.call(message)
