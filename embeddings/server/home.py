"""Makes one home of several embedding servers.

Each table's rows are divided over all servers. A call asks all servers at the same
time. The rows of all tables that a server has go to it in one request, or in several of bounded
size.

Each table remembers the incarnation in which each server has its rows. A call names it, so a server
that was started again refuses the call. What the home then does, and where it places rows, is its
`CallPolicy`: without parity it makes each call once, with parity it waits for the successor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import Checked, FrozenRows, Home, TableRows
from recpoint.embeddings.home.forms import HomeTables, TableForm
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.stripes import Stripes
from recpoint.embeddings.server.calls import CallOnce, CallPolicy
from recpoint.embeddings.server.links import ServerLinks
from recpoint.embeddings.server.messages import AskSizes, Fetch, Freeze, Release, WriteBack
from recpoint.embeddings.server.placed_rows import FrozenAt, PlacedRows, ServerTable, requests
from recpoint.embeddings.server.placement import Placement
from recpoint.embeddings.server.transport import Greeting, Transport
from recpoint.errors import HomeError
from recpoint.format.servers import AllServers, ServerFacts
from recpoint.kernels import row_gather

__all__ = ["FrozenAtServers", "ServedHome"]


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
        policy: makes what says where rows are placed, and what a call does about a lost server.

    Attributes:
        owner: number of the training that the servers work for.
        calls: what `policy` made.

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
        policy: Callable[[ServerLinks], CallPolicy] = CallOnce,
    ) -> None:
        self._servers = ServerLinks(
            transports, owner=owner, trainer=trainer, trainers=trainers, revive=revive
        )
        self.owner, self.trainers = self._servers.owner, trainers
        self._at_close = at_close
        weakref.finalize(self, self._servers.close)  # if nobody closes it
        self._tables: HomeTables[ServerTable] = HomeTables("the home on embedding servers")
        self.calls = policy(self._servers)
        try:
            self._servers.begin_all(self.calls.begin)
            self.calls.start()
        except BaseException:
            self._servers.end()
            raise

    def add_table(self, table: str, *, rows: int, record_bytes: int) -> None:
        """Make room for a table on all servers.

        Raises:
            ServerLost: see `CallPolicy.add_table`. It may be called again.
        """
        self._tables.add(TableForm(table, rows, record_bytes), self._added)

    def _added(self, form: TableForm) -> ServerTable:
        table = self.calls.place(form)
        self.calls.add_table(table)
        return table

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Read records from all servers at the same time."""
        return self.fetch_all([TableRows(table, ids, out)])[0]

    def fetch_all(self, wanted: Sequence[TableRows]) -> list[Tensor]:
        """Read records of several tables from all servers at the same time."""
        tables = [self._tables.get(rows.table) for rows in wanted]
        for table, rows in zip(tables, wanted, strict=True):
            table.form.require_records(rows.ids, "out", rows.records)
        return self._fetch(tables, wanted, None)

    def _fetch(
        self,
        tables: Sequence[ServerTable],
        wanted: Sequence[TableRows],
        frozen: Sequence[FrozenAt] | None,
    ) -> list[Tensor]:
        split = [
            table.placement.split(rows.ids) for table, rows in zip(tables, wanted, strict=True)
        ]
        if len(self._servers) == 1:
            placed_rows = [
                PlacedRows(table, by_server[0][1], rows.records)
                for table, by_server, rows in zip(tables, split, wanted, strict=True)
            ]
            return self._fetch_at(0, placed_rows, None if frozen is None else frozen[0])
        is_stored = [torch.zeros(len(rows.ids), dtype=torch.bool, device="cpu") for rows in wanted]

        def fetch(server: int) -> None:
            numbers = [
                number for number, by_server in enumerate(split) if len(by_server[server][1])
            ]
            rows = [PlacedRows.room(tables[number], split[number][server][1]) for number in numbers]
            answers = self._fetch_at(server, rows, None if frozen is None else frozen[server])
            for number, placed, answer in zip(numbers, rows, answers, strict=True):
                positions, chosen = split[number][server][0], answer.nonzero().view(-1)
                row_gather.move(placed.records, chosen, wanted[number].records, positions[chosen])
                is_stored[number][positions] = answer

        self._servers.at_all(fetch)
        return is_stored

    def _fetch_at(
        self, server: int, rows: Sequence[PlacedRows], frozen: FrozenAt | None
    ) -> list[Tensor]:
        def fetch() -> list[Tensor]:
            return self._fetch_once(server, rows, frozen)

        if frozen is None:
            return self.calls.call(server, [placed.table for placed in rows], fetch)
        return self.calls.call_frozen(server, fetch)

    def _fetch_once(
        self, server: int, rows: Sequence[PlacedRows], frozen: FrozenAt | None
    ) -> list[Tensor]:
        transport = self._servers[server].transport
        is_stored: dict[ServerTable, list[Tensor]] = {placed.table: [] for placed in rows}
        for request in requests(rows, server):
            incarnation = request[0].table.parts[server].incarnation
            message = Fetch(
                incarnation=incarnation if frozen is None else frozen.incarnation,
                tables=tuple(placed.table.form.table for placed in request),
                frozen=None if frozen is None else frozen.number,
            )
            answers = transport.call(message, [placed.beside for placed in request]).tensors
            for placed, answer in zip(request, answers, strict=True):
                is_stored[placed.table].append(answer)
        return [_joined(is_stored[placed.table]) for placed in rows]

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        """Store records at all servers at the same time."""
        self.write_back_all([TableRows(table, ids, records)], batch=batch)

    def write_back_all(self, changed: Sequence[TableRows], *, batch: int) -> None:
        """Store records of several tables at all servers at the same time."""
        tables = [self._tables.get(rows.table) for rows in changed]
        for table, rows in zip(tables, changed, strict=True):
            table.form.require_records(rows.ids, "records", rows.records)
        with ExitStack() as batches:
            for table in tables:
                batches.enter_context(table.next_batch(batch))
            self._write(tables, changed)

    def _write(self, tables: Sequence[ServerTable], changed: Sequence[TableRows]) -> None:
        split = [
            table.placement.split(rows.ids) for table, rows in zip(tables, changed, strict=True)
        ]

        def write(server: int) -> None:
            rows = []
            for table, by_server, table_rows in zip(tables, split, changed, strict=True):
                positions, slots = by_server[server]
                if len(self._servers) == 1:
                    rows.append(PlacedRows(table, slots, table_rows.records))
                elif len(slots):
                    rows.append(PlacedRows.room(table, slots))
                    row_gather.gather(table_rows.records, positions, rows[-1].records)
            written_tables = [placed.table for placed in rows]
            self.calls.call(server, written_tables, lambda: self._write_once(server, rows))

        self._servers.at_all(write)

    def _write_once(self, server: int, rows: Sequence[PlacedRows]) -> None:
        link = self._servers[server]
        with ExitStack() as locks:
            # In one order, so that no two writers wait for each other.
            for placed in sorted(rows, key=lambda placed: placed.table.form.table):
                locks.enter_context(placed.table.parts[server].lock)
            for request in requests(rows, server):
                message = WriteBack(
                    incarnation=request[0].table.parts[server].incarnation,
                    tables=tuple(placed.table.form.table for placed in request),
                    trainer=self._servers.trainer,
                    batch=next(link.numbers),
                )
                link.transport.call(message, [placed.beside for placed in request])

    def freeze(self, table: str, rows: range) -> FrozenRows:
        """Freeze the rows at all servers."""
        server_table = self._tables.get(table)
        server_table.form.require_rows(rows)
        return FrozenAtServers(self, server_table, rows)

    def clear(self, table: str) -> None:
        """Forget all rows of a table; see also `CallPolicy.clear`."""
        server_table = self._tables.get(table)
        server_table.require_unfrozen()
        self.calls.clear(server_table)

    @property
    def staging_servers(self) -> int:
        """All servers can stage their rows."""
        return self.servers

    @property
    def servers(self) -> int:
        """How many servers there are."""
        return len(self._servers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """For each server the name of its host, as placements know it."""
        return self.calls.hosts

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
        """Return how many rows of a table a server has, without parity rows; raise as above."""
        server_table = self._tables.get(table)
        return len(server_table.placement.slots_of(server, range(server_table.form.rows)))

    @property
    def greetings(self) -> tuple[Greeting, ...]:
        """The answers of the servers to `hello` when this home began to use them."""
        return self._servers.greetings

    @property
    def being_recovered(self) -> tuple[int, ...]:
        """See `CallPolicy`."""
        return self.calls.being_recovered

    @property
    def lost_servers(self) -> int:
        """See `Home`."""
        return len(self.calls.being_recovered)

    @property
    def lost_rows(self) -> int:
        """See `Home`."""
        return self.calls.lost_rows

    def size_bytes(self) -> dict[str, int]:
        """Add up what the servers take."""
        self._tables.all()
        total = {"rows": 0, "index": 0, "frozen": 0, "buffers": 0, "disk": 0}
        for sizes in self._servers.at_all(self._sizes):
            for role in total:
                total[role] += sizes[role]
        return total

    def server_bytes(self, number: int) -> tuple[int, int]:
        """Ask one server; see `Home.server_bytes`."""
        sizes = self._sizes(number)
        disk = sizes.pop("disk")
        return sum(sizes.values()), disk

    def servers_now(self) -> AllServers | None:
        """See `Home`."""
        if not self._is_open():
            return None
        servers = range(len(self._servers))
        return self.calls.servers_now([self._facts(number) for number in servers])

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
        message = AskSizes(incarnation=server.incarnation)
        return dict(server.transport.call(message).answer.size_bytes)

    def close(self) -> None:
        """Close the transports; with parity, the recovery of lost servers ends."""
        self.calls.close()
        self._tables.close()
        self._servers.end()
        at_close, self._at_close = self._at_close, None
        if at_close is not None:
            at_close()

    def _freeze_at(self, server: int, table: ServerTable, rows: range) -> FrozenAt:
        """Freeze rows at one server."""
        return self.calls.call(server, [table], lambda: self._freeze_once(server, table, rows))

    def _freeze_once(self, server: int, table: ServerTable, rows: range) -> FrozenAt:
        part, transport = table.parts[server], self._servers[server].transport
        slots = table.placement.slots_of(server, rows)
        with part.lock:
            batch, incarnation = next(self._servers[server].numbers), part.incarnation
            message = Freeze(
                incarnation=incarnation,
                table=table.form.table,
                start=slots.start,
                stop=slots.stop,
                trainer=self._servers.trainer,
                batch=batch,
                open_from=min(part.open, default=batch),
            )
            answer = transport.call(message).answer
            part.open.add(batch)
        return FrozenAt(answer.number, batch, incarnation)

    def _release_at(self, server: int, table: ServerTable, frozen: FrozenAt) -> None:
        part, transport = table.parts[server], self._servers[server].transport
        with part.lock:
            part.open.discard(frozen.batch)
        # If the server is lost, so are its frozen rows. If only the call is lost, the next freeze
        # or `clear` of the table releases them.
        with suppress(HomeError, OutOfStep):
            transport.call(Release(incarnation=frozen.incarnation, number=frozen.number))

    def _is_open(self) -> bool:
        try:
            self._tables.all()
        except HomeError:
            return False
        return True


class FrozenAtServers(FrozenRows):
    """Rows that are frozen at all servers."""

    def __init__(self, home: ServedHome, table: ServerTable, rows: range) -> None:
        self._home = home
        self._table = table
        self._rows = rows
        self._is_released = False
        self._readers: dict[int, FrozenAt] = {}  # by server
        with table.lock:
            table.frozen.add(self)
        try:
            home._servers.at_all(self._freeze)
        except BaseException:
            self.release()
            raise

    def _freeze(self, server: int) -> None:
        self._readers[server] = self._home._freeze_at(server, self._table, self._rows)

    def at(self, server: int) -> FrozenAt:
        """Return the reader at one server."""
        return self._readers[server]

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
        frozen = [reader for _, reader in sorted(self._readers.items())]
        return self._home._fetch([self._table], [TableRows(form.table, ids, out)], frozen)[0]

    def check(self, ids: Tensor) -> Checked:
        """Compare rows with their parity, if the servers keep it."""
        return self._home.calls.check(self._table, ids)

    def release(self) -> None:
        """Give the frozen records up at all servers."""
        if self._is_released:
            return
        self._is_released = True
        try:
            if self._home._is_open():
                self._home._servers.at_all(self._release)
        finally:
            with self._table.lock:
                self._table.frozen.discard(self)

    def _release(self, server: int) -> None:
        if server in self._readers:
            self._home._release_at(server, self._table, self._readers[server])


def _joined(answers: Sequence[Tensor]) -> Tensor:
    """Join what a server said of the rows of one table in one request or several."""
    return answers[0] if len(answers) == 1 else torch.cat(list(answers))
