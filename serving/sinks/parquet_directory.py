"""A sink in a directory of Parquet files, for warehouses and for producers of change streams.

    index/000000000007.json         the 7th version: its record, and its files
    versions/000000000007-TOKEN/    its files
        0.rows.parquet              rows that it put into the first table
        0.deleted.parquet           ids that it deleted from it
        dense.safetensors           its dense layers

A version is what it changed. One that came anew has all rows. Files are never changed once the
index names them, and the file in the index comes last, so readers of any version need no lock.
Files of attempts that were not committed are named by no index; the next publisher removes them.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import pyarrow as pa
import torch
from pydantic import Field
from torch import Tensor

from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import NotServing, SinkError
from recpoint.format.records import CheckpointRef, HexToken, Part
from recpoint.serving.sinks.contract import Sink, SinkPosition, SinkReading, refuse_parent
from recpoint.serving.sinks.parquet_files import DeltaWriter, RowsById, read_ids, read_rows
from recpoint.serving.sinks.records import (
    CommittedVersion,
    SinkTable,
    SinkVersion,
    TableChange,
    parsed,
)
from recpoint.serving.sinks.row_bytes import bytes_of_dense, dense_of_bytes, table_of

__all__ = ["ParquetDirectory", "IndexedVersion"]

_DENSE: Final = "dense.safetensors"
#: Names of files of the index, and of directories of versions. Whatever has another name stays.
_INDEX_FILE: Final = re.compile(r"([0-9]{12,15})\.json")
_VERSION: Final = re.compile(r"([0-9]{12,15})-[0-9a-f]{32}")


class IndexedVersion(Part):
    """A file of the index: a version and its files.

    Attributes:
        committed: the version.
        token: ends the name of the directory that has its files.
        files: name of each file of rows or deleted ids -> its number of rows.
    """

    committed: CommittedVersion
    token: HexToken
    files: dict[str, Annotated[int, Field(ge=1)]]

    @property
    def directory(self) -> str:
        """Name of the directory that has its files."""
        return f"{self.committed.number:012d}-{self.token}"


class ParquetDirectory(Sink):
    """Holds every version that was published, each as what it changed.

    Args:
        path: the directory; the first version makes it.
    """

    def __init__(self, path: Path) -> None:
        self.url = f"parquet:{path}"
        self._path = path
        self._index = path / "index"
        self._versions = path / "versions"
        self._attempt: _VersionWriter | None = None
        self._lock = threading.Lock()  # held while rows are read
        # The rows of each table that were read last, and their version.
        self._read: dict[str, tuple[IndexedVersion, RowsById]] = {}

    def position(self) -> SinkPosition:
        """See `Sink.position`; rows of attempts lie beside, so none is ever begun."""
        stored = self._stored(self._newest_number())
        return SinkPosition(None if stored is None else stored.committed, None)

    def begin(self, version: SinkVersion, parent: CheckpointRef | None) -> None:
        """See `Sink.begin`."""
        self.discard()
        with _errors(self.url):
            for directory in (self._index, self._versions):
                durable.make_directory(directory)
            publisher = _locked(self._path / "publisher.lock", self.url)
        try:
            position = self.position()
            refuse_parent(self.url, position, version, parent)
            self._remove_attempts()
            number = 1 if position.committed is None else position.committed.number + 1
            with _errors(self.url):
                self._attempt = _VersionWriter(self._versions, publisher, number, version, parent)
        except BaseException:
            os.close(publisher)
            raise

    def _remove_attempts(self) -> None:
        """Remove the files of attempts that were not committed; no publisher runs but this one."""
        with _errors(self.url):
            for unfinished in self._index.glob(f"{durable.TEMPORARY_PREFIX}*"):
                durable.remove(unfinished)
            for directory in self._versions.iterdir():
                name = _VERSION.fullmatch(directory.name)
                stored = None if name is None else self._stored(int(name[1]))
                if name is not None and (stored is None or stored.directory != directory.name):
                    durable.step(f"sink-remove {directory.name}")
                    shutil.rmtree(directory)

    def put(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """See `Sink.put`."""
        with _errors(self.url):
            durable.step(f"sink-put {self._path}")
            self._open_attempt().write(table, ids, rows)

    def delete(self, table: str, ids: Tensor) -> None:
        """See `Sink.delete`."""
        with _errors(self.url):
            durable.step(f"sink-delete {self._path}")
            self._open_attempt().write(table, ids, None)

    def _open_attempt(self) -> _VersionWriter:
        assert self._attempt is not None  # after begin
        return self._attempt

    def commit(self, dense: Mapping[str, Tensor], changes: Sequence[TableChange]) -> None:
        """See `Sink.commit`."""
        attempt = self._open_attempt()
        with _errors(self.url):
            files = attempt.close_files(bytes_of_dense(dense))
            stored = IndexedVersion(
                committed=CommittedVersion(
                    number=attempt.number,
                    version=attempt.version,
                    parent=attempt.parent,
                    changes=tuple(changes),
                    committed_ms=now_ms(),
                ),
                token=attempt.token,
                files=files,
            )
            durable.create_exclusively(
                self._index_file(attempt.number), stored.model_dump_json().encode()
            )
        self.discard()  # lets another publisher in

    def discard(self) -> None:
        """See `Sink.discard`: the files stay, and no index names them."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()

    @contextmanager
    def reading(self) -> Iterator[SinkReading]:
        """See `Sink.reading`; all rows of a table are in memory once one was looked up."""
        stored = self._stored(self._newest_number())
        if stored is None:
            raise NotServing(
                self.url,
                found="no version",
                expected="a version that was published",
                next_step="recpoint publish-to SINK URL",
            )
        yield _ParquetReading(self, stored)

    def close(self) -> None:
        """See `Sink.close`."""
        self.discard()

    def _newest_number(self) -> int:
        """Return the number of the newest version; 0: there is none."""
        with _errors(self.url):
            if not self._index.is_dir():
                return 0
            names = [_INDEX_FILE.fullmatch(path.name) for path in self._index.iterdir()]
        return max((int(name[1]) for name in names if name is not None), default=0)

    def _index_file(self, number: int) -> Path:
        return self._index / f"{number:012d}.json"

    def _stored(self, number: int) -> IndexedVersion | None:
        """Return a version of the index; None: it has no such version."""
        path = self._index_file(number)
        with _errors(self.url):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                return None
        return parsed(IndexedVersion, data, name=str(path))

    def dense_of(self, stored: IndexedVersion) -> dict[str, Tensor]:
        """Return the dense layers of a version."""
        with _errors(self.url):
            return dense_of_bytes((self._versions / stored.directory / _DENSE).read_bytes())

    def rows_of(self, stored: IndexedVersion, table: SinkTable) -> RowsById:
        """Return all rows of a table at a version: those that were read last, and later changes."""
        with self._lock, _errors(self.url):
            last, rows = self._read.get(table.name, (None, RowsById.none(table)))
            versions = self._since(last, stored)
            if versions and versions[0].committed.parent is None:
                rows = RowsById.none(table)
            for version in versions:
                rows = self._changed(rows, version, table)
            self._read[table.name] = stored, rows
            return rows

    def _since(self, last: IndexedVersion | None, stored: IndexedVersion) -> list[IndexedVersion]:
        """Return the versions after `last` up to `stored`, from the one that came anew at most."""
        versions: list[IndexedVersion] = []
        while stored != last:
            versions.insert(0, stored)
            if stored.committed.parent is None:
                break
            earlier = self._stored(stored.committed.number - 1)
            if earlier is None:
                raise SinkError(
                    self.url,
                    found="no such file",
                    expected=f"index/{stored.committed.number - 1:012d}.json, which later versions "
                    "are changes of",
                    next_step="publish to a new directory",
                )
            stored = earlier
        return versions

    def _changed(self, rows: RowsById, version: IndexedVersion, table: SinkTable) -> RowsById:
        directory = self._versions / version.directory
        place = version.committed.version.tables.index(table)
        put, gone = f"{place}.rows.parquet", f"{place}.deleted.parquet"
        no_ids = [torch.empty(0, dtype=torch.int64, device="cpu")]
        gone_ids = no_ids + (list(read_ids(directory / gone)) if gone in version.files else [])
        parts = list(read_rows(directory / put, table)) if put in version.files else []
        return rows.changed(
            torch.cat(gone_ids),
            torch.cat(no_ids + [ids for ids, _ in parts]),
            torch.cat([RowsById.none(table).rows, *(new_rows for _, new_rows in parts)]),
        )


