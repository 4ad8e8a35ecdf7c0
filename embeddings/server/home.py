"""Makes one home of several embedding servers.

Each table's rows are divided over all servers (`placement.py`). A call asks all servers at the same
time. The rows of all tables that a server has go to it in one request, or in several of bounded
size.

Each table remembers the incarnation in which each server has its rows. A call names it, so a server
that was started again refuses the call, and `ServerLost` is raised. Only `clear`, and `add_table`
of a new table, take the servers as they are now: the table then has no rows anyway.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NamedTuple, Never, TypeVar

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import Checked, FrozenRows, Home, TableRows
from recpoint.embeddings.home.forms import BatchOrder, HomeTables, TableForm
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.stripes import Stripes
from recpoint.embeddings.server.placement import Placement, placement_of
from recpoint.embeddings.server.transport import Greeting, Transport, Value
from recpoint.errors import HomeError, ServerLost
from recpoint.format.servers import AllServers, ServerFacts
from recpoint.kernels import row_gather

__all__ = ["FrozenAt", "FrozenAtServers", "Link", "PlacedRows", "ServedHome", "ServedTable"]

T = TypeVar("T")

#: Slots and records that one request carries, unless one record is longer; and its tables.
_REQUEST_BYTES: Final = 4 << 20
_MOST_TABLES: Final = 128
#: Threads for each server: as many callers as a cache has.
_CALLS_AT_ONCE: Final = 4
_MOST_THREADS: Final = 64


class ServedHome(Home):
    """A home whose rows are on embedding servers.

    Args:
        transports: one for each server, in the order of the servers. The home closes them, also if
            it cannot be made.
        owner: number of the training that the servers work for, as `owner` of the home that took
            them over; None: this home takes them over, and they forget what they have.
        trainer: number of this trainer among those with the same owner.
        trainers: how many these are.
        revive: called with the number of a server that does not answer. Returns a transport to the
            server that is there instead. None: there is none.
        at_close: called once the transports are closed.

    Attributes:
        owner: number of the training that the servers work for.

    Raises:
        ServerLost: a server does not answer, or works for another training.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        owner: int | None = None,
        trainer: int = 0,
        trainers: int = 1,
        revive: Callable[[int], Transport] | None = None,
        at_close: Callable[[], None] | None = None,
    ) -> None:
        if not transports:
            raise ValueError("transports: none, expected one for each server")
        self._trainer = trainer
        self.trainers = trainers
        self._revive = revive
        self._at_close = at_close
        self._servers = [Link(transport) for transport in transports]
        weakref.finalize(self, _close_all, self._servers)  # if nobody closes it
        self._tables: HomeTables[ServedTable] = HomeTables("the home on embedding servers")
        self._threads = ThreadPoolExecutor(
            min(_MOST_THREADS, _CALLS_AT_ONCE * len(transports)),
            thread_name_prefix="recpoint-servers",
        )
        self.owner = secrets.randbelow((1 << 63) - 1) + 1 if owner is None else owner
        try:
            self.at_all(lambda server: self._begin(server, takes_over=owner is None))
        except BaseException:
            self._end_calls()
            raise

    def add_table(self, table: str, *, rows: int, record_bytes: int) -> None:
        """Make room for a table on all servers.

        Raises:
            ServerLost: a server does not answer, or was started again, and other trainers may have
                written rows of the table to it before. It may be called again.
        """
        self._tables.add(TableForm(table, rows, record_bytes), self._made)

    def _made(self, form: TableForm) -> ServedTable:
        made = ServedTable(form, self._placed(form), len(self._servers))

        def add(number: int) -> None:
            known = self._servers[number].incarnation
            made.parts[number].incarnation = self._add(number, made)
            if self.trainers > 1 and made.parts[number].incarnation != known:
                self._refuse_restarted(number)

        self.at_all(add)
        return made

    def _refuse_restarted(self, number: int) -> Never:
        raise ServerLost(
            f"embedding server {number + 1} of {len(self._servers)}",
            found="a server that was started again since",
            expected="the server that may have rows of other trainers",
            next_step="restore the last checkpoint: that gives the servers their rows again",
        )

    def _placed(self, form: TableForm) -> Placement | Stripes:
        """Return where the rows of a table are."""
        return placement_of(form.table, rows=form.rows, servers=len(self._servers))

    def _add(self, number: int, table: ServedTable) -> int:
        """Add a table at a server as it is now; returns the server's incarnation."""
        incarnation = self._begin(number, takes_over=False)
        self._servers[number].transport.command(
            "add_table",
            {
                "table": table.form.table,
                "rows": table.placement.slots(number),
                "record_bytes": table.form.record_bytes,
                "all_rows": table.form.rows,
            },
            incarnation=incarnation,
        )
        return incarnation

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Read records from all servers at the same time."""
        return self.fetch_all([TableRows(table, ids, out)])[0]

    def fetch_all(self, wanted: Sequence[TableRows]) -> list[Tensor]:
        """Read records of several tables from all servers at the same time."""
        tables = [self._tables.get(one.table) for one in wanted]
        for table, one in zip(tables, wanted, strict=True):
            table.form.require_records(one.ids, "out", one.records)
        return self._fetch(tables, wanted, None)

    def _fetch(
        self,
        tables: Sequence[ServedTable],
        wanted: Sequence[TableRows],
        frozen: Sequence[FrozenAt] | None,
    ) -> list[Tensor]:
        split = [table.placement.split(one.ids) for table, one in zip(tables, wanted, strict=True)]
        if len(self._servers) == 1:
            slots = [
                PlacedRows(table, of_servers[0][1], one.records)
                for table, of_servers, one in zip(tables, split, wanted, strict=True)
            ]
            return self._fetch_at(0, slots, None if frozen is None else frozen[0])
        has = [torch.zeros(len(one.ids), dtype=torch.bool, device="cpu") for one in wanted]

        def fetch(server: int) -> None:
            chosen = [number for number, found in enumerate(split) if len(found[server][1])]
            rows = [PlacedRows.room(tables[one], split[one][server][1]) for one in chosen]
            found = self._fetch_at(server, rows, None if frozen is None else frozen[server])
            for number, placed, is_there in zip(chosen, rows, found, strict=True):
                positions, there = split[number][server][0], is_there.nonzero().view(-1)
                row_gather.move(placed.records, there, wanted[number].records, positions[there])
                has[number][positions] = is_there

        self.at_all(fetch)
        return has

    def _fetch_at(
        self, server: int, rows: Sequence[PlacedRows], frozen: FrozenAt | None
    ) -> list[Tensor]:
        transport = self._servers[server].transport
        found: dict[ServedTable, list[Tensor]] = {one.table: [] for one in rows}
        for request in _requests(rows, server):
            incarnation = request[0].table.parts[server].incarnation
            has = transport.fetch(
                [one.named for one in request],
                incarnation=incarnation if frozen is None else frozen.incarnation,
                frozen=None if frozen is None else frozen.number,
            )
            for one, there in zip(request, has, strict=True):
                found[one.table].append(there)
        return [torch.cat(found[one.table]) for one in rows]

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        """Store records at all servers at the same time."""
        self.write_back_all([TableRows(table, ids, records)], batch=batch)

    def write_back_all(self, changed: Sequence[TableRows], *, batch: int) -> None:
        """Store records of several tables at all servers at the same time."""
        tables = [self._tables.get(one.table) for one in changed]
        for table, one in zip(tables, changed, strict=True):
            table.form.require_records(one.ids, "records", one.records)
        with ExitStack() as batches:
            for table in tables:
                batches.enter_context(table.next_batch(batch))
            self._write(tables, changed)

    def _write(self, tables: Sequence[ServedTable], changed: Sequence[TableRows]) -> None:
        split = [table.placement.split(one.ids) for table, one in zip(tables, changed, strict=True)]

        def write(server: int) -> None:
            rows = []
            for table, of_servers, one in zip(tables, split, changed, strict=True):
                positions, slots = of_servers[server]
                if len(self._servers) == 1:
                    rows.append(PlacedRows(table, slots, one.records))
                elif len(slots):
                    rows.append(PlacedRows.room(table, slots))
                    row_gather.gather(one.records, positions, rows[-1].records)
            self._write_at(server, rows)

        self.at_all(write)

    def _write_at(self, server: int, rows: Sequence[PlacedRows]) -> None:
        here = self._servers[server]
        with ExitStack() as locks:
            # In one order, so that no two writers wait for each other.
            for one in sorted(rows, key=lambda one: one.table.form.table):
                locks.enter_context(one.table.parts[server].lock)
            for request in _requests(rows, server):
                here.transport.write_back(
                    [one.named for one in request],
                    incarnation=request[0].table.parts[server].incarnation,
                    trainer=self._trainer,
                    batch=next(here.numbers),
                )

    def freeze(self, table: str, rows: range) -> FrozenRows:
        """Freeze the rows at all servers."""
        here = self._tables.get(table)
        here.form.require_rows(rows)
        return FrozenAtServers(self, here, rows)

    def clear(self, table: str) -> None:
        """Forget all rows of a table. Servers that were started again are used again for it."""
        here = self._tables.get(table)
        here.require_unfrozen()

        def clear(server: int) -> None:
            part = here.parts[server]
            with part.lock:
                part.incarnation = self._add(server, here)
                self._servers[server].transport.command(
                    "clear",
                    {
                        "table": table,
                        "trainer": self._trainer,
                        "batch": next(self._servers[server].numbers),
                    },
                    incarnation=part.incarnation,
                )

        self.at_all(clear)
        here.forget_batches()

    # For those who have servers stage their rows.

    @property
    def servers(self) -> int:
        """How many servers there are."""
        return len(self._servers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """For each server the name of its host, as placements know it."""
        return tuple(greeting.host for greeting in self.greetings)

    def transport(self, server: int) -> Transport:
        """Return what calls a server now."""
        return self._servers[server].transport

    def incarnation(self, server: int) -> int:
        """Return the incarnation of a server as it is now."""
        return self._servers[server].incarnation

    def placement(self, table: str) -> Placement | Stripes:
        """Return where the rows of a table are.

        Raises:
            HomeError: the table was not added, or the home is closed.
        """
        return self._tables.get(table).placement

    def rows_on(self, server: int, table: str) -> int:
        """Return how many rows of a table a server has, without parity rows; raises as above."""
        here = self._tables.get(table)
        return len(here.placement.slots_of(server, range(here.form.rows)))

    def command(
        self, server: int, name: str, arguments: Mapping[str, Value]
    ) -> Mapping[str, Value]:
        """Have a server do something; see `Transport.command`."""
        here = self._servers[server]
        return here.transport.command(name, arguments, incarnation=here.incarnation)

    @property
    def greetings(self) -> tuple[Greeting, ...]:
        """The answers of the servers to `hello` when this home began to use them."""
        return tuple(server.greeting for server in self._servers if server.greeting is not None)

    def size_bytes(self) -> dict[str, int]:
        """Add up what the servers take."""
        self._tables.all()
        total = {"rows": 0, "index": 0, "frozen": 0, "buffers": 0, "disk": 0}
        for sizes in self.at_all(self._sizes):
            for role in total:
                total[role] += sizes[role]
        return total

    def server_bytes(self, number: int) -> tuple[int, int]:
        """Ask one server; see `Home.server_bytes`."""
        sizes = self._sizes(number)
        disk = sizes.pop("disk")
        return sum(sizes.values()), disk

    def servers_now(self) -> AllServers | None:
        """See `Home`. All are up: without parity, only a call finds that one is lost."""
        if not self._is_open():
            return None
        each = tuple(self._facts(number) for number in range(len(self._servers)))
        return AllServers(parity=0, has_given_up=False, each=each)

    def _facts(self, number: int) -> ServerFacts:
        server = self._servers[number]
        greeting, address = server.greeting, server.transport.listens_at
        rows = sum(table.rows_at[number] for table in self._tables.all())
        return ServerFacts(
            number=number + 1,
            host="" if greeting is None else greeting.host[:255],
            pid=0 if greeting is None else greeting.pid,
            address="" if address is None else f"{address[0]}:{address[1]}",
            state="up",
            rows=rows,
            known_rows=rows,
            memory_bytes=None,
            disk_bytes=None,
            lost_ms=None,
            whole_ms=None,
        )

    def _sizes(self, number: int) -> dict[str, int]:
        server = self._servers[number]
        sizes = server.transport.command("sizes", {}, incarnation=server.incarnation)
        return {role: int(size or 0) for role, size in sizes.items()}

    def close(self) -> None:
        """Close the transports."""
        self._tables.close()
        self._end_calls()
        at_close, self._at_close = self._at_close, None
        if at_close is not None:
            at_close()

    def _end_calls(self) -> None:
        self._threads.shutdown(wait=True)
        _close_all(self._servers)

    def _begin(self, number: int, *, takes_over: bool) -> int:
        """Learn the incarnation that a server has now, and have it work for this training."""
        server = self._servers[number]
        with server.lock:
            try:
                greeting = server.transport.hello()
            except ServerLost:
                if self._revive is None:
                    raise
                fresh = self._revive(number)  # if it raises, this is tried again
                old, server.transport = server.transport, fresh
                old.close()
                greeting = server.transport.hello()
            server.incarnation, server.greeting = greeting.incarnation, greeting
            if greeting.owner != self.owner:
                if greeting.owner and not takes_over:
                    raise ServerLost(
                        f"embedding server {number + 1} of {len(self._servers)}"
                        f" (pid {greeting.pid} on {greeting.host})",
                        found="a server that another training has taken over",
                        expected="a server that works for this training",
                        next_step="end the training that is not wanted, and start the other again",
                    )
                server.incarnation = self._command_begin(server, greeting)
            return server.incarnation

    def _command_begin(self, server: Link, greeting: Greeting) -> int:
        begun = server.transport.command(
            "begin", {"owner": self.owner}, incarnation=greeting.incarnation
        )
        return int(begun["incarnation"] or 0)

    def at_all(self, act: Callable[[int], T]) -> list[T]:
        """Call `act` with each server's number, at the same time; returns what it returned.

        Raises:
            Exception: what the first server's call raised, once all calls have ended.
        """
        last = len(self._servers) - 1
        others = [self._threads.submit(act, number) for number in range(last)]
        try:
            own = act(last)
        finally:
            wait(others)
        return [*(one.result() for one in others), own]

    def _freeze_at(self, server: int, table: ServedTable, rows: range) -> FrozenAt:
        """Freeze rows at one server."""
        part, transport = table.parts[server], self._servers[server].transport
        slots = table.placement.slots_of(server, rows)
        with part.lock:
            batch, incarnation = next(self._servers[server].numbers), part.incarnation
            answer = transport.command(
                "freeze",
                {
                    "table": table.form.table,
                    "start": slots.start,
                    "stop": slots.stop,
                    "trainer": self._trainer,
                    "batch": batch,
                    "open_from": min(part.open, default=batch),
                },
                incarnation=incarnation,
            )
            part.open.add(batch)
        return FrozenAt(int(answer["number"] or 0), batch, incarnation)

    def _check(self, table: ServedTable, ids: Tensor) -> Checked:
        """Compare rows with what else the servers know of them; see `FrozenRows.check`."""
        return Checked()

    def _release_at(self, server: int, table: ServedTable, at: FrozenAt) -> None:
        part, transport = table.parts[server], self._servers[server].transport
        with part.lock:
            part.open.discard(at.batch)
        # If the server is lost, so are its frozen rows. If only the call is lost, the next freeze
        # or `clear` of the table releases them.
        with suppress(HomeError, OutOfStep):
            transport.command("release", {"number": at.number}, incarnation=at.incarnation)

    def _is_open(self) -> bool:
        try:
            self._tables.all()
        except HomeError:
            return False
        return True


class FrozenAt(NamedTuple):
    """Frozen rows at one server: the number of the reader, its batch, and the incarnation."""

    number: int
    batch: int
    incarnation: int


class Link:
    """One server. `lock` is held while its transport or incarnation is renewed.

    `numbers` are those of writes, freezes and clears; they never begin anew.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.numbers = itertools.count(1)
        self.incarnation = 0
        self.greeting: Greeting | None = None
        self.lock = threading.Lock()


