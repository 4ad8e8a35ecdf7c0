"""Makes calls until they are answered, though embedding servers with parity are lost.

Rows are placed in stripes. A call that fails because a server is lost is made again, until the
server's successor answers it. Trainer 0 has a `Leader`, which looks for lost servers and starts
their successors.

If more servers are lost than parity makes up for, calls raise ServerLost, as they do without
parity. `clear` then has all servers begin anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from torch import Tensor

from recpoint.embeddings.home.contract import Checked
from recpoint.embeddings.home.forms import TableForm
from recpoint.embeddings.parity.differences import KEPT_BYTES
from recpoint.embeddings.parity.leader import Leader
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.replacement import LedState
from recpoint.embeddings.parity.stripes import Parity, Stripes, stripes_of
from recpoint.embeddings.server.calls import CallPolicy
from recpoint.embeddings.server.checked_stripes import checked_stripes
from recpoint.embeddings.server.led_server import CommandedServer, Servers, add_table, begin
from recpoint.embeddings.server.links import ServerLink, ServerLinks
from recpoint.embeddings.server.parity_messages import AskKnown
from recpoint.embeddings.server.placed_rows import ServerTable
from recpoint.embeddings.server.transport import Greeting, greeting_seconds
from recpoint.errors import ClusterLost, HomeError, ServerLost
from recpoint.format.servers import AllServers, ServerFacts, ServerState

__all__ = ["UntilSuccessor"]

T = TypeVar("T")

_LOG: Final = logging.getLogger("recpoint")
_PAUSE_SECONDS: Final = 0.05
#: How long a successor may take to start and to take the place of a lost server.
_START_SECONDS: Final = 60.0
#: What people are told of a server; in all other states it is lost.
_STATES: Final[dict[LedState, ServerState]] = {LedState.WHOLE: "up", LedState.OPEN: "recovering"}


class UntilSuccessor(CallPolicy):
    """Makes a call again and again while a server is lost that parity makes up for.

    Args:
        links: to the servers; each has an address. Trainer 0 is the leader. For other trainers,
            `links.revive` does not wait until the leader has started the server again.
        parity: the form of a stripe.
        hosts: for each server the name of its host when the training began; None: this object
            learns them from the servers. All trainers need the same.
        timeout_seconds: how long a call to a server may take.
        patience_seconds: how long a call is made again while a server is lost. None: longer than it
            takes to find that servers hang, one after another, and to start their successors.

    Attributes:
        leader: of trainer 0; None: this is another trainer, or `start` was not called yet.
    """

    def __init__(
        self,
        links: ServerLinks,
        *,
        parity: Parity,
        hosts: Sequence[str] | None,
        timeout_seconds: float,
        patience_seconds: float | None,
    ) -> None:
        self._links = links
        self._parity = parity
        self._hosts = tuple(hosts or ())
        self._greeting_seconds = greeting_seconds(timeout_seconds)
        self._patience_seconds = (
            2 * timeout_seconds + _START_SECONDS if patience_seconds is None else patience_seconds
        )
        self._tables: dict[str, ServerTable] = {}  # also for successors of lost servers
        self.leader: Leader | None = None
        self._was_given_up = False  # as another trainer has heard
        self._is_closed = False

    def start(self) -> None:
        """See `CallPolicy`. Trainer 0 begins to lead."""
        self._hosts = self._hosts or tuple(greeting.host for greeting in self._links.greetings)
        if self._links.trainer != 0:
            return
        servers = Servers(
            links=tuple(self._links),
            tables=self._tables,
            # Not a method of this object: the leader, which this object has, would keep it alive.
            table=partial(_placed, self._parity, self._hosts, len(self._links)),
            parity=self._parity,
            hosts=self._hosts,
            owner=self._links.owner,
            trainer=self._links.trainer,
            greeting_seconds=self._greeting_seconds,
            revive=self._links.revive,
        )
        led = [CommandedServer(number, servers) for number in range(len(self._links))]
        self.leader = Leader(led, self._parity.parity)
        self.leader.watch()
        _LOG.info(
            "%d embedding servers keep parity: it takes %.3g %% of the memory for rows and "
            "row states, and on each server up to %d MiB for messages of the others",
            len(self._links),
            100 * self._parity.parity / self._parity.data,
            (len(self._links) - 1) * KEPT_BYTES >> 20,
        )

    @property
    def hosts(self) -> tuple[str, ...]:
        """For each server the name of its host when the training began."""
        return self._hosts

    def begin(self, link: ServerLink, greeting: Greeting) -> int:
        """See `CallPolicy`."""
        return begin(link.transport, greeting, self._links.owner, 0)

    def place(self, form: TableForm) -> ServerTable:
        """Place the rows in stripes, and have successors get the table, too."""
        table = _placed(self._parity, self._hosts, len(self._links), form)
        self._tables[form.table] = table
        return table

    def add_table(self, table: ServerTable) -> None:
        """See `CallPolicy`."""
        generation = 0
        if self.leader is not None:
            generation = self.leader.add_table(table.form.table)
            self._log_size(table)

        def add(server: int) -> None:
            link = self._links[server]
            self.call(server, [table], lambda: add_table(link, server, table, generation))

        self._links.at_all(add)

    def _log_size(self, table: ServerTable) -> None:
        placement, form = table.placement, table.form
        assert isinstance(placement, Stripes)
        parity_rows = sum(placement.parity_slots(server) for server in range(len(self._links)))
        _LOG.info(
            "table %r on embedding servers: up to %.1f MB for rows and row states, and %.1f MB for "
            "their parity",
            form.table,
            form.rows * form.record_bytes / 1e6,
            parity_rows * (form.record_bytes + 1) / 1e6,
        )

    def call(self, server: int, tables: Sequence[ServerTable], act: Callable[[], T]) -> T:
        """Make a call, again and again while a server is lost that parity makes up for."""
        patience: _Patience | None = None
        while True:
            link = self._links[server]
            transport = link.transport
            for table in tables:
                table.parts[server].incarnation = link.incarnation
            try:
                return act()
            except ClusterLost:
                raise  # nothing starts a server again
            except (HomeError, OutOfStep) as error:
                if not isinstance(error, (ServerLost, OutOfStep)) and transport is link.transport:
                    raise  # else the transport to a lost server was closed meanwhile
                # The call itself may have taken long, if a server hangs.
                patience = patience or _Patience(self._patience_seconds)
                if not self._may_go_on(patience, server):
                    raise self._named(error) from error
                if self.leader is None:
                    self._follow(server)
            time.sleep(_PAUSE_SECONDS)

    def call_frozen(self, server: int, act: Callable[[], T]) -> T:
        """Make a call again while its server waits for the successor of another one.

        The frozen rows themselves end with their server.
        """
        patience = _Patience(self._patience_seconds)
        while True:
            try:
                return act()
            except OutOfStep as error:
                if not self._may_go_on(patience, server):
                    raise self._named(error) from error
                time.sleep(_PAUSE_SECONDS)

    def _may_go_on(self, patience: _Patience, server: int) -> bool:
        """Whether a call may be made again, because lost servers are replaced.

        Args:
            patience: what is left for it.
            server: number of the server that did not answer. It is not asked, which may take long.
        """
        is_in_time = patience.is_left()
        if self._is_closed:
            return False
        if self.leader is not None:
            self.leader.look()
        elif not self._was_given_up:
            numbers = (number for number in range(len(self._links)) if number != server)
            self._was_given_up = any(map(self._says_give_up, numbers))
        return not self._has_given_up and is_in_time

    @property
    def _has_given_up(self) -> bool:
        return self._was_given_up if self.leader is None else self.leader.has_given_up

    def _says_give_up(self, number: int) -> bool:
        """Whether a server knows that the leader has given up."""
        link = self._links[number]
        try:
            answer = link.transport.call(AskKnown(incarnation=link.incarnation)).answer
        except (HomeError, OutOfStep):
            return False
        return answer.has_given_up

    def _named(self, error: HomeError | OutOfStep) -> HomeError:
        if self._has_given_up:
            lost = self.being_recovered  # as rank 0 knows
            names = ", ".join(str(number + 1) for number in lost)
            return ServerLost(
                f"embedding servers {names}".rstrip(),
                found=f"{len(lost) or 'too many'} of them lost, or not recovered yet",
                expected=f"at most {self._parity.parity} at a time, as parity makes up for",
                next_step="restore the last checkpoint, which starts the servers again",
            )
        if isinstance(error, HomeError):
            return error
        return ServerLost(
            "embedding servers",
            found=f"servers that do not agree for {self._patience_seconds:g} s: {error}",
            expected="that lost servers are replaced within that time",
            next_step="look at the log of rank 0, and at the servers' logs",
        )

    def _follow(self, server: int) -> None:
        """Learn the incarnation, and the address, of a server that the leader may have replaced."""
        link = self._links[server]
        with link.lock:
            try:
                greeting = link.transport.hello(within_seconds=self._greeting_seconds)
            except ServerLost:
                if self._links.revive is None:
                    return
                revived = None
                try:
                    revived = self._links.revive(server)
                    greeting = revived.hello(within_seconds=self._greeting_seconds)
                except ServerLost:
                    if revived is not None:
                        revived.close()
                    return
                lost, link.transport = link.transport, revived
                lost.close()
            if greeting.owner == self._links.owner:
                link.incarnation, link.greeting = greeting.incarnation, greeting

    def check(self, table: ServerTable, ids: Tensor) -> Checked:
        """Compare the rows' stripes with their parity; see `checked_stripes`."""
        return checked_stripes(
            self._links, table, ids, is_recovering=lambda: bool(self.being_recovered)
        )

    def clear(self, table: ServerTable) -> None:
        """See `CallPolicy`. If servers were lost, all may begin anew.

        The leader clears for all trainers. See `Leader.clear`, also for its errors.
        """
        table.forget_batches()
        if self.leader is None:
            self._was_given_up = False
            return
        try:
            self.leader.clear(table.form.table)
        except OutOfStep as error:
            raise self._named(error) from error

    @property
    def being_recovered(self) -> tuple[int, ...]:
        """Numbers of servers whose rows are not all recovered yet, as far as the leader knows."""
        return () if self.leader is None else self.leader.not_whole

    @property
    def lost_rows(self) -> int:
        """See `CallPolicy`."""
        return 0 if self.leader is None else self.leader.lost_rows

    def servers_now(self, servers: Sequence[ServerFacts]) -> AllServers:
        """See `CallPolicy`. Only trainer 0 knows which servers are not whole."""
        if self.leader is None:
            return AllServers(parity=0, has_given_up=False, each=tuple(servers))
        states = self.leader.states
        return AllServers(
            parity=self._parity.parity,
            has_given_up=self.leader.has_given_up,
            each=tuple(
                _as_led(server, state, self.leader)
                for server, state in zip(servers, states, strict=True)
            ),
        )

    def close(self) -> None:
        """Make no call again; the recovery of lost servers ends."""
        self._is_closed = True
        if self.leader is not None:
            self.leader.end()


