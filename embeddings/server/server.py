"""Holds the rows of one embedding server, and answers its messages (`messages.py`).

A call may come twice, late, or after its caller has given up. This is why nothing goes wrong then:

- A trainer numbers its writes, freezes and clears of a table in one sequence (`batch`). The server
  does each once: a number that is not above the trainer's last one is acknowledged, not done. So
  rows that come late never replace newer ones, and a late `ClearTable` forgets nothing.
- Each call names an incarnation. A server that was started again, or that another training has
  taken over, has another one, and refuses the call.
- `AddTable`, `Release` and `Begin` leave the same when they are done again.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Never, TypeVar, cast

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.home.files import FileHome
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import OutOfStep, TableSlots
from recpoint.embeddings.parity.stripes import Parity, stripes_of
from recpoint.embeddings.server.gate import Gate
from recpoint.embeddings.server.messages import (
    AddTable,
    AskRejection,
    AskSizes,
    Begin,
    Begun,
    CheckStripes,
    ClearTable,
    DropPart,
    Fetch,
    Freeze,
    FrozenReader,
    HomeSizes,
    NameRows,
    OpenPart,
    PartProgress,
    PartRejection,
    Release,
    SealPart,
    SendNewRows,
    WriteBack,
)
from recpoint.embeddings.server.parity_calls import TO_LEADER, TO_SERVERS
from recpoint.embeddings.server.parity_messages import (
    Protect,
)
from recpoint.embeddings.server.part_stager import NamedRows, PartStager
from recpoint.embeddings.server.placement import placement_of
from recpoint.embeddings.server.protection import Protection, Reach
from recpoint.embeddings.server.transport import (
    MOST_REQUEST_BYTES,
    Done,
    Greet,
    Greeting,
    Message,
    Reply,
    RowMessage,
    SlotRows,
    Transport,
)
from recpoint.errors import HomeError, ServerLost
from recpoint.format.records import Part

__all__ = ["EmbeddingServer"]

AnswerT = TypeVar("AnswerT", bound=Part)

#: Lets a call in, or raises.
_Entrance = Callable[[Any, Any], AbstractContextManager[None]]
_Handler = Callable[..., Reply[Any]]

_DONE: Final = Done()

_MOST_TABLES: Final = 4_096
#: Readers of frozen rows of one table.
_MOST_FROZEN: Final = 64
_MOST_TRAINERS: Final = 4_096
#: A table's addresses: less than what a process can have.
_MOST_TABLE_BYTES: Final = 1 << 45
_NUMBERS: Final = 1 << 63


class EmbeddingServer(Transport):
    """The rows of one server, in memory or in files.

    It answers the messages of `messages.py` and `parity_messages.py`.

    Args:
        directory: where the rows are kept in files; None: in memory.
        name: what errors call the server.
        reach: makes what calls another server; None: this one cannot take part in parity.

    Raises:
        HomeError: the directory cannot be used.
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        name: str = "the embedding server",
        reach: Reach | None = None,
    ) -> None:
        self._directory = directory
        self._name = name
        self._reach = reach
        self._protection: Protection | None = None
        self._protecting = threading.Lock()  # held while `_protection` is changed, or is told of it
        self._is_protected = False
        self._gate = Gate()
        self._home = self._new_home()
        self._incarnation = _drawn()
        self._owner = 0
        self._round = 0
        self._has_ended = False
        self._tables: dict[str, _Table] = {}
        self._stager = PartStager(name)
        self._numbers = itertools.count(1)
        self._frozen: dict[int, _Frozen] = {}
        self._lock = threading.Lock()  # guards `_tables`, `_numbers` and `_frozen`

    def _new_home(self) -> Home:
        return MemoryHome() if self._directory is None else FileHome(self._directory)

    def call(
        self,
        message: Message[AnswerT],
        rows: Sequence[SlotRows] = (),
        *,
        within_seconds: float | None = None,
    ) -> Reply[AnswerT]:
        """See `Transport`. The call takes the time that it takes."""
        parts = message.parts if isinstance(message, RowMessage) else 0
        if len(rows) != parts:
            raise ValueError(f"{message.kind}: {len(rows)} tensors of slots, expected {parts}")
        kind, any_message = type(message), cast(Any, message)
        if kind in TO_SERVERS:
            return TO_SERVERS[kind](self.member(any_message.incarnation), message, rows)
        if kind in TO_LEADER:
            with self._led(any_message):
                return TO_LEADER[kind](self._led_protection(), message)
        enter, handle = _HANDLERS[kind]
        with enter(self, any_message):
            if isinstance(message, RowMessage):
                return handle(self, message, rows)
            return handle(self, message)

    @contextmanager
    def _freely(self, message: Any) -> Iterator[None]:
        """Let a call in at any time."""
        yield

    def _in_use(self, message: Any) -> AbstractContextManager[None]:
        """Let a call in beside others, unless the server begins for another training."""
        return self._gate.shared(lambda: self._require(message.incarnation))

    @contextmanager
    def _led(self, message: Any) -> Iterator[None]:
        """Let a call of the leader in.

        Not through the gate: calls inside may be waiting for other servers, which wait here. None
        that was meant for an earlier incarnation gets in beside `Begin`.
        """
        with self._protecting:
            self._require(message.incarnation)
            yield

    def _greet(self, message: Greet) -> Reply[Greeting]:
        """Wait for no other call, which may be waiting for a lost server."""
        if self._has_ended:
            self._refuse_ended()
        protection = self._protection
        return Reply(
            Greeting(
                incarnation=self._incarnation,
                host=socket.gethostname(),
                pid=os.getpid(),
                owner=self._owner,
                unreached=() if protection is None else protection.member.other_servers.unreached,
            )
        )

    def _fetch(self, message: Fetch, rows: Sequence[SlotRows]) -> Reply[Done]:
        wanted = _of_tables(message.tables, rows)
        if message.frozen is not None:
            number = message.frozen
            return Reply(_DONE, [self._fetch_frozen(table_rows, number) for table_rows in wanted])
        # Until the leader opens a successor, the successor may lack its tables.
        member = self._opened() if self._is_protected else None
        tables = self._tables_of(message.tables)
        if member is not None:
            member.recovery.recover([TableSlots(table, slots) for table, slots, _ in wanted])
        # None is cleared meanwhile.
        with _all_of([table.gate.shared() for table in tables.values()]):
            return Reply(_DONE, self._home.fetch_all(wanted))

    def _fetch_frozen(self, wanted: TableRows, number: int) -> Tensor:
        with self._lock:
            reader = self._frozen.get(number)
        if reader is None or reader.table != wanted.table:
            self._refuse_released(wanted.table)
        with reader.gate.shared():
            if reader.is_released:
                self._refuse_released(wanted.table)
            return reader.rows.fetch(wanted.ids, wanted.records)

    def _tables_of(self, names: Sequence[str]) -> dict[str, _Table]:
        """Return tables in one order, so that no two calls wait for each other's."""
        return {name: self._table(name) for name in sorted(names)}

    def _write_back(self, message: WriteBack, rows: Sequence[SlotRows]) -> Reply[Done]:
        changed = _of_tables(message.tables, rows)
        # Until the leader opens a successor, the successor may lack its tables.
        member = self._opened() if self._is_protected else None
        tables = self._tables_of(message.tables)
        if member is not None:
            # If the table is cleared after this, the write is late, and is not done.
            member.recovery.recover([TableSlots(table, slots) for table, slots, _ in changed])
        with (
            # None is cleared meanwhile.
            _all_of([table.gate.shared() for table in tables.values()]),
            _all_of([table.lock for table in tables.values()]),
        ):
            new = [
                rows_of_table
                for rows_of_table in changed
                if tables[rows_of_table.table].is_new(message.trainer, message.batch)
            ]
            if member is None:
                self._home.write_back_all(new, batch=0)
            else:
                member.write(new)
            for rows_of_table in new:
                tables[rows_of_table.table].last[message.trainer] = message.batch
        if member is not None:
            # Also for a call that comes again: it is acknowledged below.
            member.other_servers.flush()
        return Reply(_DONE)

    def _check(self, message: CheckStripes, rows: Sequence[SlotRows]) -> Reply[Done]:
        return Reply(_DONE, [self._opened().check(message.table, rows[0].slots)])

    def _open_part(self, message: OpenPart) -> Reply[PartProgress]:
        is_open, awaited = self._stager.open(
            message.job,
            root=Path(message.root),
            most=message.most,
            trainer=message.trainer,
            rows=_named_rows(message),
        )
        return Reply(PartProgress(is_done=is_open, awaited=awaited))

    def _name_rows(self, message: NameRows, rows: Sequence[SlotRows]) -> Reply[Done]:
        slots = rows[0].slots
        with self._lock:
            reader = self._frozen.get(message.frozen)
        if reader is None:
            self._refuse_released(f"reader {message.frozen}")
        with reader.gate.shared():
            if reader.is_released:
                self._refuse_released(reader.table)
            size = len(slots), self._stager.record_bytes(message.frozen)
            records = torch.empty(size, dtype=torch.uint8, device="cpu")
            is_present = reader.rows.fetch(slots, records)
            self._stager.put(message.frozen, message.first, slots, records, is_present)
            return Reply(_DONE, [is_present])

    def _stage_new_rows(self, message: SendNewRows, rows: Sequence[SlotRows]) -> Reply[Done]:
        slots, records = rows[0]
        assert records is not None
        self._stager.put_new(message.frozen, slots, records)
        return Reply(_DONE)

    def _seal_part(self, message: SealPart) -> Reply[PartProgress]:
        is_staged, awaited = self._stager.seal(message.attempt, message.trainer)
        return Reply(PartProgress(is_done=is_staged, awaited=awaited))

    def _rejection(self, message: AskRejection) -> Reply[PartRejection]:
        return Reply(PartRejection(reason=self._stager.rejected(message.attempt)))

    def _drop_part(self, message: DropPart) -> Reply[Done]:
        root = None if message.root is None else Path(message.root)
        self._stager.drop(message.attempt, message.job, root)
        return Reply(_DONE)

    def member(self, incarnation: int) -> StripeMember:
        """Return what other servers call, if this is the server that is meant.

        Raises:
            ServerLost: it is another incarnation.
            OutOfStep: the server does not take part in parity yet.
        """
        # Read before the incarnation is compared, so it is not of a later one.
        protection = self._protection
        self._require(incarnation)
        if protection is None:
            raise OutOfStep(f"{self._name} does not take part in parity yet")
        return protection.member

    def _opened(self) -> StripeMember:
        protection = self._protection
        if protection is None or not protection.member.is_open:
            raise OutOfStep(f"{self._name} has not joined the other servers yet")
        return protection.member

    def _protect(self, message: Protect) -> Reply[Done]:
        if self._reach is None:
            raise ValueError("protect: this server cannot call other servers")
        if self._protection is None:
            self._protection = Protection(
                number=message.number,
                incarnation=self._incarnation,
                home=self._home,
                parity=Parity(data=message.data, parity=message.parity),
                hosts=message.hosts,
                peers=[
                    (peer.server, peer.incarnation, peer.host, peer.port) for peer in message.peers
                ],
                reach=self._reach,
                name=self._name,
            )
        return Reply(_DONE)

    def _led_protection(self) -> Protection:
        if self._protection is None:
            raise OutOfStep(f"{self._name} does not take part in parity yet")
        return self._protection

    def close(self) -> None:
        """Do nothing: the server goes on."""

    def end(self) -> None:
        """Give all rows up. A second call does nothing; other calls raise ServerLost."""
        with self._gate.alone():
            if not self._has_ended:
                with self._protecting:
                    self._has_ended = True
                    self._forget()

    def _begin(self, message: Begin) -> Reply[Begun]:
        owner, began = message.owner, message.round
        with self._gate.alone():
            if self._has_ended:
                self._refuse_ended()
            # A call of an earlier round is late: the training goes on in the last one.
            if owner != self._owner or began > self._round:
                if owner != self._owner:
                    self._require(message.incarnation)
                with self._protecting:
                    self._incarnation = _drawn()  # what there was is gone, also if this fails
                    self._forget()
                    self._home = self._new_home()
                    # Last, so that a call that comes again after an error begins again.
                    self._owner, self._round = owner, began
                    self._is_protected = message.is_protected
            return Reply(Begun(incarnation=self._incarnation))

    def _forget(self) -> None:
        if self._protection is not None:
            self._protection.end()
            self._protection = None
        self._stager.close()
        self._stager = PartStager(self._name)
        self._frozen.clear()
        self._tables.clear()
        self._home.close()

    def _add_table(self, message: AddTable) -> Reply[Done]:
        table, rows, record_bytes = message.table, message.rows, message.record_bytes
        if rows * record_bytes > _MOST_TABLE_BYTES or record_bytes + 8 > MOST_REQUEST_BYTES:
            raise HomeError(
                f"{self._name}: table {table!r}",
                found=f"{rows} rows of {record_bytes} bytes",
                expected=f"at most {_MOST_TABLE_BYTES} bytes on one server, and "
                f"{MOST_REQUEST_BYTES - 8} in a row",
                next_step="divide the table over more servers, or make its rows shorter",
            )
        if self._is_protected and self._protection is None:
            raise OutOfStep(f"{self._name} does not take part in parity yet")
        with self._lock:
            if table not in self._tables and len(self._tables) >= _MOST_TABLES:
                raise HomeError(
                    self._name,
                    found=f"{_MOST_TABLES} tables",
                    expected="no more than these",
                    next_step="train fewer tables on these servers",
                )
            try:
                self._home.add_table(table, rows=rows, record_bytes=record_bytes)
            except (OSError, MemoryError) as error:
                raise HomeError(
                    f"{self._name}: table {table!r}",
                    found=f"{rows} rows of {record_bytes} bytes, and the system says: {error}",
                    expected="that the server can have the addresses",
                    next_step="divide the table over more servers",
                ) from error
            if self._protection is not None:
                self._protection.add_table(
                    table,
                    message.all_rows,
                    record_bytes,
                    generation=message.generation,
                    is_lost=message.is_lost,
                )
            self._tables.setdefault(table, _Table())
        return Reply(_DONE)

    def _freeze(self, message: Freeze) -> Reply[FrozenReader]:
        table, trainer, batch = message.table, message.trainer, message.batch
        rows = range(message.start, message.stop)
        member = self._opened() if self._is_protected else None
        here = self._table(table)
        with here.lock:
            for number, frozen in list(here.frozen.items()):
                if frozen.trainer == trainer and frozen.batch == batch:
                    return Reply(FrozenReader(number=number))
                if frozen.trainer == trainer and frozen.batch < message.open_from:
                    # Its caller gave up before it knew the number, so no fetch is running.
                    self._drop(number)
            if not here.is_new(trainer, batch):
                self._refuse_released(table)
            if len(here.frozen) >= _MOST_FROZEN:
                raise HomeError(
                    f"{self._name}: table {table!r}",
                    found=f"{_MOST_FROZEN} readers of frozen rows",
                    expected="no more than these",
                    next_step="release some",
                )
            freeze = self._home.freeze if member is None else member.freeze
            reader = freeze(table, rows)
            here.last[trainer] = batch
            with self._lock:
                number = next(self._numbers)
                here.frozen[number] = self._frozen[number] = _Frozen(table, trainer, batch, reader)
        return Reply(FrozenReader(number=number))

    def _release(self, message: Release) -> Reply[Done]:
        self._drop(message.number)
        return Reply(_DONE)

    def _drop(self, number: int) -> None:
        """Release a reader, once no fetch uses it. A second call does nothing."""
        with self._lock:
            reader = self._frozen.get(number)
            if reader is None:
                return
            reader.is_released = True  # no later fetch uses it
        with reader.gate.alone():
            reader.rows.release()  # a second time, it does nothing
        with self._lock:
            self._frozen.pop(number, None)
            self._tables[reader.table].frozen.pop(number, None)

    def _clear(self, message: ClearTable) -> Reply[Done]:
        table, trainer, batch = message.table, message.trainer, message.batch
        here = self._table(table)
        # No call may use the table beside it. Calls that use other tables go on.
        with here.gate.alone(), here.lock:
            if here.is_new(trainer, batch):
                for number in list(here.frozen):
                    self._drop(number)
                if self._protection is None:
                    self._home.clear(table)
                else:
                    self._protection.member.clear(table, message.generation)
                here.last[trainer] = batch
        return Reply(_DONE)

    def _sizes(self, message: AskSizes) -> Reply[HomeSizes]:
        return Reply(HomeSizes(size_bytes=dict(self._home.size_bytes())))

    def _table(self, table: str) -> _Table:
        with self._lock:
            here = self._tables.get(table)
        if here is None and self._is_protected:
            # The caller has added it. This is a successor, which the leader has not told of it yet.
            raise OutOfStep(f"{self._name} has no table {table!r:.100} yet")
        if here is None:
            raise HomeError(
                f"{self._name}: table {table!r}",
                found="no such table",
                expected="a table that was added",
                next_step="call add_table first",
            )
        return here

    def _require(self, incarnation: int) -> None:
        if self._has_ended:
            self._refuse_ended()
        if incarnation != self._incarnation:
            raise ServerLost(
                self._name,
                found="a server that was started again since, or works for another training now",
                expected="the server that has the rows of this training",
                next_step="restore the last checkpoint: that gives the servers their rows again",
            )

    def _refuse_ended(self) -> Never:
        raise ServerLost(
            self._name,
            found="a call after its end",
            expected="a server that is running",
            next_step="start the servers again, and restore the last checkpoint",
        )

    def _refuse_released(self, table: str) -> Never:
        raise HomeError(
            f"{self._name}: frozen rows of table {table!r}",
            found="a call after release() or clear()",
            expected="no call after release(), clear() or close()",
            next_step="freeze the rows again",
        )


