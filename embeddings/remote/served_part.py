"""Has embedding servers stage their rows of a checkpoint, each on its own host.

A trainer names the rows; they do not come to it. Each server makes a part of the checkpoint of
them, numbered after the trainers' parts, and the agent of its host stores it (`PartStager`). Rows
that no server has yet, because nobody has trained them, are sent with their first values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from recpoint.catalog.staging.area import slot_name
from recpoint.embeddings.cache_view import RowsAtHome
from recpoint.embeddings.home import Checked
from recpoint.embeddings.parity.peers import OutOfStep
from recpoint.embeddings.parity.stripes import Stripes
from recpoint.embeddings.remote.served_home import FrozenAtServers, ServedHome
from recpoint.embeddings.remote.transport import Value
from recpoint.errors import HomeError
from recpoint.format.job import Job, StagedTable
from recpoint.format.records import pack_record

__all__ = ["ServedPart"]

T = TypeVar("T")

#: Rows that are named in one call.
_ROWS_AT_A_TIME: Final = 65_536
#: Bytes of new rows in one call, unless one row is longer.
_REQUEST_BYTES: Final = 4 << 20
#: Of the description of all tables, which comes in one command.
_MOST_TEXT_BYTES: Final = 512 << 10
_FIRST_PAUSE_SECONDS: Final = 0.005
_LONGEST_PAUSE_SECONDS: Final = 0.25
#: How long a server may be out of step, because another one was lost.
_PATIENCE_SECONDS: Final = 60.0


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
        for one in rows:
            split = self._home.placement(one.table).slots_by_server(one.ids)
            for there, chosen in zip(by_server, split, strict=True):
                there.append(_Named(self._tables[one.table], one, chosen))

        def stage(server: int) -> None:
            slots = by_server[server]
            described = self._described(server, job, slots)
            described |= {"root": str(root), "most": most, "trainer": trainer}
            self._until(server, "stage", described, "is_open", patience_seconds)
            for one in slots:
                self._name(server, one)
            arguments: dict[str, Value] = {"attempt": job.attempt, "trainer": trainer}
            self._until(server, "seal", arguments, "is_staged", patience_seconds)

        self._home.at_all(stage)
        checked = Checked()
        for one in rows:
            for ids in _pieces(one.ids):
                found = one.frozen.check(ids)
                checked = Checked(*map(sum, zip(checked, found, strict=True)))
        return checked

    def rejected(self) -> str | None:
        """Return why an agent has rejected a server's part; None: none has, as far as known."""
        for server in range(self.servers):
            try:
                said = self._home.command(server, "rejected", {"attempt": self._attempt})
            except (HomeError, OutOfStep):
                continue  # a lost server: what it has staged is stored all the same
            if said["why"] is not None:
                return f"part of embedding server {server + 1}: {said['why']}"
        return None

    def drop(self) -> None:
        """Have all servers drop what they have staged, as far as they can be reached."""

        def drop(server: int) -> None:
            try:
                self._home.command(server, "drop", {"attempt": self._attempt})
            except (HomeError, OutOfStep):
                return  # its agent waits for the other parts, and never finds them

        self._home.at_all(drop)

    def _described(self, server: int, job: Job, rows: Sequence[_Named]) -> dict[str, Value]:
        """Return what a server has to know of the checkpoint, and of the rows of this trainer."""
        number = job.ranks + server
        placements = {one.rows.table: self._home.placement(one.rows.table) for one in rows}
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
        text = pack_record(Job(**described)).decode()
        if len(text) > _MOST_TEXT_BYTES:
            raise HomeError(
                f"checkpoint of {job.ref}",
                found=f"{len(text)} bytes that describe its tables",
                expected=f"at most {_MOST_TEXT_BYTES}, so that servers can stage it",
                next_step="set Staging(at_servers=False)",
            )
        stripes = next((one for one in placements.values() if isinstance(one, Stripes)), None)
        return {
            "job": text,
            "servers": self.servers,
            "data": 0 if stripes is None else stripes.data,
            "parity": 0 if stripes is None else stripes.parity,
            "hosts": json.dumps([] if stripes is None else list(self._home.hosts)),
            "tables": json.dumps(
                [
                    [
                        one.index,
                        _frozen(one.rows).at(server).number,
                        len(one.slots),
                        one.rows.table,
                        placements[one.rows.table].rows,
                    ]
                    for one in rows
                ]
            ),
        }

    def _name(self, server: int, named: _Named) -> None:
        """Name the rows of one table at one server, and send those that it does not have."""
        at = _frozen(named.rows).at(server)
        transport = self._home.transport(server)
        placement = self._home.placement(named.rows.table)
        each = max(1, _REQUEST_BYTES // (named.rows.layout.size_bytes + 8))
        first = 0
        for slots in _pieces(named.slots):

            def name(slots: Tensor = slots, first: int = first) -> Tensor:
                return transport.stage(at.number, slots, incarnation=at.incarnation, first=first)

            there = self._patiently(name)
            for new in slots[~there].split(each):
                if not len(new):
                    continue
                records = named.rows.new_records(placement.ids(server, new))

                def send(new: Tensor = new, records: Tensor = records) -> Tensor:
                    return transport.stage(at.number, new, records, incarnation=at.incarnation)

                self._patiently(send)
            first += len(slots)

    def _until(
        self,
        server: int,
        name: str,
        arguments: Mapping[str, Value],
        key: str,
        patience_seconds: Callable[[], float],
    ) -> None:
        """Repeat a command until the server says that it is done."""
        pause, since = _FIRST_PAUSE_SECONDS, time.monotonic()
        while True:
            said = self._patiently(lambda: self._home.command(server, name, arguments))
            if said[key]:
                return
            if not said["awaited"]:
                since = time.monotonic()  # the server is at work
            waited = time.monotonic() - since
            if waited > patience_seconds():
                raise HomeError(
                    f"embedding server {server + 1}: staged rows",
                    found=f"{said['awaited']} trainers that have not named their rows in "
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


def _pieces(numbers: Tensor | range) -> Iterator[Tensor]:
    """Divide numbers into pieces of a bounded size, int64 each."""
    for start in range(0, len(numbers), _ROWS_AT_A_TIME):
        part = numbers[start : start + _ROWS_AT_A_TIME]
        if isinstance(part, range):
            yield torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu")
        else:
            yield part
