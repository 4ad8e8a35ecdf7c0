"""A sink in one SQLite file: the embedded default. A version is one transaction.

    recpoint_version    number, record (JSON, records.CommittedVersion), dense (safetensors)
    recpoint_table      name of each table -> name of the SQL table that has its rows
    rows_N_I            id INTEGER PRIMARY KEY, row BLOB

The write-ahead log lets readers go on with the version that they began with, however long the
next one takes. A publisher that dies leaves nothing: SQLite takes its transaction back.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from torch import Tensor

from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.durable import step
from recpoint.errors import NotServing, SinkError
from recpoint.format.records import CheckpointRef
from recpoint.serving.sinks.contract import Sink, SinkPosition, SinkReading, refuse_parent
from recpoint.serving.sinks.records import CommittedVersion, SinkVersion, TableChange, parsed
from recpoint.serving.sinks.row_bytes import (
    bytes_of_dense,
    bytes_of_rows,
    dense_of_bytes,
    rows_of_bytes,
    table_of,
)

__all__ = ["SqliteSink"]

#: How long a publisher waits for another one to end its transaction.
_WAIT_SECONDS: Final = 1.0

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS recpoint_version (
    number INTEGER PRIMARY KEY, record TEXT NOT NULL, dense BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS recpoint_table (name TEXT PRIMARY KEY, rows_table TEXT NOT NULL);
"""


class SqliteSink(Sink):
    """Holds versions in one file.

    Args:
        path: the file; the first version makes it.
    """

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:{path}"
        self._path = path
        self._writer: sqlite3.Connection | None = None
        self._begun: SinkVersion | None = None
        self._parent: CheckpointRef | None = None
        self._number = 0
        self._rows_tables: dict[str, str] = {}

    def position(self) -> SinkPosition:
        """See `Sink.position`; an attempt leaves nothing, so none is ever begun."""
        with self._connected() as connection:
            return SinkPosition(self._committed(connection), None)

    def begin(self, version: SinkVersion, parent: CheckpointRef | None) -> None:
        """See `Sink.begin`."""
        self.discard()
        with _errors(self.url):
            step(f"sink-begin {self._path}")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            writer = sqlite3.connect(self._path, timeout=_WAIT_SECONDS, isolation_level=None)
            self._writer = writer
            writer.execute("PRAGMA journal_mode=WAL")
            writer.execute("PRAGMA synchronous=NORMAL")
            writer.execute("BEGIN IMMEDIATE")
            for statement in filter(str.strip, _SCHEMA.split(";")):
                writer.execute(statement)
        committed = self._committed(writer)
        refuse_parent(self.url, SinkPosition(committed, None), version, parent)
        self._number = 1 if committed is None else committed.number + 1
        self._begun, self._parent = version, parent
        with _errors(self.url):
            if parent is None:
                self._begin_anew(writer, version)
            self._rows_tables = _rows_tables(writer)

    def _begin_anew(self, writer: sqlite3.Connection, version: SinkVersion) -> None:
        for rows_table in _rows_tables(writer).values():
            writer.execute(f"DROP TABLE {rows_table}")
        writer.execute("DELETE FROM recpoint_table")
        for index, table in enumerate(version.tables):
            rows_table = f"rows_{self._number}_{index}"
            writer.execute(f"CREATE TABLE {rows_table} (id INTEGER PRIMARY KEY, row BLOB NOT NULL)")
            writer.execute("INSERT INTO recpoint_table VALUES (?, ?)", (table.name, rows_table))

    def put(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """See `Sink.put`."""
        with _errors(self.url):
            step(f"sink-put {self._path}")
            self._write(
                f"INSERT INTO {self._rows_tables[table]} VALUES (?, ?) "
                "ON CONFLICT (id) DO UPDATE SET row = excluded.row",
                zip(ids.tolist(), bytes_of_rows(rows), strict=True),
            )

    def delete(self, table: str, ids: Tensor) -> None:
        """See `Sink.delete`."""
        with _errors(self.url):
            step(f"sink-delete {self._path}")
            statement = f"DELETE FROM {self._rows_tables[table]} WHERE id = ?"
            self._write(statement, ((row,) for row in ids.tolist()))

    def commit(self, dense: Mapping[str, Tensor], changes: Sequence[TableChange]) -> None:
        """See `Sink.commit`."""
        assert self._begun is not None and self._writer is not None  # after begin
        record = CommittedVersion(
            number=self._number,
            version=self._begun,
            parent=self._parent,
            changes=tuple(changes),
            committed_ms=now_ms(),
        )
        with _errors(self.url):
            step(f"sink-commit {self._path}")
            self._writer.execute("DELETE FROM recpoint_version")
            self._writer.execute(
                "INSERT INTO recpoint_version VALUES (?, ?, ?)",
                (self._number, record.model_dump_json(), bytes_of_dense(dense)),
            )
            self._writer.execute("COMMIT")
        self.discard()  # closes the connection

    def discard(self) -> None:
        """See `Sink.discard`: SQLite takes an open transaction back."""
        writer, self._writer, self._begun = self._writer, None, None
        if writer is not None:
            writer.close()

    @contextmanager
    def reading(self) -> Iterator[SinkReading]:
        """See `Sink.reading`."""
        with self._connected() as connection:
            with _errors(self.url):
                connection.execute("BEGIN")
            committed = self._committed(connection)
            if committed is None:
                raise NotServing(
                    self.url,
                    found="no version",
                    expected="a version that was published",
                    next_step="recpoint publish-to SINK URL",
                )
            yield _SqliteReading(self.url, connection, committed)

    def close(self) -> None:
        """See `Sink.close`."""
        self.discard()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        if not self._path.exists():
            memory = sqlite3.connect(":memory:", isolation_level=None)
            try:
                yield memory
            finally:
                memory.close()
            return
        with _errors(self.url):
            connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=_WAIT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            yield connection
        finally:
            connection.close()

    def _committed(self, connection: sqlite3.Connection) -> CommittedVersion | None:
        with _errors(self.url):
            tables = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'recpoint_version'"
            ).fetchone()
            row = tables and connection.execute("SELECT record FROM recpoint_version").fetchone()
        return (
            None
            if not row
            else parsed(CommittedVersion, row[0], name=f"{self.url} (recpoint_version)")
        )

    def _write(self, statement: str, parameters: Iterator[tuple[object, ...]]) -> None:
        assert self._writer is not None  # after begin
        self._writer.executemany(statement, parameters)


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turn errors of SQLite into those of a sink."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        is_locked = "locked" in str(error)
        raise SinkError(
            url,
            found=str(error),
            expected="a SQLite file that this process alone writes"
            if is_locked
            else "a SQLite file that can be read and written",
            next_step="end the other publisher, or publish to another sink"
            if is_locked
            else "see the message; the sink holds its last version",
        ) from error


