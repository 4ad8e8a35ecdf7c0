"""Makes one home of embedding servers that keep parity: the loss of a server stops nobody.

It is a `ServedHome` with two differences. Rows are placed in stripes. And a call that fails because
a server is lost is made again, until the server's successor answers it. The home of trainer 0 has a
`Leader`, which looks for lost servers and starts their successors.

If more servers are lost than parity makes up for, calls raise ServerLost, as they do without
parity. `clear` then has all servers begin anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn, TypeVar

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import Checked
from recpoint.embeddings.home.forms import TableForm
from recpoint.embeddings.home.ranks import rank_and_count
from recpoint.embeddings.parity.differences import KEPT_BYTES
from recpoint.embeddings.parity.leader import Leader
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.replacement import State
from recpoint.embeddings.parity.stripe_check import Verdict
from recpoint.embeddings.parity.stripes import Parity, Stripes, stripes_of
from recpoint.embeddings.server.home import (
    FrozenAt,
    Link,
    PlacedRows,
    ServedHome,
    ServedTable,
)
from recpoint.embeddings.server.led_server import CommandedServer, Servers, add_table, begin
from recpoint.embeddings.server.transport import Greeting, Transport, greeting_seconds
from recpoint.errors import ClusterLost, HomeError, ServerLost, SettingsError
from recpoint.format.servers import AllServers, ServerFacts, ServerState

__all__ = ["ProtectedHome", "made_home"]

T = TypeVar("T")

_LOG: Final = logging.getLogger("recpoint")
_PAUSE_SECONDS: Final = 0.05
#: How long a successor may take to start and to take the place of a lost server.
_START_SECONDS: Final = 60.0
#: What people are told of a server; in all other states it is lost.
_STATES: Final[dict[State, ServerState]] = {State.WHOLE: "up", State.OPEN: "recovering"}


def made_home(
    transports: Sequence[Transport],
    *,
    parity: Parity | None,
    timeout_seconds: float,
    revive: Callable[[int], Transport],
    hosts: Sequence[str] | None = None,
    owner: int | None = None,
    at_close: Callable[[], None] | None = None,
) -> ServedHome:
    """Make this rank's home of servers, with parity or without; see the classes."""
    rank, ranks = rank_and_count()
    if parity is None:
        return ServedHome(
            transports,
            owner=owner,
            trainer=rank,
            trainers=ranks,
            revive=revive,
            at_close=at_close,
        )
    return ProtectedHome(
        transports,
        parity=parity,
        hosts=hosts,
        owner=owner,
        trainer=rank,
        trainers=ranks,
        revive=revive,
        at_close=at_close,
        timeout_seconds=timeout_seconds,
    )


