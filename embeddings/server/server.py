"""Holds the rows of one embedding server, and answers the seven calls of `Transport`.

A call may come twice, late, or after its caller has given up. This is why nothing goes wrong then:

- A trainer numbers its writes, freezes and clears of a table in one sequence (`batch`). The server
  does each once: a number that is not above the trainer's last one is acknowledged, not done. So
  rows that come late never replace newer ones, and a late "clear" forgets nothing.
- Each call names an incarnation. A server that was started again, or that another training has
  taken over, has another one, and refuses the call.
- "add_table", "release" and "begin" leave the same when they are done again.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Never

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.home.files import FileHome
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import OutOfStep, TableSlots
from recpoint.embeddings.parity.stripes import Parity, stripes_of
from recpoint.embeddings.server.part_stager import NamedRows, PartStager
from recpoint.embeddings.server.placement import placement_of
from recpoint.embeddings.server.protection import Protection, Reach
from recpoint.embeddings.server.transport import Greeting, Transport, Value
from recpoint.errors import HomeError, ServerLost
from recpoint.format.job import Job
from recpoint.format.records import unpack_record

__all__ = ["MOST_REQUEST_BYTES", "EmbeddingServer"]

#: Bytes of slots and records in one call.
MOST_REQUEST_BYTES: Final = 16 << 20
_MOST_TABLES: Final = 4_096
_MOST_NAME_BYTES: Final = 1_024
#: Tables that one answer names. A byte of a name takes up to seven characters in JSON in JSON.
_TABLES_AN_ANSWER: Final = 8
#: Readers of frozen rows of one table.
_MOST_FROZEN: Final = 64
_MOST_TRAINERS: Final = 4_096
#: A table's addresses: less than what a process can have.
_MOST_TABLE_BYTES: Final = 1 << 45
_NUMBERS: Final = 1 << 63


class EmbeddingServer(Transport):
    """The rows of one server, in memory or in files. A transport passes calls on to it.

    The commands and their arguments:

    | name | arguments | returns |
    |---|---|---|
    | "begin" | owner: number of a training, 1 to 2^63 - 1; round; is_protected | incarnation |
    | "add_table" | table, rows, record_bytes; with parity all_rows, generation, is_lost | – |
    | "freeze" | table, start, stop, trainer, batch, open_from | number |
    | "release" | number | – |
    | "clear" | table, trainer, batch | – |
    | "sizes" | – | what `Home.size_bytes` returns |

    Those of a checkpoint whose rows the server stages (`PartStager`):

    | name | arguments | returns |
    |---|---|---|
    | "stage" | job, root, most, trainer, servers, data, parity, hosts, tables | is_open, awaited |
    | "seal" | attempt, trainer | is_staged, awaited |
    | "rejected" | attempt | why: the agent's reason, or null |
    | "drop" | attempt; once it was staged job and root, as of "stage" | – |

    "stage" has the arguments of `PartStager.open`: `job` is a record without rows. `tables` is
    JSON, for each table of which this trainer will name rows: its index in the job, the number of
    the reader, how many rows, its name, and how many rows it has on all servers. "awaited" is how
    many trainers have not said as much.

    Those of the training's leader, with parity (`Leader` says in which order):

    | name | arguments | returns |
    |---|---|---|
    | "protect" | number, data, parity, hosts, peers | – |
    | "join" | server, incarnation, host, port | – |
    | "open" | – | – |
    | "lose" | server, incarnation, start | unsettled: a part of `Unsettled`; are_all |
    | "take_back" | server, incarnation, numbers, are_all | – |
    | "give_up" | – | – |
    | "tables" | start | tables: names, rows, record_bytes, generations in JSON; are_all |
    | "known" | – | known, all: rows; has_given_up |

    "begin" forgets everything. If this owner has begun this round already, or a later one, it does
    nothing. The call may name any incarnation then. "freeze" keeps slots start … stop - 1 as they
    are, for `fetch(frozen=number)`. `open_from` is the trainer's first freeze of the table, by
    `batch`, that is still open. Those before are released, so a freeze whose answer was lost is not
    kept for ever. "clear" also releases all frozen rows of the table.

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
        self._gate = _Gate()
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

    def hello(self, *, within_seconds: float | None = None) -> Greeting:
        """See `Transport`. It waits for no other call, which may be waiting for a lost server."""
        if self._has_ended:
            self._refuse_ended()
        protection = self._protection
        return Greeting(
            incarnation=self._incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            owner=self._owner,
            unreached=() if protection is None else protection.member.other_servers.unreached,
        )

    def command(
        self, name: str, arguments: Mapping[str, Value], *, incarnation: int
    ) -> Mapping[str, Value]:
        """See `Transport`; the class says which commands there are.

        Raises:
            ServerLost, HomeError: as `Transport`.
            ValueError: no such command, or other arguments than it takes.
        """
        given = _Arguments(name, arguments)
        if name == "begin":
            return {"incarnation": self._begin(given, incarnation)}
        if name in ("protect", "join", "open", "lose", "take_back", "give_up", "known", "tables"):
            # Not through the gate: calls inside may be waiting for other servers, which wait here.
            # None that was meant for an earlier incarnation gets in beside "begin".
            with self._protecting:
                self._require(incarnation)
                return self._lead(given)
        with self._gate.shared():
            self._require(incarnation)
            if name == "release":
                self._drop(given.number("number"))
                return {}
            if name == "clear":
                self._clear(given)
                return {}
            if name == "add_table":
                self._add_table(given)
                return {}
            if name == "freeze":
                return {"number": self._freeze(given)}
            if name == "sizes":
                return dict(self._home.size_bytes())
            if name == "stage":
                return self._open_part(given)
            if name == "seal":
                attempt, trainer = given.text("attempt"), given.number("trainer")
                is_staged, awaited = self._stager.seal(attempt, trainer)
                return {"is_staged": is_staged, "awaited": awaited}
            if name == "rejected":
                return {"why": self._stager.rejected(given.text("attempt"))}
            if name == "drop":
                self._drop_part(given)
                return {}
        raise ValueError(f"command {name!r:.100}, expected one that an embedding server has")

    def fetch(
        self, wanted: Sequence[TableRows], *, incarnation: int, frozen: int | None = None
    ) -> list[Tensor]:
        """See `Transport`.

        Raises:
            ServerLost, HomeError: as `Transport`.
            ValueError: slots or records do not fit a table.
        """
        _refuse_more(wanted)
        with self._gate.shared():
            self._require(incarnation)
            if frozen is not None:
                return [self._fetch_frozen(one, frozen) for one in wanted]
            # Until the leader opens a successor, the successor may lack its tables.
            member = self._opened() if self._is_protected else None
            for one in wanted:
                self._table(one.table)
            if member is not None:
                member.recovery.recover([TableSlots(table, slots) for table, slots, _ in wanted])
            with self._using(wanted):
                return self._home.fetch_all(wanted)

    def _fetch_frozen(self, wanted: TableRows, number: int) -> Tensor:
        with self._lock:
            reader = self._frozen.get(number)
        if reader is None or reader.table != wanted.table:
            self._refuse_released(wanted.table)
        with reader.gate.shared():
            if reader.is_released:
                self._refuse_released(wanted.table)
            return reader.rows.fetch(wanted.ids, wanted.records)

    @contextmanager
    def _using(self, rows: Sequence[TableRows]) -> Iterator[None]:
        """Keep tables from being cleared meanwhile. The block waits for no other server."""
        tables = {one.table: self._table(one.table) for one in rows}
        with ExitStack() as gates:
            for _, here in sorted(tables.items()):  # in one order, so that no two calls wait
                gates.enter_context(here.gate.shared())
            yield

    def write_back(
        self, changed: Sequence[TableRows], *, incarnation: int, trainer: int, batch: int
    ) -> None:
        """See `Transport`.

        Raises:
            ServerLost, HomeError: as `Transport`.
            ValueError: slots or records do not fit a table.
        """
        _refuse_more(changed)
        with self._gate.shared():
            self._require(incarnation)
            # Until the leader opens a successor, the successor may lack its tables.
            member = self._opened() if self._is_protected else None
            for one in changed:
                self._table(one.table)
            if member is not None:
                # If the table is cleared after this, the write is late, and is not done.
                member.recovery.recover([TableSlots(table, slots) for table, slots, _ in changed])
            with self._using(changed):
                self._write(changed, member, trainer, batch)
            if member is not None:
                # Also for a call that comes again: it is acknowledged below.
                member.other_servers.flush()

    def _write(
        self, changed: Sequence[TableRows], member: StripeMember | None, trainer: int, batch: int
    ) -> None:
        tables = {one.table: self._table(one.table) for one in changed}
        with ExitStack() as locks:
            for _, here in sorted(tables.items()):  # in one order, so that no two calls wait
                locks.enter_context(here.lock)
            new = [one for one in changed if tables[one.table].is_new(trainer, batch)]
            if member is None:
                self._home.write_back_all(new, batch=0)
            else:
                member.write(new)
            for one in new:
                tables[one.table].last[trainer] = batch

    def check(self, table: str, slots: Tensor, *, incarnation: int) -> Tensor:
        """See `Transport`.

        Raises:
            ServerLost, HomeError, OutOfStep: as `Transport`.
            ValueError: slots do not fit the table.
        """
        with self._gate.shared():
            self._require(incarnation)
            return self._opened().check(table, slots)

    def stage(
        self,
        frozen: int,
        slots: Tensor,
        records: Tensor | None = None,
        *,
        incarnation: int,
        first: int = 0,
    ) -> Tensor:
        """See `Transport`.

        Raises:
            ServerLost, HomeError, OutOfStep: as `Transport`.
            ValueError: slots or records do not fit the table, or were not named.
        """
        with self._gate.shared():
            self._require(incarnation)
            if records is not None:
                self._stager.put_new(frozen, slots, records)
                return torch.ones(len(slots), dtype=torch.bool, device="cpu")
            with self._lock:
                reader = self._frozen.get(frozen)
            if reader is None:
                self._refuse_released(f"reader {frozen}")
            with reader.gate.shared():
                if reader.is_released:
                    self._refuse_released(reader.table)
                size = len(slots), self._stager.record_bytes(frozen)
                found = torch.empty(size, dtype=torch.uint8, device="cpu")
                there = reader.rows.fetch(slots, found)
                self._stager.put(frozen, first, slots, found, there)
                return there

    def _open_part(self, given: _Arguments) -> Mapping[str, Value]:
        servers, data = given.number("servers", 1), given.number("data")
        hosts = given.listed("hosts")
        named = []
        for index, number, count, name, rows in given.listed("tables"):
            placement = (
                stripes_of(
                    name,
                    rows=rows,
                    parity=Parity(data=data, parity=given.number("parity", 1)),
                    hosts=hosts,
                )
                if data
                else placement_of(name, rows=rows, servers=servers)
            )
            named.append(NamedRows(index, number, count, placement))
        job = _job(given)
        is_open, awaited = self._stager.open(
            job,
            root=Path(given.text("root")),
            most=given.number("most", 1),
            trainer=given.number("trainer"),
            rows=named,
        )
        return {"is_open": is_open, "awaited": awaited}

    def _drop_part(self, given: _Arguments) -> None:
        if given.has("job"):
            self._stager.drop(given.text("attempt"), _job(given), Path(given.text("root")))
        else:
            self._stager.drop(given.text("attempt"))

    def member(self, incarnation: int) -> StripeMember:
        """Return what other servers call, if this is the server that is meant.

        Raises:
            ServerLost: it is another incarnation.
            OutOfStep: the server does not take part in parity yet.
        """
        protection = (
            self._protection
        )  # before the incarnation is compared, so it is not a later one
        self._require(incarnation)
        if protection is None:
            raise OutOfStep(f"{self._name} does not take part in parity yet")
        return protection.member

    def _opened(self) -> StripeMember:
        protection = self._protection
        if protection is None or not protection.member.is_open:
            raise OutOfStep(f"{self._name} has not joined the other servers yet")
        return protection.member

    def _lead(self, given: _Arguments) -> Mapping[str, Value]:
        """Do what the training's leader wants done about parity."""
        name = given.name
        if name == "protect":
            self._protect(given)
            return {}
        if self._protection is None:
            raise OutOfStep(f"{self._name} does not take part in parity yet")
        member = self._protection.member
        if name == "open":
            self._protection.open()
        elif name == "join":
            self._protection.join(
                given.number("server"),
                given.number("incarnation"),
                given.text("host"),
                given.number("port"),
            )
        elif name == "lose":
            unsettled = member.other_servers.lose(
                given.number("server"), given.number("incarnation")
            )
            if unsettled is None:
                return {"unsettled": None, "are_all": True}
            start = given.number("start")
            part = unsettled.part(start)
            are_all = start + len(part.writes) >= len(unsettled.writes)
            return {"unsettled": part.to_json(), "are_all": are_all}
        elif name == "take_back":
            member.other_servers.take_back(
                given.number("server"),
                given.number("incarnation"),
                given.listed("numbers"),
                are_all=given.number("are_all") == 1,
            )
        elif name == "give_up":
            self._protection.has_given_up = True
        elif name == "tables":
            all_tables = sorted(member.tables.items())
            start = given.number("start")
            some = all_tables[start : start + _TABLES_AN_ANSWER]
            are_all = start + len(some) >= len(all_tables)
            return {"tables": json.dumps([[one, *form] for one, form in some]), "are_all": are_all}
        elif name == "known":
            known, of_all = member.known
            return {"known": known, "all": of_all, "has_given_up": self._protection.has_given_up}
        return {}

    def _protect(self, given: _Arguments) -> None:
        if self._reach is None:
            raise ValueError("protect: this server cannot call other servers")
        if self._protection is None:
            self._protection = Protection(
                number=given.number("number"),
                incarnation=self._incarnation,
                home=self._home,
                parity=Parity(data=given.number("data"), parity=given.number("parity")),
                hosts=given.listed("hosts"),
                peers=[(one[0], one[1], one[2], one[3]) for one in given.listed("peers")],
                reach=self._reach,
                name=self._name,
            )

    def close(self) -> None:
        """Do nothing: the server goes on."""

    def end(self) -> None:
        """Give all rows up. A second call does nothing; other calls raise ServerLost."""
        with self._gate.alone():
            if not self._has_ended:
                with self._protecting:
                    self._has_ended = True
                    self._forget()

    def _begin(self, given: _Arguments, incarnation: int) -> int:
        owner, began = given.number("owner", 1), given.number("round", optional=True)
        with self._gate.alone():
            if self._has_ended:
                self._refuse_ended()
            # A call of an earlier round is late: the training goes on in the last one.
            if owner != self._owner or began > self._round:
                if owner != self._owner:
                    self._require(incarnation)
                is_protected = given.number("is_protected", optional=True) == 1
                with self._protecting:
                    self._incarnation = _drawn()  # what there was is gone, also if this fails
                    self._forget()
                    self._home = self._new_home()
                    # Last, so that a call that comes again after an error begins again.
                    self._owner, self._round = owner, began
                    self._is_protected = is_protected
            return self._incarnation

    def _forget(self) -> None:
        if self._protection is not None:
            self._protection.end()
            self._protection = None
        self._stager.close()
        self._stager = PartStager(self._name)
        self._frozen.clear()
        self._tables.clear()
        self._home.close()

    def _add_table(self, given: _Arguments) -> None:
        table = given.text("table")
        rows, record_bytes = given.number("rows"), given.number("record_bytes")
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
                    given.number("all_rows", 1),
                    record_bytes,
                    generation=given.number("generation"),
                    is_lost=given.number("is_lost") == 1,
                )
            self._tables.setdefault(table, _Table())

    def _freeze(self, given: _Arguments) -> int:
        table, trainer, batch = given.text("table"), given.number("trainer"), given.number("batch")
        rows = range(given.number("start"), given.number("stop"))
        open_from = given.number("open_from")
        member = self._opened() if self._is_protected else None
        here = self._table(table)
        with here.lock:
            for number, frozen in list(here.frozen.items()):
                if frozen.trainer == trainer and frozen.batch == batch:
                    return number
                if frozen.trainer == trainer and frozen.batch < open_from:
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
        return number

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

    def _clear(self, given: _Arguments) -> None:
        table, trainer, batch = given.text("table"), given.number("trainer"), given.number("batch")
        here = self._table(table)
        # No call may use the table beside it. Calls that use other tables go on.
        with here.gate.alone(), here.lock:
            if here.is_new(trainer, batch):
                for number in list(here.frozen):
                    self._drop(number)
                if self._protection is None:
                    self._home.clear(table)
                else:
                    self._protection.member.clear(table, given.number("generation"))
                here.last[trainer] = batch

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