#: For each message, apart from those of parity: what lets it in, and what answers it.
_HANDLERS: Final[Mapping[type[Message[Any]], tuple[_Entrance, _Handler]]] = {
    Greet: (EmbeddingServer._freely, EmbeddingServer._greet),
    Begin: (EmbeddingServer._freely, EmbeddingServer._begin),
    AddTable: (EmbeddingServer._in_use, EmbeddingServer._add_table),
    Freeze: (EmbeddingServer._in_use, EmbeddingServer._freeze),
    Release: (EmbeddingServer._in_use, EmbeddingServer._release),
    ClearTable: (EmbeddingServer._in_use, EmbeddingServer._clear),
    AskSizes: (EmbeddingServer._in_use, EmbeddingServer._sizes),
    Fetch: (EmbeddingServer._in_use, EmbeddingServer._fetch),
    WriteBack: (EmbeddingServer._in_use, EmbeddingServer._write_back),
    CheckStripes: (EmbeddingServer._in_use, EmbeddingServer._check),
    OpenPart: (EmbeddingServer._in_use, EmbeddingServer._open_part),
    NameRows: (EmbeddingServer._in_use, EmbeddingServer._name_rows),
    SendNewRows: (EmbeddingServer._in_use, EmbeddingServer._stage_new_rows),
    SealPart: (EmbeddingServer._in_use, EmbeddingServer._seal_part),
    AskRejection: (EmbeddingServer._in_use, EmbeddingServer._rejection),
    DropPart: (EmbeddingServer._in_use, EmbeddingServer._drop_part),
    Protect: (EmbeddingServer._led, EmbeddingServer._protect),
}