class _VersionWriter:
    """Writes the files of one version.

    Args:
        versions: the directory of all versions.
        publisher: descriptor of the locked file; `end` closes it.
        number: of the version.
        version, parent: as for `Sink.begin`.
    """

    def __init__(
        self,
        versions: Path,
        publisher: int,
        number: int,
        version: SinkVersion,
        parent: CheckpointRef | None,
    ) -> None:
        self.number, self.version, self.parent = number, version, parent
        self.token = secrets.token_hex(16)
        self._publisher = publisher
        self._directory = versions / f"{number:012d}-{self.token}"
        self._places = {table.name: place for place, table in enumerate(version.tables)}
        self._files: dict[str, DeltaWriter] = {}
        durable.make_directory(self._directory)

    def write(self, table: str, ids: Tensor, rows: Tensor | None) -> None:
        """Append rows of a table, or ids of deleted rows if `rows` is None."""
        kind = "deleted" if rows is None else "rows"
        name = f"{self._places[table]}.{kind}.parquet"
        if name not in self._files:
            self._files[name] = DeltaWriter(
                self._directory / name, None if rows is None else self.version.table(table)
            )
        self._files[name].write(ids, rows)

    def close_files(self, dense: bytes) -> dict[str, int]:
        """Make all files durable; return the number of rows of each."""
        rows = {}
        for name, file in self._files.items():
            file.close()
            if file.rows:
                durable.fsync_file(self._directory / name)
                rows[name] = file.rows
        durable.write_atomically(self._directory / _DENSE, dense)
        return rows

    def end(self) -> None:
        """Let another publisher in. Never raises: no index names what cannot be written now."""
        os.close(self._publisher)
        for file in self._files.values():
            with suppress(OSError, pa.ArrowException):
                file.close()