def _close_all(links: Sequence[Link]) -> None:
    for link in links:
        link.transport.close()


class _Part:
    """The rows of a table on one server.

    Attributes:
        incarnation: of the server that has them.
        lock: held while a number is drawn and during its call, so that the numbers of a table
            arrive in their order.
        open: numbers of freezes that are open.
    """

    def __init__(self) -> None:
        self.incarnation = 0
        self.lock = threading.Lock()
        self.open: set[int] = set()


class ServedTable:
    """A table on all servers.

    Attributes:
        rows_at: for each server how many rows, and parity rows, belong there.
    """

    def __init__(self, form: TableForm, placement: Placement | Stripes, servers: int) -> None:
        self.form = form
        self.placement = placement
        self.rows_at = tuple(
            len(placement.slots_of(one, range(form.rows)))
            + (placement.parity_slots(one) if isinstance(placement, Stripes) else 0)
            for one in range(servers)
        )
        self.parts = [_Part() for _ in range(servers)]
        self.frozen: set[FrozenAtServers] = set()
        self._batches = BatchOrder(form.table)
        self.lock = threading.Lock()  # guards `frozen` and the batches

    @contextmanager
    def next_batch(self, batch: int) -> Iterator[None]:
        """Refuse a batch before the last one. If the block raises nothing, this is the last one."""
        with self.lock:
            self._batches.require_next(batch)
        yield
        with self.lock:
            self._batches.last = max(batch, self._batches.last or batch)

    def require_unfrozen(self) -> None:
        """Refuse a call while rows are frozen.

        Raises:
            HomeError: says how many readers there are.
        """
        with self.lock:
            if self.frozen:
                raise HomeError(
                    f"table {self.form.table!r}",
                    found=f"{len(self.frozen)} readers of frozen rows",
                    expected="none when a table is cleared",
                    next_step="release them first",
                )

    def forget_batches(self) -> None:
        """Accept any batch next."""
        with self.lock:
            self._batches.last = None