class _Frozen:
    """Frozen rows of a table, and who froze them."""

    def __init__(self, table: str, trainer: int, batch: int, rows: FrozenRows) -> None:
        self.table = table
        self.trainer = trainer
        self.batch = batch
        self.rows = rows
        self.gate = _Gate()  # fetches side by side, the release alone
        self.is_released = False


class _Table:
    """What has been done to one table. `lock` is held by those who change it.

    `gate` lets in calls that use rows side by side, and a clear alone.
    """

    def __init__(self) -> None:
        self.gate = _Gate()
        self.lock = threading.Lock()
        self.last: dict[int, int] = {}  # trainer -> number of its last write, freeze or clear
        self.frozen: dict[int, _Frozen] = {}

    def is_new(self, trainer: int, batch: int) -> bool:
        """Whether the call with this number was not done yet."""
        if trainer not in self.last and len(self.last) >= _MOST_TRAINERS:
            raise ValueError(f"trainer: {trainer}, expected at most {_MOST_TRAINERS} trainers")
        return batch > self.last.get(trainer, -1)


class _Gate:
    """Lets calls in side by side, or one alone; one that waits to be alone goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._waiting = 0
        self._is_alone = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_alone and not self._waiting)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: not self._is_alone and not self._inside)
            self._waiting -= 1
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


class _Arguments:
    """The arguments of a command, which come from another process."""

    def __init__(self, name: str, given: Mapping[str, Value]) -> None:
        self.name = name
        self._given = given

    def number(self, key: str, least: int = 0, *, optional: bool = False) -> int:
        value = self._given.get(key, 0 if optional else None)
        if type(value) is not int or not least <= value < _NUMBERS:
            raise ValueError(f"{self.name}: {key} {value!r:.100}, expected an integer >= {least}")
        return value

    def has(self, key: str) -> bool:
        return key in self._given

    def text(self, key: str) -> str:
        value = self._given.get(key)
        if type(value) is not str or len(value.encode()) > _MOST_NAME_BYTES:
            raise ValueError(
                f"{self.name}: {key} {value!r:.100}, expected at most {_MOST_NAME_BYTES} bytes"
            )
        return value

    def record(self, key: str) -> bytes:
        """Return a record of the format, as text."""
        value = self._given.get(key)
        if type(value) is not str:
            raise ValueError(f"{self.name}: {key} {value!r:.100}, expected a record")
        return value.encode()

    def listed(self, key: str) -> list[Any]:
        """Return a list that comes as JSON."""
        value = self._given.get(key)
        try:
            found = json.loads(value) if type(value) is str else None
        except ValueError:
            found = None
        if not isinstance(found, list):
            raise ValueError(f"{self.name}: {key} {value!r:.100}, expected a list in JSON")
        return found


def _job(given: _Arguments) -> Job:
    return unpack_record(
        Job, given.record("job"), name="job", next_step="use one release of recpoint"
    )


def _refuse_more(rows: Sequence[TableRows]) -> None:
    """Refuse more rows than one call may have, and a table that comes twice."""
    size = sum(one.ids.nbytes + one.records.nbytes for one in rows)
    if size > MOST_REQUEST_BYTES:
        raise ValueError(f"a call of {size} bytes, expected at most {MOST_REQUEST_BYTES}")
    if len({one.table for one in rows}) < len(rows):
        # A table has one number for each call, so the second rows would be taken for a repetition.
        raise ValueError("a table that comes twice in a call, expected each at most once")


def _drawn() -> int:
    """Return a number that no other start has: 1 to 2^63 - 1."""
    return secrets.randbelow(_NUMBERS - 1) + 1