class _ParquetReading:
    """See `SinkReading`."""

    def __init__(self, sink: ParquetDirectory, stored: IndexedVersion) -> None:
        self._sink, self._stored = sink, stored

    @property
    def version(self) -> CommittedVersion:
        return self._stored.committed

    def _rows(self, table: str) -> RowsById:
        served = table_of(self._sink.url, self.version.version, table)
        return self._sink.rows_of(self._stored, served)

    def lookup(self, table: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        held = self._rows(table)
        places, present = held.places(ids)
        rows = torch.zeros(len(ids), held.rows.shape[1], dtype=held.rows.dtype, device="cpu")
        rows[present] = held.rows[places[present]]
        return rows, present

    def dense(self) -> dict[str, Tensor]:
        return self._sink.dense_of(self._stored)

    def row_count(self, table: str) -> int:
        return len(self._rows(table).ids)


def _locked(path: Path, url: str) -> int:
    """Return a descriptor of the file, which no other process has locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
        raise SinkError(
            url,
            found="another publisher, which has locked publisher.lock",
            expected="a directory that this process alone writes",
            next_step="end the other publisher, or publish to another directory",
        ) from None
    return descriptor


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Turn errors of files into those of a sink."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise SinkError(
            url,
            found=str(error),
            expected="a directory whose files can be read and written",
            next_step="see the message; the sink holds its last version",
        ) from error