class PlacedRows(NamedTuple):
    """Rows of a table at one server: their slots, int64 [n], and records."""

    table: ServedTable
    slots: Tensor
    records: Tensor

    @staticmethod
    def room(table: ServedTable, slots: Tensor) -> PlacedRows:
        """Return rows with memory for their records."""
        size = len(slots), table.form.record_bytes
        return PlacedRows(table, slots, torch.empty(size, dtype=torch.uint8, device="cpu"))

    @property
    def named(self) -> TableRows:
        """As a request has them."""
        return TableRows(self.table.form.table, self.slots, self.records)


def _requests(rows: Sequence[PlacedRows], server: int) -> Iterator[list[PlacedRows]]:
    """Divide rows into what one request to a server carries: each table at most once.

    The rows of one request are those of one incarnation of the server.
    """
    request: list[PlacedRows] = []
    room = _REQUEST_BYTES
    for table, slots, records in rows:
        row_bytes = table.form.record_bytes + 8
        most = max(1, _REQUEST_BYTES // row_bytes)
        for at, part in zip(slots.split(most), records.split(most), strict=True):
            if request and (
                len(at) * row_bytes > room
                or len(request) == _MOST_TABLES
                or request[0].table.parts[server].incarnation != table.parts[server].incarnation
            ):
                yield request
                request, room = [], _REQUEST_BYTES
            request.append(PlacedRows(table, at, part))
            room -= len(at) * row_bytes
    if request:
        yield request


class FrozenAtServers(FrozenRows):
    """Rows that are frozen at all servers."""

    def __init__(self, home: ServedHome, table: ServedTable, rows: range) -> None:
        self._home = home
        self._table = table
        self._rows = rows
        self._is_released = False
        self._at: dict[int, FrozenAt] = {}  # by server
        with table.lock:
            table.frozen.add(self)
        try:
            home.at_all(self._freeze)
        except BaseException:
            self.release()
            raise

    def _freeze(self, server: int) -> None:
        self._at[server] = self._home._freeze_at(server, self._table, self._rows)

    def at(self, server: int) -> FrozenAt:
        """Return the reader at one server."""
        return self._at[server]

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        """Read frozen records from all servers at the same time."""
        form = self._table.form
        self._home._tables.get(form.table)  # raises if the home is closed
        if self._is_released:
            raise HomeError(
                f"frozen rows of table {form.table!r}",
                found="a fetch after release()",
                expected="no fetch after release(), clear() or close()",
                next_step="freeze the rows again",
            )
        form.require_records(ids, "out", out, self._rows)
        frozen = [at for _, at in sorted(self._at.items())]
        return self._home._fetch([self._table], [TableRows(form.table, ids, out)], frozen)[0]

    def check(self, ids: Tensor) -> Checked:
        """Compare rows with their parity, if the servers keep it."""
        return self._home._check(self._table, ids)

    def release(self) -> None:
        """Give the frozen records up at all servers."""
        if self._is_released:
            return
        self._is_released = True
        try:
            if self._home._is_open():
                self._home.at_all(self._release)
        finally:
            with self._table.lock:
                self._table.frozen.discard(self)

    def _release(self, server: int) -> None:
        if server in self._at:
            self._home._release_at(server, self._table, self._at[server])
