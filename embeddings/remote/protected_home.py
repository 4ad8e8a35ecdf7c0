"""Makes one home of embedding servers that keep parity: the loss of a server stops nobody.

It is a `ServedHome` with three differences. Rows are placed in stripes. A call that fails because a
server is lost is made again, until the server's successor answers it. And one trainer, the leader,
looks for lost servers, starts their successors and has all servers join each other.

If more servers are lost than parity makes up for, calls raise ServerLost, as they do without
parity. `clear` then has all servers begin anew.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from torch import Tensor

from recpoint.embeddings.home_tables import TableForm
from recpoint.embeddings.parity.differences import Unsettled
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.recovery import Led, Recovery
from recpoint.embeddings.parity.stripes import Parity, Stripes, stripes_of
from recpoint.embeddings.remote.rank_agreement import rank_and_count
from recpoint.embeddings.remote.served_home import (
    FrozenAt,
    Link,
    PlacedRows,
    ServedHome,
    ServedTable,
)
from recpoint.embeddings.remote.transport import Greeting, Transport
from recpoint.errors import HomeError, ServerLost

__all__ = ["ProtectedHome", "made_home"]

T = TypeVar("T")

_LOG: Final = logging.getLogger("recpoint")
#: How often the leader looks whether all servers live, and how far recoveries are.
_LOOK_SECONDS: Final = 0.5
_PAUSE_SECONDS: Final = 0.05
#: How often the log says how far a recovery is.
_TELL_SECONDS: Final = 10.0


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
        patience_seconds=timeout_seconds,
    )


class ProtectedHome(ServedHome):
    """A home whose rows are on embedding servers that keep parity.

    Args:
        transports: one for each server, in the order of the servers; each has an address. The home
            closes them.
        parity: the form of a stripe.
        hosts: for each server the name of its host when the training began; None: this home learns
            them from the servers. All trainers need the same.
        owner, trainer, trainers, revive, at_close: see `ServedHome`. Trainer 0 is the leader.
        patience_seconds: how long a call is made again while a server is lost.

    Attributes:
        hosts: as given or learned.

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
        patience_seconds: float = 60.0,
    ) -> None:
        parity.require_servers(len(transports))
        self._parity = parity
        self._is_leader = trainer == 0
        self._patience_seconds = patience_seconds
        self._round = 0
        self._generations: dict[str, int] = {}
        self._all: dict[str, ServedTable] = {}
        self._recovery = Recovery()
        self._being_recovered: dict[int, float] = {}  # server -> time of its loss
        self._unfinished: set[int] = set()  # forgotten by the others, and their successors not open
        self._has_given_up = False
        self._told = 0.0
        self._leading = threading.Lock()
        self._is_over = threading.Event()
        super().__init__(
            transports,
            owner=owner,
            trainer=trainer,
            trainers=trainers,
            revive=revive,
            at_close=at_close,
        )
        self.hosts = tuple(hosts or (greeting.host for greeting in self.greetings))
        self._watch: threading.Thread | None = None
        if self._is_leader:
            self._protect_all()
            self._watch = threading.Thread(
                target=self._look_again, name="recpoint-watch", daemon=True
            )
            self._watch.start()

    # Where rows are, and calls that outlive a server.

    def _placed(self, form: TableForm) -> Stripes:
        return stripes_of(form.table, rows=form.rows, parity=self._parity, hosts=self.hosts)

    def _made(self, form: TableForm) -> ServedTable:
        made = ServedTable(form, self._placed(form), len(self._servers))
        self._all[form.table] = made  # so that successors of lost servers get it, too

        def add(server: int) -> None:
            self._repeated([made], server, lambda: self._add_again(server, made))

        self._at_all(add)
        return made

    def _fetch_at(
        self, server: int, rows: Sequence[PlacedRows], frozen: FrozenAt | None
    ) -> list[Tensor]:
        fetch = super()._fetch_at
        if frozen is not None:  # frozen rows end with their server
            return fetch(server, rows, frozen)
        tables = [one.table for one in rows]
        return self._repeated(tables, server, lambda: fetch(server, rows, None))

    def _write_at(self, server: int, rows: Sequence[PlacedRows]) -> None:
        write = super()._write_at
        self._repeated([one.table for one in rows], server, lambda: write(server, rows))

    def _freeze_at(self, server: int, table: ServedTable, rows: range) -> FrozenAt:
        freeze = super()._freeze_at
        return self._repeated([table], server, lambda: freeze(server, table, rows))

    def _repeated(self, tables: Sequence[ServedTable], server: int, act: Callable[[], T]) -> T:
        """Make a call, again and again while a server is lost that parity makes up for."""
        deadline = None
        while True:
            link = self._servers[server]
            transport = link.transport
            for table in tables:
                table.parts[server].incarnation = link.incarnation
            try:
                return act()
            except (HomeError, OutOfStep) as error:
                if not isinstance(error, (ServerLost, OutOfStep)) and transport is link.transport:
                    raise  # else the leader has closed the transport to a lost server meanwhile
                if self._is_leader:
                    self._look()
                now = time.monotonic()
                # The call itself may have taken long, if a server hangs.
                deadline = deadline or now + self._patience_seconds
                if self._has_given_up or self._is_over.is_set() or now > deadline:
                    raise self._named(error) from error
                time.sleep(_PAUSE_SECONDS)
                if not self._is_leader:
                    self._has_given_up = any(map(self._says_give_up, range(len(self._servers))))
                    if not self._has_given_up:
                        self._follow(server)

    def _named(self, error: HomeError | OutOfStep) -> HomeError:
        if self._has_given_up:
            lost = sorted(self._being_recovered)  # as rank 0 knows
            return ServerLost(
                f"embedding servers {self._names(lost)}".rstrip(),
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

    def _names(self, numbers: Sequence[int]) -> str:
        return ", ".join(str(number + 1) for number in numbers)

    def _follow(self, server: int) -> None:
        """Learn the incarnation, and the address, of a server that the leader may have replaced."""
        here = self._servers[server]
        with here.lock:
            try:
                greeting = here.transport.hello()
            except ServerLost:
                if self._revive is None:
                    return
                fresh = None
                try:
                    fresh = self._revive(server)
                    greeting = fresh.hello()
                except ServerLost:
                    if fresh is not None:
                        fresh.close()
                    return
                old, here.transport = here.transport, fresh
                old.close()
            if greeting.owner == self.owner:
                here.incarnation, here.greeting = greeting.incarnation, greeting

    def _says_give_up(self, number: int) -> bool:
        """Whether a server knows that the leader has given up."""
        try:
            return bool(self._lead(number, "known")["has_given_up"])
        except (ServerLost, OutOfStep):
            return False

    # The leader.

    def _command_begin(self, server: Link, greeting: Greeting) -> int:
        begun = server.transport.command(
            "begin",
            {"owner": self.owner, "round": self._round, "is_protected": 1},
            incarnation=greeting.incarnation,
        )
        return int(begun["incarnation"] or 0)

    def _look_again(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            try:
                self._look()
            except HomeError as error:
                _LOG.warning("embedding servers: %s", error)

    def _look(self) -> None:
        """Replace servers that are lost, as far as parity makes up for them."""
        with self._leading:
            if self._has_given_up or self._is_over.is_set():
                return
            lost = [
                number
                for number in range(len(self._servers))
                if number in self._unfinished or not self._lives(number)
            ]
            self._note_progress(lost)
            if not lost:
                return
            now = time.monotonic()
            for number in lost:
                self._being_recovered[number] = now
            self.lost_servers = len(self._being_recovered)
            if len(self._being_recovered) > self._parity.parity:
                self._give_up(lost)
                _LOG.error(
                    "embedding servers: %s lost or not recovered yet, of which parity makes up for "
                    "%d; a restore of the last checkpoint starts them again",
                    self._names(sorted(self._being_recovered)),
                    self._parity.parity,
                )
                return
            for number in lost:
                _LOG.warning(
                    "embedding server %d is lost; its rows are recovered while training goes on",
                    number + 1,
                )
            try:
                self._replace(lost)
            except (ServerLost, OutOfStep) as error:
                # Another one is lost meanwhile. The next look finds it.
                _LOG.warning("embedding servers: a recovery begins again: %s", error)

    def _give_up(self, lost: Sequence[int]) -> None:
        """Have all trainers raise ServerLost; those that do not lead ask the living servers."""
        self._has_given_up = True
        for number in range(len(self._servers)):
            if number not in lost:
                with suppress(ServerLost, OutOfStep):
                    self._lead(number, "give_up")

    def _lives(self, number: int) -> bool:
        """Whether a server answers, with the rows that it had."""
        server = self._servers[number]
        try:
            return server.transport.hello().incarnation == server.incarnation
        except ServerLost:
            return False

    def _note_progress(self, lost: Sequence[int]) -> None:
        """Learn how far recoveries are, and say so in the log."""
        left: dict[int, int] = {}
        for number, since in list(self._being_recovered.items()):
            if number in lost:
                continue
            try:
                known = self._lead(number, "known")
            except (ServerLost, OutOfStep):
                continue
            left[number] = int(str(known["all"])) - int(str(known["known"]))
            if not left[number]:
                del self._being_recovered[number]
                _LOG.warning(
                    "embedding server %d is recovered after %.1f s: all rows are there, with their "
                    "parity",
                    number + 1,
                    time.monotonic() - since,
                )
        self.lost_servers, self.lost_rows = len(self._being_recovered), sum(left.values())
        now = time.monotonic()
        if self.lost_rows and now > self._told + _TELL_SECONDS:
            self._told = now
            _LOG.warning(
                "embedding servers (%s): %d rows and parity rows are left to recover",
                self._names(sorted(self._being_recovered)),
                self.lost_rows,
            )

    def _replace(self, lost: Sequence[int]) -> None:
        """Have living servers forget lost ones, and start successors that recover their rows."""
        living = [number for number in range(len(self._servers)) if number not in lost]
        # What is not finished is begun again, with another successor.
        self._unfinished.update(lost)
        for number in lost:
            self._recovery.forget(number, {one: _LedServer(self, one) for one in living})
        for number in lost:
            self._begin_successor(number)
        for number in lost:
            self._protect(number, is_lost=True)
            for table in list(self._all.values()):
                self._add_again(number, table, is_lost=True)
        self._join_all(lost)
        for number in lost:
            self._lead(number, "open")
            self._unfinished.discard(number)

    def _begin_successor(self, number: int) -> None:
        server = self._servers[number]
        if self._revive is None:
            raise ServerLost(
                f"embedding server {number + 1}",
                found="no way to start it again",
                expected="a home that can start its servers again",
                next_step="restore the last checkpoint",
            )
        old, server.transport = server.transport, self._revive(number)
        old.close()
        # Another round: if it is the same server after all, it forgets its rows, because the others
        # have forgotten what it sent.
        self._round += 1
        server.incarnation = self._command_begin(server, server.transport.hello())
        server.greeting = server.transport.hello()

    def _add_again(self, number: int, table: ServedTable, *, is_lost: bool = False) -> None:
        self._lead(
            number,
            "add_table",
            table=table.form.table,
            rows=table.placement.slots(number),
            record_bytes=table.form.record_bytes,
            all_rows=table.form.rows,
            generation=self._generations.get(table.form.table, 0),
            is_lost=int(is_lost),
        )

    def _join_all(self, joining: Sequence[int]) -> None:
        """Have all servers exchange messages with those that join."""
        for number in range(len(self._servers)):
            for other in joining:
                if other != number:
                    _, incarnation, host, port = self._place_of(other)
                    self._lead(
                        number, "join", server=other, incarnation=incarnation, host=host, port=port
                    )

    def _protect_all(self) -> None:
        for number in range(len(self._servers)):
            self._protect(number, is_lost=False)
        for number in range(len(self._servers)):
            self._lead(number, "open")

    def _protect(self, number: int, *, is_lost: bool) -> None:
        others = [other for other in range(len(self._servers)) if other != number]
        self._lead(
            number,
            "protect",
            number=number,
            data=self._parity.data,
            parity=self._parity.parity,
            hosts=json.dumps(self.hosts),
            peers=json.dumps([self._place_of(other) for other in others]),
            is_lost=int(is_lost),
        )

    def _place_of(self, number: int) -> tuple[int, int, str, int]:
        server = self._servers[number]
        address = server.transport.listens_at
        assert address is not None  # who makes the home sees to that
        return number, server.incarnation, address[0], address[1]

    def _lead(self, to: int, command: str, **arguments: int | str) -> dict[str, object]:
        server = self._servers[to]
        return dict(server.transport.command(command, arguments, incarnation=server.incarnation))

    @property
    def being_recovered(self) -> tuple[int, ...]:
        """Numbers of servers whose rows are not all recovered yet, as far as the leader knows."""
        return tuple(sorted(self._being_recovered))

    # Clears, and the end.

    def clear(self, table: str) -> None:
        """Forget all rows of a table. If servers were lost, all begin anew; see `Home.clear`.

        The leader clears for all trainers.
        """
        here = self._tables.get(table)
        here.require_unfrozen()
        here.forget_batches()
        if not self._is_leader:
            self._has_given_up = False
            return
        with self._leading:
            if (
                self._has_given_up
                or self._unfinished
                or not all(map(self._lives, range(len(self._servers))))
            ):
                self._begin_anew()
            generation = self._generations[table] = self._generations.get(table, 0) + 1

            def clear(server: int) -> None:
                self._add_again(server, here)
                part = here.parts[server]
                with part.lock:
                    part.incarnation = self._servers[server].incarnation
                    self._lead(
                        server,
                        "clear",
                        table=table,
                        trainer=self._trainer,
                        batch=next(self._servers[server].numbers),
                        generation=generation,
                    )

            self._at_all(clear)

    def _begin_anew(self) -> None:
        """Have all servers begin without rows, in place of those that are lost."""
        self._has_given_up = True  # until all have begun
        self._round += 1

        def begin(number: int) -> None:
            server = self._servers[number]
            if not self._lives(number):
                self._begin_successor(number)
            else:
                server.incarnation = self._command_begin(server, server.transport.hello())
                server.greeting = server.transport.hello()

        for number in range(len(self._servers)):
            begin(number)
        self._protect_all()
        for table in list(self._all.values()):
            for number in range(len(self._servers)):
                self._add_again(number, table)
        self._recovery.begin_anew()
        self._unfinished.clear()
        self._being_recovered.clear()
        self.lost_servers = self.lost_rows = 0
        self._has_given_up = False

    def close(self) -> None:
        """Close the transports; the recovery of lost servers ends."""
        self._is_over.set()
        if self._watch is not None:
            self._watch.join()
            self._watch = None
        super().close()


class _LedServer(Led):
    """Passes what `Recovery` wants of a living server on to it."""

    def __init__(self, home: ProtectedHome, number: int) -> None:
        self._home = home
        self._number = number

    def lose(self, server: int) -> Unsettled | None:
        said = self._home._lead(self._number, "lose", server=server)["unsettled"]
        return None if said is None else Unsettled.from_json(str(said))

    def take_back(self, server: int, numbers: Sequence[int]) -> None:
        self._home._lead(self._number, "take_back", server=server, numbers=json.dumps([*numbers]))
