"""Has embedding servers stage their rows of a checkpoint, each on its own host.

A trainer names the rows; they do not come to it. Each server makes a part of the checkpoint of
them, numbered after the trainers' parts, and the agent of its host stores it (`PartStager`). Rows
that no server has yet, because nobody has trained them, are sent with their first values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from recpoint.catalog.staging.area import slot_name
from recpoint.embeddings.cache.view import RowsAtHome
from recpoint.embeddings.home.contract import Checked, Home
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.stripes import Stripes
from recpoint.embeddings.server.home import FrozenAtServers, ServedHome
from recpoint.embeddings.server.messages import (
    AskRejection,
    DropPart,
    NamedTable,
    NameRows,
    OpenPart,
    PartProgress,
    SealPart,
    SendNewRows,
)
from recpoint.embeddings.server.transport import Message, SlotRows
from recpoint.errors import HomeError
from recpoint.format.job import Job, StagedTable
from recpoint.format.records import Part, body_bytes

__all__ = ["ServedPart", "refuse_long_description"]

T = TypeVar("T")
AnswerT = TypeVar("AnswerT", bound=Part)

#: Rows that are named in one call.
_ROWS_AT_A_TIME: Final = 65_536
#: Bytes of the rows in one call, unless one row is longer.
_REQUEST_BYTES: Final = 4 << 20
#: Of the description of all tables, which comes in one message.
_MOST_TEXT_BYTES: Final = 512 << 10
_MOST_THREADS: Final = 64
_FIRST_PAUSE_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 0.25
#: How long a server may be out of step, because another one was lost.
_PATIENCE_SECONDS: Final = 60.0


def refuse_long_description(subject: str, tables: Sequence[StagedTable]) -> None:
    """Refuse tables that take more text than servers accept with one message.

    Raises:
        HomeError: they do; `subject` names the checkpoint.
    """
    _refuse_longer(subject, sum(body_bytes(table) for table in tables))


def _refuse_longer(subject: str, size_bytes: int) -> None:
    if size_bytes > _MOST_TEXT_BYTES:
        raise HomeError(
            subject,
            found=f"{size_bytes} bytes that describe its tables",
            expected=f"at most {_MOST_TEXT_BYTES}, so that servers can stage it",
            next_step="set Staging(at_servers=False)",
        )


def part_of(home: Home, tables: Mapping[str, int], attempt: str) -> ServedPart:
    """Return what the servers of a home stage of one checkpoint; see `ServedPart`.

    Raises:
        HomeError: the home has no servers.
    """
    if not isinstance(home, ServedHome):
        raise HomeError(
            f"the part of embedding servers in checkpoint {attempt}",
            found="a home that is no server",
            expected="embedding servers, which stage their rows",
            next_step="set Staging(at_servers=False)",
        )
    return ServedPart(home, tables, attempt)


class ServedPart:
    """What the servers stage of one checkpoint, as one trainer sees it.

    Args:
        home: the home on the servers.
        tables: name of each table that they stage -> its index in the checkpoint.
        attempt: name of the checkpoint's attempt.
    """

    def __init__(self, home: ServedHome, tables: Mapping[str, int], attempt: str) -> None:
        self._home = home
        self._tables = dict(tables)
        self._attempt = attempt
        self._has_failed = threading.Event()
        self._incarnations: list[int] = []  # of the servers that stage
        self._jobs: dict[int, Job] = {}  # server -> what describes its part
        self._root: Path | None = None  # once the servers know it
        self._lost_since: dict[int, float] = {}  # server -> `time.monotonic`

    @property
    def servers(self) -> int:
        """How many servers have a part."""
        return self._home.servers

    def stage(
        self,
        job: Job,
        rows: Sequence[RowsAtHome],
        *,
        root: Path,
        most: int,
        trainer: int,
        patience_seconds: Callable[[], float],
    ) -> Checked:
        """Have all servers stage, and wait until each has written its job.

        With several trainers, each must call it.

        Args:
            job: describes the checkpoint; its tables have no rows, and scattered shards where the
                servers stage them.
            rows: the rows that this trainer names.
            root: the staging area, on each server's host.
            most: how many jobs of a server may be staged at the same time.
            trainer: number of this trainer.
            patience_seconds: returns how long a server may wait for the other trainers.

        Returns:
            The stripes of these rows that were compared with their parity.

        Raises:
            HomeError: a server is lost, or cannot stage; or a trainer does not name its rows; or
                rows do not fit their parity.
        """
        by_server: list[list[_Named]] = [[] for _ in range(self.servers)]
        for rows_of_table in rows:
            split = self._home.placement(rows_of_table.table).slots_by_server(rows_of_table.ids)
            for named_rows, chosen in zip(by_server, split, strict=True):
                named_rows.append(_Named(self._tables[rows_of_table.table], rows_of_table, chosen))
        failures: list[BaseException] = []

        def stage(server: int) -> None:
            try:
                self._jobs[server] = self._described(server, job)
                opens = self._opening(server, by_server[server], root, most, trainer)
                self._until(server, opens, patience_seconds)
                for named in by_server[server]:
                    self._name(server, named)
                seals = SealPart(
                    incarnation=self._incarnations[server], attempt=self._attempt, trainer=trainer
                )
                self._until(server, seals, patience_seconds)
            except BaseException as error:
                failures.append(error)
                self._has_failed.set()  # nobody wants what the others stage

        self._root = root
        self._incarnations = [self._incarnation(server, rows) for server in range(self.servers)]
        self._at_all(stage)
        if failures:
            raise failures[0]  # the others may say only that one has failed
        checked = Checked()
        for rows_of_table in rows:
            for ids in _pieces(rows_of_table.ids, _ROWS_AT_A_TIME):
                checked_part = rows_of_table.frozen.check(ids)
                checked = Checked(*map(sum, zip(checked, checked_part, strict=True)))
        return checked

    def lost(self, patience_seconds: float) -> str | None:
        """Ask the servers for their parts; return why the checkpoint will never be complete.

        Args:
            patience_seconds: how long the agent of a lost server has to store its part.
        """
        losses: list[str] = []

        def ask(server: int) -> None:
            try:
                message = AskRejection(
                    incarnation=self._incarnations[server], attempt=self._attempt
                )
                reason = self._call(server, message).reason
            except (HomeError, OutOfStep):
                lost_seconds = self._lost_since.setdefault(server, time.monotonic())
                if time.monotonic() - lost_seconds > patience_seconds:
                    losses.append(f"embedding server {server + 1} was lost, and so may be its part")
                return
            if reason is not None:
                losses.append(f"part of embedding server {server + 1}: {reason}")

        if self._jobs:
            self._at_all(ask)
        return losses[0] if losses else None

    def drop(self) -> None:
        """Have all servers drop what they have staged, as far as they can be reached.

        A successor of a server drops what that one has staged on the same host.
        """

        def drop(server: int) -> None:
            job = self._jobs.get(server)
            message = DropPart(
                incarnation=self._home.incarnation(server),
                attempt=self._attempt,
                job=job,
                root=None if job is None else str(self._root),
            )
            with suppress(HomeError, OutOfStep):
                self._call(server, message)

        self._at_all(drop)

    def _at_all(self, act: Callable[[int], None]) -> None:
        """Call `act` with each server's number, in threads that training does not use."""
        with ThreadPoolExecutor(
            min(self.servers, _MOST_THREADS), thread_name_prefix="recpoint-parts"
        ) as threads:
            calls = [threads.submit(act, server) for server in range(self.servers)]
        for call in calls:
            call.result()

    def _incarnation(self, server: int, rows: Sequence[RowsAtHome]) -> int:
        """Return the incarnation that has the frozen rows; a successor of it has not."""
        if rows:
            return _frozen(rows[0]).at(server).incarnation
        return self._home.incarnation(server)

    def _call(self, server: int, message: Message[AnswerT]) -> AnswerT:
        return self._home.transport(server).call(message).answer

    def _described(self, server: int, job: Job) -> Job:
        """Return what describes the part of a server."""
        number = job.ranks + server
        shards = {index: self._home.rows_on(server, name) for name, index in self._tables.items()}
        tables = tuple(
            StagedTable(**dict(table) | {"shard_rows": shards[index]}) if table.scattered else table
            for index, table in enumerate(job.tables)
        )
        described: dict[str, Any] = dict(job) | {
            "rank": number,
            "slot": slot_name(number, 0),
            "tables": tables,
        }
        part = Job(**described)
        _refuse_longer(f"checkpoint of {job.ref}", body_bytes(part))
        return part

    def _opening(
        self, server: int, rows: Sequence[_Named], root: Path, most: int, trainer: int
    ) -> OpenPart:
        """Return what says which rows this trainer will name, and where rows of tables are."""
        placements = [self._home.placement(named.rows.table) for named in rows]
        stripes = next(
            (placement for placement in placements if isinstance(placement, Stripes)), None
        )
        tables = tuple(
            NamedTable(
                index=one.index,
                frozen=_frozen(one.rows).at(server).number,
                count=len(one.slots),
                table=one.rows.table,
                rows=placement.rows,
            )
            for one, placement in zip(rows, placements, strict=True)
        )
        return OpenPart(
            incarnation=self._incarnations[server],
            job=self._jobs[server],
            root=str(root),
            most=most,
            trainer=trainer,
            servers=self.servers,
            data=0 if stripes is None else stripes.data,
            parity=0 if stripes is None else stripes.parity,
            hosts=() if stripes is None else tuple(self._home.hosts),
            tables=tables,
        )

    def _name(self, server: int, named: _Named) -> None:
        """Name the rows of one table at one server, and send those that it does not have."""
        frozen = _frozen(named.rows).at(server)
        transport = self._home.transport(server)
        placement = self._home.placement(named.rows.table)
        # The server has the records of what one call names in memory.
        slots_each = max(1, _REQUEST_BYTES // (named.rows.layout.size_bytes + 8))
        first = 0
        for slots in _pieces(named.slots, min(slots_each, _ROWS_AT_A_TIME)):

            def name(slots: Tensor = slots, first: int = first) -> Tensor:
                message = NameRows(
                    incarnation=frozen.incarnation, frozen=frozen.number, first=first
                )
                return transport.call(message, [SlotRows(slots)]).tensors[0]

            is_named = self._patiently(name)
            for new in slots[~is_named].split(slots_each):
                if not len(new):
                    continue
                records = named.rows.new_records(placement.ids(server, new))

                def send(new: Tensor = new, records: Tensor = records) -> None:
                    message = SendNewRows(incarnation=frozen.incarnation, frozen=frozen.number)
                    transport.call(message, [SlotRows(new, records)])

                self._patiently(send)
            first += len(slots)

    def _until(
        self,
        server: int,
        message: Message[PartProgress],
        patience_seconds: Callable[[], float],
    ) -> None:
        """Repeat a message until the server says that it is done."""
        pause, start_seconds = _FIRST_PAUSE_SECONDS, time.monotonic()
        while True:
            progress = self._patiently(lambda: self._call(server, message))
            if progress.is_done:
                return
            if not progress.awaited:
                start_seconds = time.monotonic()  # the server is at work
            waited = time.monotonic() - start_seconds
            if waited > patience_seconds():
                raise HomeError(
                    f"embedding server {server + 1}: staged rows",
                    found=f"{progress.awaited} trainers that have not named their rows in "
                    f"{waited:.0f} s",
                    expected="all trainers of the checkpoint",
                    next_step="see the logs of the other ranks",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _patiently(self, act: Callable[[], T]) -> T:
        """Make a call, again while the server has to wait for another one that was lost."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            if self._has_failed.is_set():
                raise HomeError(
                    "embedding servers: staged rows",
                    found="another server that could not stage",
                    expected="that all servers can",
                    next_step="nothing: the next checkpoint also holds these rows",
                )
            try:
                return act()
            except OutOfStep:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LONGEST_PAUSE_SECONDS)


class _Named:
    """Rows of one table that this trainer names at one server.

    Attributes:
        index: index of the table in the checkpoint.
        rows: the rows at all servers.
        slots: int64 [n] or a range: the slots of those that this server has.
    """

    def __init__(self, index: int, rows: RowsAtHome, slots: Tensor | range) -> None:
        self.index = index
        self.rows = rows
        self.slots = slots


def _frozen(rows: RowsAtHome) -> FrozenAtServers:
    assert isinstance(rows.frozen, FrozenAtServers)  # of this home
    return rows.frozen


def _pieces(numbers: Tensor | range, most: int) -> Iterator[Tensor]:
    """Divide numbers into pieces of at most `most`, int64 each."""
    for start in range(0, len(numbers), most):
        part = numbers[start : start + most]
        if isinstance(part, range):
            yield torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu")
        else:
            yield part
