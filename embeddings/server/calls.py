"""Defines what a home does about the servers that it calls, and does the least: it calls once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Never, TypeVar

from torch import Tensor

from recpoint.embeddings.home.contract import Checked
from recpoint.embeddings.home.forms import TableForm
from recpoint.embeddings.server.links import ServerLink, ServerLinks
from recpoint.embeddings.server.messages import AddTable, Begin, ClearTable
from recpoint.embeddings.server.placed_rows import ServerTable
from recpoint.embeddings.server.placement import placement_of
from recpoint.embeddings.server.transport import Greeting
from recpoint.errors import ServerLost
from recpoint.format.servers import AllServers, ServerFacts

__all__ = ["CallOnce", "CallPolicy"]

T = TypeVar("T")


class CallPolicy(ABC):
    """What a home does about its servers: where it places rows, and what a lost server means.

    `CallOnce` makes each call once. `UntilSuccessor` makes a call again until the successor of a
    lost server answers it.
    """

    @abstractmethod
    def start(self) -> None:
        """Begin, once all servers work for this training.

        Raises:
            ServerLost: a server does not answer.
        """

    @property
    @abstractmethod
    def hosts(self) -> tuple[str, ...]:
        """For each server the name of its host, as placements know it."""

    @abstractmethod
    def begin(self, link: ServerLink, greeting: Greeting) -> int:
        """Have a server forget all rows and work for this training; return its incarnation."""

    @abstractmethod
    def place(self, form: TableForm) -> ServerTable:
        """Say where the rows of a table are."""

    @abstractmethod
    def add_table(self, table: ServerTable) -> None:
        """Make room for a table on all servers; see `Home.add_table`."""

    @abstractmethod
    def call(self, server: int, tables: Sequence[ServerTable], act: Callable[[], T]) -> T:
        """Make a call to a server about rows as they are now.

        Args:
            server: number of the server.
            tables: of the rows. The call names the incarnations in their parts.
            act: makes the call once.
        """

    @abstractmethod
    def call_frozen(self, server: int, act: Callable[[], T]) -> T:
        """Make a call to a server about frozen rows, which end with the server."""

    @abstractmethod
    def check(self, table: ServerTable, ids: Tensor) -> Checked:
        """Compare rows with what else the servers know of them; see `FrozenRows.check`."""

    @abstractmethod
    def clear(self, table: ServerTable) -> None:
        """Forget all rows of a table, which are not frozen, and its batches; see `Home.clear`."""

    @abstractmethod
    def servers_now(self, servers: Sequence[ServerFacts]) -> AllServers:
        """Say how the servers are. `servers` describes them as if all were up."""

    @property
    def being_recovered(self) -> tuple[int, ...]:
        """Numbers of servers whose rows are not all recovered yet, as far as this trainer knows."""
        return ()

    @property
    def lost_rows(self) -> int:
        """Rows and parity rows of these servers that are left to recover."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Make no call again. A second call does nothing."""


class CallOnce(CallPolicy):
    """Makes each call once: a lost server is an error.

    Only `add_table` and `clear` take the servers as they are now: the table then has no rows
    anyway.

    Args:
        links: to the servers.
    """

    def __init__(self, links: ServerLinks) -> None:
        self._links = links

    def start(self) -> None:
        """See `CallPolicy`: there is nothing to begin."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """See `CallPolicy`."""
        return tuple(greeting.host for greeting in self._links.greetings)

    def begin(self, link: ServerLink, greeting: Greeting) -> int:
        """See `CallPolicy`."""
        message = Begin(incarnation=greeting.incarnation, owner=self._links.owner)
        return link.transport.call(message).answer.incarnation

    def place(self, form: TableForm) -> ServerTable:
        """Deal the rows out to the servers in turn."""
        servers = len(self._links)
        return ServerTable(form, placement_of(form.table, rows=form.rows, servers=servers), servers)

    def add_table(self, table: ServerTable) -> None:
        """See `CallPolicy`.

        Raises:
            ServerLost: a server does not answer, or was started again, and other trainers may have
                written rows of the table to it before. It may be called again.
        """

        def add(number: int) -> None:
            old_incarnation = self._links[number].incarnation
            table.parts[number].incarnation = self._add_at(number, table)
            if self._links.trainers > 1 and table.parts[number].incarnation != old_incarnation:
                self._refuse_restarted(number)

        self._links.at_all(add)

    def _add_at(self, number: int, table: ServerTable) -> int:
        """Add a table at a server as it is now; return the server's incarnation."""
        incarnation = self._links.begin(number, self.begin)
        message = AddTable(
            incarnation=incarnation,
            table=table.form.table,
            rows=table.placement.slots(number),
            record_bytes=table.form.record_bytes,
            all_rows=table.form.rows,
        )
        self._links[number].transport.call(message)
        return incarnation

    def _refuse_restarted(self, number: int) -> Never:
        raise ServerLost(
            f"embedding server {number + 1} of {len(self._links)}",
            found="a server that was started again since",
            expected="the server that may have rows of other trainers",
            next_step="restore the last checkpoint: that gives the servers their rows again",
        )

    def call(self, server: int, tables: Sequence[ServerTable], act: Callable[[], T]) -> T:
        """Make the call once."""
        return act()

    def call_frozen(self, server: int, act: Callable[[], T]) -> T:
        """Make the call once."""
        return act()

    def check(self, table: ServerTable, ids: Tensor) -> Checked:
        """See `CallPolicy`: without parity there is nothing to compare."""
        return Checked()

    def clear(self, table: ServerTable) -> None:
        """See `CallPolicy`. Servers that were started again are used again for the table."""

        def clear(server: int) -> None:
            part, link = table.parts[server], self._links[server]
            with part.lock:
                part.incarnation = self._add_at(server, table)
                message = ClearTable(
                    incarnation=part.incarnation,
                    table=table.form.table,
                    trainer=self._links.trainer,
                    batch=next(link.numbers),
                )
                link.transport.call(message)

        self._links.at_all(clear)
        table.forget_batches()

    def servers_now(self, servers: Sequence[ServerFacts]) -> AllServers:
        """See `CallPolicy`. All are up: without parity, only a call finds that one is lost."""
        return AllServers(parity=0, has_given_up=False, each=tuple(servers))

    def close(self) -> None:
        """See `CallPolicy`."""