class _Frozen:
    """Frozen rows of a table, and who froze them."""

    def __init__(self, table: str, trainer: int, batch: int, rows: FrozenRows) -> None:
        self.table = table
        self.trainer = trainer
        self.batch = batch
        self.rows = rows
        self.gate = Gate()  # fetches side by side, the release alone
        self.is_released = False


class _Table:
    """What has been done to one table. `lock` is held by those who change it.

    `gate` lets in calls that use rows side by side, and a clear alone.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self.lock = threading.Lock()
        self.last: dict[int, int] = {}  # trainer -> number of its last write, freeze or clear
        self.frozen: dict[int, _Frozen] = {}

    def is_new(self, trainer: int, batch: int) -> bool:
        """Whether the call with this number was not done yet."""
        if trainer not in self.last and len(self.last) >= _MOST_TRAINERS:
            raise ValueError(f"trainer: {trainer}, expected at most {_MOST_TRAINERS} trainers")
        return batch > self.last.get(trainer, -1)


def _all_of(contexts: Sequence[AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return one context that enters all of these in their order."""
    return contexts[0] if len(contexts) == 1 else _entered(contexts)


@contextmanager
def _entered(contexts: Sequence[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _of_tables(names: Sequence[str], rows: Sequence[SlotRows]) -> list[TableRows]:
    """Return the rows of a call with the names of their tables.

    Raises:
        ValueError: there are more than one call may have, or a table comes twice.
    """
    of_tables = []
    for name, (slots, records) in zip(names, rows, strict=True):
        assert records is not None
        of_tables.append(TableRows(name, slots, records))
    size_bytes = sum(table_rows.ids.nbytes + table_rows.records.nbytes for table_rows in of_tables)
    if size_bytes > MOST_REQUEST_BYTES:
        raise ValueError(f"a call of {size_bytes} bytes, expected at most {MOST_REQUEST_BYTES}")
    if len(set(names)) < len(names):
        # A table has one number for each call, so the second rows would be taken for a repetition.
        raise ValueError("a table that comes twice in a call, expected each at most once")
    return of_tables


def _named_rows(message: OpenPart) -> list[NamedRows]:
    """Return which rows of tables a trainer will name, with the places of the tables' rows."""
    named_rows = []
    for table in message.tables:
        placement = (
            stripes_of(
                table.table,
                rows=table.rows,
                parity=Parity(data=message.data, parity=message.parity),
                hosts=message.hosts,
            )
            if message.data
            else placement_of(table.table, rows=table.rows, servers=message.servers)
        )
        named_rows.append(NamedRows(table.index, table.frozen, table.count, placement))
    return named_rows


def _drawn() -> int:
    """Return a number that no other start has: 1 to 2^63 - 1."""
    return secrets.randbelow(_NUMBERS - 1) + 1