class _SqliteReading:
    """See `SinkReading`."""

    def __init__(self, url: str, connection: sqlite3.Connection, version: CommittedVersion) -> None:
        self._url, self._connection, self.version = url, connection, version
        with _errors(url):
            self._rows_tables = _rows_tables(connection)

    def lookup(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        served = table_of(self._url, self.version.version, table)
        numbers = ids.tolist()
        with _errors(self._url):
            rows = self._connection.execute(
                f"SELECT id, row FROM {self._rows_tables[table]} WHERE id IN "
                "(SELECT value FROM json_each(?))",
                (str(numbers),),
            )
            by_id: dict[int, bytes] = dict(rows)
        return rows_of_bytes(self._url, served, ids, [by_id.get(number) for number in numbers])

    def dense(self) -> dict[str, Tensor]:
        with _errors(self._url):
            row = self._connection.execute("SELECT dense FROM recpoint_version").fetchone()
        return dense_of_bytes(row[0])

    def row_count(self, table: str) -> int:
        table_of(self._url, self.version.version, table)
        statement = f"SELECT count(*) FROM {self._rows_tables[table]}"
        with _errors(self._url):
            return int(self._connection.execute(statement).fetchone()[0])


def _rows_tables(connection: sqlite3.Connection) -> dict[str, str]:
    """Return the SQL table of each table; all names were made by this module."""
    return dict(connection.execute("SELECT name, rows_table FROM recpoint_table"))