class ProtectedHome(ServedHome):
    """A home whose rows are on embedding servers that keep parity.

    Args:
        transports: one for each server, in the order of the servers; each has an address. The home
            closes them, also if it cannot be made.
        parity: the form of a stripe.
        hosts: for each server the name of its host when the training began; None: this home learns
            them from the servers. All trainers need the same.
        owner, trainer, trainers, revive, at_close: see `ServedHome`. Trainer 0 is the leader. For
            other trainers, `revive` does not wait until the leader has started the server again.
        timeout_seconds: how long a call to a server may take.
        patience_seconds: how long a call is made again while a server is lost. None: longer than it
            takes to find that servers hang, one after another, and to start their successors.

    Raises:
        ServerLost: a server does not answer, or works for another training.
        SettingsError: there are fewer servers than a stripe needs.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        parity: Parity,
        hosts: Sequence[str] | None = None,
        owner: int | None = None,
        trainer: int = 0,
        trainers: int = 1,
        revive: Callable[[int], Transport] | None = None,
        at_close: Callable[[], None] | None = None,
        timeout_seconds: float = 60.0,
        patience_seconds: float | None = None,
    ) -> None:
        try:
            parity.require_servers(len(transports))
        except SettingsError:
            for one in transports:
                one.close()
            raise
        self._parity = parity
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = (
            2 * timeout_seconds + _START_SECONDS if patience_seconds is None else patience_seconds
        )
        self._all: dict[str, ServedTable] = {}  # also for successors of lost servers
        self._leader: Leader | None = None  # of trainer 0
        self._was_given_up = False  # as another trainer has heard
        self._is_closed = False
        super().__init__(
            transports,
            owner=owner,
            trainer=trainer,
            trainers=trainers,
            revive=revive,
            at_close=at_close,
        )
        self._hosts = tuple(hosts or (greeting.host for greeting in self.greetings))
        if trainer == 0:
            try:
                self._leader = self._begun_leader()
                self._leader.watch()
                _LOG.info(
                    "%d embedding servers keep parity: it takes %.3g %% of the memory for rows and "
                    "row states, and on each server up to %d MiB for messages of the others",
                    len(transports),
                    100 * parity.parity / parity.data,
                    (len(transports) - 1) * KEPT_BYTES >> 20,
                )
            except BaseException:
                self._end_calls()
                raise

    def _begun_leader(self) -> Leader:
        servers = Servers(
            links=self._servers,
            tables=self._all,
            table=partial(_table_on, parity=self._parity, hosts=self.hosts),
            parity=self._parity,
            hosts=self.hosts,
            owner=self.owner,
            trainer=self._trainer,
            greeting_seconds=greeting_seconds(self._timeout_seconds),
            revive=self._revive,
        )
        led = [CommandedServer(number, servers) for number in range(len(self._servers))]
        return Leader(led, self._parity.parity)

    @property
    def hosts(self) -> tuple[str, ...]:
        """For each server the name of its host when the training began."""
        return self._hosts

    def _command_begin(self, server: Link, greeting: Greeting) -> int:
        return begin(server.transport, greeting, self.owner, 0)

    # Where rows are, and calls that outlive a server.

    def _made(self, form: TableForm) -> ServedTable:
        name = form.table
        made = self._all[name] = _table_on(form, parity=self._parity, hosts=self.hosts)
        generation = 0
        if self._leader is not None:
            generation = self._leader.add_table(name)
            self._tell_size(made)

        def add(server: int) -> None:
            link = self._servers[server]
            self._repeated([made], server, lambda: add_table(link, server, made, generation))

        self.at_all(add)
        return made

    def _tell_size(self, made: ServedTable) -> None:
        placement, form = made.placement, made.form
        assert isinstance(placement, Stripes)
        parity_rows = sum(placement.parity_slots(one) for one in range(self.servers))
        _LOG.info(
            "table %r on embedding servers: up to %.1f MB for rows and row states, and %.1f MB for "
            "their parity",
            form.table,
            form.rows * form.record_bytes / 1e6,
            parity_rows * (form.record_bytes + 1) / 1e6,
        )

    def _fetch_at(
        self, server: int, rows: Sequence[PlacedRows], frozen: FrozenAt | None
    ) -> list[Tensor]:
        fetch = super()._fetch_at
        if frozen is None:
            tables = [one.table for one in rows]
            return self._repeated(tables, server, lambda: fetch(server, rows, None))
        # Frozen rows end with their server. It may have to wait for another one.
        patience = _Patience(self._patience_seconds)
        while True:
            try:
                return fetch(server, rows, frozen)
            except OutOfStep as error:
                if not self._may_go_on(patience, server):
                    raise self._named(error) from error
                time.sleep(_PAUSE_SECONDS)

    def _write_at(self, server: int, rows: Sequence[PlacedRows]) -> None:
        write = super()._write_at
        self._repeated([one.table for one in rows], server, lambda: write(server, rows))

    def _freeze_at(self, server: int, table: ServedTable, rows: range) -> FrozenAt:
        freeze = super()._freeze_at
        return self._repeated([table], server, lambda: freeze(server, table, rows))

    def _check(self, table: ServedTable, ids: Tensor) -> Checked:
        placement = table.placement
        assert isinstance(placement, Stripes)
        stripes = torch.div(ids, placement.data, rounding_mode="floor").unique_consecutive()
        servers, slots = placement.parity_in(stripes, 0)
        found = torch.full_like(stripes, int(Verdict.UNKNOWN), dtype=torch.uint8)
        why: list[HomeError | OutOfStep] = []

        def check(server: int) -> None:
            chosen = (servers == server).nonzero().view(-1)
            link = self._servers[server]
            if not len(chosen):
                return
            transport = link.transport
            try:
                found[chosen] = transport.check(
                    table.form.table, slots[chosen], incarnation=link.incarnation
                )
            except (HomeError, OutOfStep) as error:
                # Stripes with members on a lost server stay unknown.
                if not isinstance(error, (ServerLost, OutOfStep)) and transport is link.transport:
                    raise
                why.append(error)

        self.at_all(check)
        if why and not self.being_recovered:
            _LOG.warning(
                "table %r: stripes could not be compared with their parity: %s",
                table.form.table,
                why[0],
            )
        off = (found >= Verdict.DIFFERS).nonzero().view(-1)
        if len(off):
            self._refuse_damaged(
                table, placement, int(stripes[off[0]]), int(found[off[0]]), len(off)
            )
        fits = int((found == Verdict.FITS).sum())
        return Checked(stripes=fits, unknown=len(found) - fits)

    def _refuse_damaged(
        self, table: ServedTable, placement: Stripes, stripe: int, verdict: int, count: int
    ) -> NoReturn:
        rows = range(stripe * placement.data, min((stripe + 1) * placement.data, placement.rows))
        places = placement.members_of(stripe)
        there = [*places[: len(rows)], *places[placement.data :]]
        where = ", ".join(str(server + 1) for server in there)
        found = f"rows {rows.start} to {rows.stop - 1} that do not fit their parity"
        if verdict >= Verdict.DAMAGED:
            member = verdict - Verdict.DAMAGED
            what = f"row {rows.start + member}" if member < len(rows) else "a parity row"
            if member < len(rows) or placement.data <= member < len(places):
                at = places[member] + 1
                found = f"{what} on embedding server {at} that does not fit the others"
        more = f"; {count} such stripes" if count > 1 else ""
        raise HomeError(
            f"stripe {stripe} of table {table.form.table!r}, on embedding servers {where}",
            found=f"{found}{more}",
            expected="parity that was computed of these rows",
            next_step="restore the last checkpoint, and look at the memory of these machines",
        )

    def _repeated(self, tables: Sequence[ServedTable], server: int, act: Callable[[], T]) -> T:
        """Make a call, again and again while a server is lost that parity makes up for."""
        patience: _Patience | None = None
        while True:
            link = self._servers[server]
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
                if self._leader is None:
                    self._follow(server)
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
        if self._leader is not None:
            self._leader.look()
        elif not self._was_given_up:
            others = (one for one in range(len(self._servers)) if one != server)
            self._was_given_up = any(map(self._says_give_up, others))
        return not self._has_given_up and is_in_time

    @property
    def _has_given_up(self) -> bool:
        return self._was_given_up if self._leader is None else self._leader.has_given_up

    def _says_give_up(self, number: int) -> bool:
        """Whether a server knows that the leader has given up."""
        link = self._servers[number]
        try:
            said = link.transport.command("known", {}, incarnation=link.incarnation)
        except (HomeError, OutOfStep):
            return False
        return bool(said["has_given_up"])

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
        here = self._servers[server]
        with here.lock:
            seconds = greeting_seconds(self._timeout_seconds)
            try:
                greeting = here.transport.hello(within_seconds=seconds)
            except ServerLost:
                if self._revive is None:
                    return
                fresh = None
                try:
                    fresh = self._revive(server)
                    greeting = fresh.hello(within_seconds=seconds)
                except ServerLost:
                    if fresh is not None:
                        fresh.close()
                    return
                old, here.transport = here.transport, fresh
                old.close()
            if greeting.owner == self.owner:
                here.incarnation, here.greeting = greeting.incarnation, greeting

    # What the leader knows.

    @property
    def being_recovered(self) -> tuple[int, ...]:
        """Numbers of servers whose rows are not all recovered yet, as far as the leader knows."""
        return () if self._leader is None else self._leader.not_whole

    def servers_now(self) -> AllServers | None:
        """See `Home`. Only the home of trainer 0 knows which servers are not whole."""
        found = super().servers_now()
        if found is None or self._leader is None:
            return found
        each = tuple(map(self._as_led, found.each, self._leader.states))
        return AllServers(
            parity=self._parity.parity, has_given_up=self._leader.has_given_up, each=each
        )

    def _as_led(self, server: ServerFacts, state: State) -> ServerFacts:
        assert self._leader is not None  # who calls has looked
        number = server.number - 1
        loss = self._leader.losses.get(number)
        known_rows = server.rows
        if state is State.OPEN:
            known_rows -= min(known_rows, self._leader.missing_rows.get(number, known_rows))
        elif state is not State.WHOLE:
            known_rows = 0
        return server.model_copy(
            update={
                "state": _STATES.get(state, "lost"),
                "known_rows": known_rows,
                "lost_ms": None if loss is None else loss.lost_ms,
                "whole_ms": None if loss is None else loss.whole_ms,
            }
        )

    @property
    def lost_servers(self) -> int:
        """See `Home`."""
        return len(self.being_recovered)

    @property
    def lost_rows(self) -> int:
        """See `Home`."""
        return 0 if self._leader is None else self._leader.lost_rows

    # Clears, and the end.

    def clear(self, table: str) -> None:
        """Forget all rows of a table. If servers were lost, all may begin anew; see `Home.clear`.

        The leader clears for all trainers. See `Leader.clear`, also for its errors.
        """
        here = self._tables.get(table)
        here.require_unfrozen()
        here.forget_batches()
        if self._leader is None:
            self._was_given_up = False
            return
        try:
            self._leader.clear(table)
        except OutOfStep as error:
            raise self._named(error) from error

    def close(self) -> None:
        """Close the transports; the recovery of lost servers ends."""
        self._is_closed = True
        if self._leader is not None:
            self._leader.end()
        super().close()


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


def _table_on(form: TableForm, *, parity: Parity, hosts: Sequence[str]) -> ServedTable:
    stripes = stripes_of(form.table, rows=form.rows, parity=parity, hosts=hosts)
    return ServedTable(form, stripes, len(hosts))