def _placed(parity: Parity, hosts: Sequence[str], servers: int, form: TableForm) -> ServerTable:
    stripes = stripes_of(form.table, rows=form.rows, parity=parity, hosts=hosts)
    return ServerTable(form, stripes, servers)


def _as_led(server: ServerFacts, state: LedState, leader: Leader) -> ServerFacts:
    """Return what is known of a server, as its leader knows it."""
    number = server.number - 1
    loss = leader.losses.get(number)
    known_rows = server.rows
    if state is LedState.OPEN:
        known_rows -= min(known_rows, leader.missing_rows.get(number, known_rows))
    elif state is not LedState.WHOLE:
        known_rows = 0
    return server.model_copy(
        update={
            "state": _STATES.get(state, "lost"),
            "known_rows": known_rows,
            "lost_ms": None if loss is None else loss.lost_ms,
            "whole_ms": None if loss is None else loss.whole_ms,
        }
    )


class _Patience:
    """How long a call is made again.

    Once the time is over, it is made one more time: this process may have been stopped for all of
    it, while the servers were well.
    """

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._is_last = False

    def is_left(self) -> bool:
        """Whether the call may be made again."""
        if time.monotonic() <= self._deadline:
            return True
        was_last, self._is_last = self._is_last, True
        return not was_last
