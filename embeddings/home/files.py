"""Keeps the rows of a home in files of one directory, for a table that is larger than memory.

Write-backs are appended to the newest log of the table (`log.py`) in large sequential
writes. The index of logs is bounded: at half the bound they are sealed, and a thread merges
sealed logs, the oldest first, into the table's base file. There the place of a row follows
from its id, so the base needs no index, and a row that was never written is a hole.

A fetch looks for a row in the logs, the newest first, and then reads the base. A merge does
not disturb this: it gives a row in the base the record that readers find in the log, and
leaves the other bytes of a block as they are.

A freeze seals the newest log and keeps the logs there are. The rows of a log
that was sealed later are not merged until the freeze is released, so the base keeps the records of
frozen rows that no kept log has.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.embeddings.home.directory import HomeDirectory, HomeFile
from recpoint.embeddings.home.forms import BatchOrder, HomeTables, TableForm
from recpoint.embeddings.home.log import Layout, RecordLog, Targets, require_right
from recpoint.errors import HomeError, SettingsError
from recpoint.kernels.row_blocks import Channel

__all__ = ["FileHome", "FileLimits"]

#: Sealed logs of a table beyond which they are merged, whatever their size: a fetch looks
#: into each.
_MOST_SEALED: Final = 4
#: Bytes of slots that a merge has in memory.
_MERGE_BYTES: Final = 32 << 20
#: Reads of a fetch at once.
_LANES: Final = 128
#: Threads that read rows of different tables at the same time, and the fewest tables that they are
#: worth starting for.
_READERS: Final = 4
_FEWEST_AT_ONCE: Final = 3
#: Reads and writes of a merge at once, fewer than those of a fetch, which training waits for. While
#: a write-back waits for the merge, there are as many.
_MERGE_LANES: Final = 32
#: Rows that a merge patches before it looks again whether somebody waits for it.
_PATCHED_ROWS: Final = 1 << 15
#: The bounds are looked at after this part of one was written.
_CHECKS: Final = 64


@dataclass(frozen=True, kw_only=True)
class FileLimits:
    """How much memory and room a home in files may use beside its base files.

    Both bounds are exceeded while rows are frozen, if what exceeds them was written since.

    Args:
        index_rows: rows in the index of all tables; each takes 21 to 43 bytes of memory.
        log_bytes: bytes in segments of all tables.
        segment_bytes: length of a segment.
        buffer_bytes: bytes that are written at once. Each table has such a buffer.

    Raises:
        SettingsError: a number that cannot work.
    """

    index_rows: int = 4_000_000
    log_bytes: int = 16 << 30
    segment_bytes: int = 64 << 20
    buffer_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise SettingsError(
                    name, found=str(value), expected="1 or more", next_step=f"change {name}"
                )


class FileHome(Home):
    """Keeps rows in files of a directory that no other home uses.

    Args:
        directory: on a local disk. Made with mode 0700 if it does not exist.
        limits: bounds of memory and room.

    Raises:
        HomeError: the directory is used by another home or holds other files, or the system
            refuses a call.
    """

    may_add_rows = True

    def __init__(
        self, directory: str | os.PathLike[str], *, limits: FileLimits | None = None
    ) -> None:
        self._limits = limits or FileLimits()
        self._directory = HomeDirectory(directory)
        self._tables: HomeTables[_TableInFiles] = HomeTables(f"the home in {self._directory.path}")
        self._channels = _Channels()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="recpoint-home-read")
        self._numbers = itertools.count(1)  # of logs
        self._tables_made = itertools.count(1)
        # Guards what follows, and is notified when a merge may begin or has ended.
        self._changed = threading.Condition()
        self._merger: threading.Thread | None = None
        self._merging: _TableInFiles | None = None
        self._is_closing = False
        self._failure: HomeError | None = None
        self._waiting = 0  # write-backs that wait for a merge
        self._unchecked_rows = 0  # written since the bounds were looked at

    def add_table(self, table: str, *, rows: int, record_bytes: int) -> None:
        """Make the base file of a table, without room on the disk."""
        self._tables.add(TableForm(table, rows, record_bytes), self._made)

    def add_rows(self, table: str, *, rows: int) -> None:
        """Make the base file longer, without room on the disk."""
        self._tables.add_rows(table, rows, _TableInFiles.add_rows)

    def _made(self, form: TableForm) -> _TableInFiles:
        number = next(self._tables_made)
        layout = Layout.of(
            form,
            number,
            buffer_bytes=self._limits.buffer_bytes,
            segment_bytes=self._limits.segment_bytes,
        )
        return _TableInFiles(layout, self._directory, self._channels, self._numbers, self._wake)

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Read records from the newest log that has them, or from the base."""
        return self._tables.get(table).fetch(ids, out)

    def fetch_all(self, wanted: Sequence[TableRows]) -> list[Tensor]:
        """Read records of several tables at the same time.

        A table has few of the rows of a batch: a disk is busy only with those of several tables.
        """
        if len(wanted) < _FEWEST_AT_ONCE:
            return super().fetch_all(wanted)
        # All that were begun end before an error is raised: they write to the caller's memory.
        fetches = [self._readers.submit(self.fetch, *request) for request in wanted]
        wait(fetches)
        return [fetch.result() for fetch in fetches]

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        """Append records. Waits for a merge if the index is full, or the logs are."""
        stored_table = self._tables.get(table)
        stored_table.layout.form.require_records(ids, "records", records)
        self._require_whole()
        if self._unchecked_rows * _CHECKS >= self._limits.index_rows or (
            self._unchecked_rows * stored_table.layout.blocks.slot_bytes * _CHECKS
            >= self._limits.log_bytes
        ):
            self._unchecked_rows = 0
            self._keep_bounds()
        self._unchecked_rows += len(ids)  # another thread may lose some, which does no harm
        try:
            stored_table.write_back(ids, records, batch)
        except _WriteFailed as failed:
            with self._changed:
                self._failure = self._failure or failed.error
            raise failed.error from failed.error.__cause__

    def freeze(self, table: str, rows: range) -> FrozenRows:
        """Seal the newest log, and keep all logs there are."""
        return self._tables.get(table).freeze(rows)

    def clear(self, table: str) -> None:
        """Remove the logs, and empty the base."""
        self._tables.get(table).clear()

    def size_bytes(self) -> dict[str, int]:
        """Return the memory of indexes and buffers, and the room that files take on the disk."""
        total = {"rows": 0, "index": 0, "frozen": 0, "buffers": self._channels.nbytes, "disk": 0}
        for table in self._tables.all():
            table.add_sizes(total)
        return total

    def close(self) -> None:
        """End the merge thread, delete the files of the tables, and give the directory back."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify_all()
            merger, self._merger = self._merger, None
        if merger is not None:
            merger.join()
        self._readers.shutdown()
        for table in self._tables.close():
            table.close()
        self._channels.close()
        self._directory.close()

    def _use(self, tables: list[_TableInFiles], *, newest_only: bool) -> float:
        """Return the used part of the bound that is nearest to its end."""
        rows = log_bytes = 0
        for table in tables:
            more_rows, more_bytes = table.used(newest_only=newest_only)
            rows += more_rows
            log_bytes += more_bytes
        return max(rows / self._limits.index_rows, log_bytes / self._limits.log_bytes)

    def _keep_bounds(self) -> None:
        """Seal logs if half of a bound is used; wait for merges if all of it is."""
        tables = self._tables.all()
        if self._use(tables, newest_only=True) > 0.5:
            for table in tables:
                table.seal()
            self._wake()
        with self._changed:
            self._waiting += 1
            try:
                while (
                    self._failure is None
                    and not self._is_closing
                    and self._use(tables, newest_only=False) > 1
                    and (self._merging is not None or self._next_merge() is not None)
                ):
                    self._changed.wait()
            finally:
                self._waiting -= 1
        self._require_whole()

    def _require_whole(self) -> None:
        """Refuse to write after a write has failed."""
        failure = self._failure
        if failure is not None:
            raise HomeError(
                failure.subject,
                found=f"a write-back after a write that failed: {failure.found}",
                expected="no more write-backs to this home; its rows can be fetched",
                next_step=failure.next_step,
            ) from failure

    def _wake(self) -> None:
        """Have the merge thread look for work."""
        with self._changed:
            self._changed.notify_all()
            if self._merger is None and not self._is_closing and self._next_merge() is not None:
                self._merger = threading.Thread(
                    target=self._merge, name="recpoint-home-merge", daemon=True
                )
                self._merger.start()

    def _next_merge(self) -> tuple[_TableInFiles, RecordLog] | None:
        """Return the oldest log that should be merged now, and may be."""
        try:
            tables = self._tables.all()
        except HomeError:
            return None  # closed
        is_half_full = self._use(tables, newest_only=False) > 0.5
        mergeable = [
            (log.number, table, log)
            for table in tables
            if (log := table.mergeable(at_once=is_half_full)) is not None
        ]
        if not mergeable:
            return None
        _, table, log = min(mergeable, key=lambda candidate: candidate[0])
        return table, log

    def _merge(self) -> None:
        """Merge one log after the other until the home is closed. Runs in the thread."""
        while True:
            with self._changed:
                self._merging = None
                self._changed.notify_all()
                while not self._is_closing and (work := self._next_merge()) is None:
                    self._changed.wait()
                if self._is_closing:
                    return
                assert work is not None
                self._merging = work[0]
            failure: HomeError | None = HomeError(
                f"the home in {self._directory.path}",
                found="a merge that ended with an error of recpoint, see the log",
                expected="merges that end",
                next_step="report it; start training again",
            )
            try:
                work[0].merge(work[1], self._pace)
                failure = None
            except HomeError as error:
                failure = error
            except MemoryError as error:
                failure = HomeError(
                    f"the home in {self._directory.path}",
                    found=str(error) or "no memory for a merge",
                    expected=f"{_MERGE_BYTES} bytes for each merge",
                    next_step="free memory, then start training again",
                )
            finally:
                if failure is not None:
                    with self._changed:
                        self._failure = self._failure or failure
                        self._merging = None
                        self._changed.notify_all()
            if failure is not None:
                return

    def _pace(self) -> int:
        """Return how many reads and writes a merge should have at once; 0: it should stop."""
        if self._is_closing:
            return 0
        return _MERGE_LANES if self._waiting == 0 else _LANES


class _WriteFailed(Exception):
    """A write-back that failed after it had begun."""

    def __init__(self, error: HomeError) -> None:
        super().__init__(error)
        self.error = error


class _Channels:
    """Channels for reads, each for one thread at a time. Idle ones are kept for later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._made_bytes = 0
        self._is_closed = False

    @contextmanager
    def lend(self) -> Iterator[Channel]:
        with self._lock:
            channel = self._idle.pop() if self._idle else None
        if channel is None:
            channel = Channel(lanes=_LANES)
            with self._lock:
                self._made_bytes += channel.nbytes
        try:
            yield channel
        finally:
            with self._lock:
                if not self._is_closed:
                    self._idle.append(channel)

    @property
    def nbytes(self) -> int:
        return self._made_bytes

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._idle.clear()


class _PacedChannels:
    """Channels of one merge."""

    def __init__(self, pace: Callable[[], int]) -> None:
        self._pace = pace
        self._made: dict[int, Channel] = {}

    def next(self) -> Channel | None:
        """Return a channel for the present pace; None: the merge should stop."""
        lanes = self._pace()
        if not lanes:
            return None
        if lanes not in self._made:
            self._made[lanes] = Channel(lanes=lanes)
        return self._made[lanes]


class _FrozenInFiles(FrozenRows):
    def __init__(self, table: _TableInFiles, rows: range, logs: list[RecordLog]) -> None:
        self._table: _TableInFiles | None = table
        self._form = table.layout.form
        self._rows = rows
        self.logs = logs  # the newest first, pinned
        #: Generations with a larger number may not be merged.
        self.newest = logs[0].number if logs else 0

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        table = self._table
        if table is None:
            raise HomeError(
                f"frozen rows of table {self._form.table!r}",
                found="a fetch after release()",
                expected="no fetch after release() or close()",
                next_step="freeze the rows again",
            )
        self._form.require_records(ids, "out", out, self._rows)
        return table.read(self.logs, ids, out)

    def release(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            table.release(self)
            self.logs = []

    def drop(self) -> None:
        """The table is closed."""
        self._table = None
        self.logs = []


class _TableInFiles:
    """One table.

    Locks are taken in this order: `_merges`, `_writes`, `lock`. `lock` guards the lists, and the
    newest log; it is held for microseconds. A home's condition is never waited for, and
    `wake` never called, with one of them held.
    """

    def __init__(
        self,
        layout: Layout,
        directory: HomeDirectory,
        channels: _Channels,
        numbers: Iterator[int],
        wake: Callable[[], None],
    ) -> None:
        self.layout = layout
        self._directory = directory
        self._channels = channels
        self._numbers = numbers
        self._wake = wake
        self._merges = threading.Lock()
        self._writes = threading.Lock()
        self.lock = threading.Lock()
        self._batches = BatchOrder(layout.form.table)
        self._base = directory.make(f"table-{layout.number:04d}.base")
        self._base_bytes = layout.blocks.file_bytes(layout.form.rows)
        try:
            self._base.resize(self._base_bytes)
        except BaseException:
            self._base.remove()
            raise
        self._newest = self._new_log()
        self._sealed: list[RecordLog] = []  # the newest first
        self._retired: list[RecordLog] = []  # merged, kept by readers
        self._frozen: list[_FrozenInFiles] = []

    def add_rows(self, larger_form: TableForm) -> None:
        """Make room for more rows. A merge that runs meanwhile writes rows of before only."""
        with self._writes, self.lock:
            base_bytes = self.layout.blocks.file_bytes(larger_form.rows)
            self._base.resize(base_bytes)
            self._base_bytes = base_bytes
            self.layout = self.layout._replace(form=larger_form)

    def _new_log(self) -> RecordLog:
        number = next(self._numbers)

        def make(segment: int) -> HomeFile:
            name = f"table-{self.layout.number:04d}.{number:06d}-{segment:04d}.log"
            return self._directory.make(name)

        return RecordLog(self.layout, number, self.lock, make)

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        self.layout.form.require_records(ids, "out", out)
        targets = Targets(ids, self._base)
        logs: list[RecordLog] = []
        try:
            with self.lock:
                # Pinned before anything is read, so that no merge removes a file that is read.
                for log in (self._newest, *self._sealed):
                    log.pin()
                    logs.append(log)
                self._newest.point(targets, out)
            return self._finish(targets, logs[1:], out)
        finally:
            with self.lock:
                self._unpin(logs)

    def _unpin(self, logs: list[RecordLog]) -> None:
        """Let logs go, and forget those that were merged meanwhile."""
        for log in logs:
            log.unpin()
        self._retired = [log for log in self._retired if log.is_held]

    def read(self, logs: list[RecordLog], ids: Tensor, out: Tensor) -> Tensor:
        """Read rows from sealed logs, which the caller has pinned, and the base."""
        return self._finish(Targets(ids, self._base), logs, out)

    def _finish(self, targets: Targets, sealed: list[RecordLog], out: Tensor) -> Tensor:
        for log in sealed:
            log.point(targets, out)
        with self._channels.lend() as channel:
            return targets.read(channel, out, self.layout)

    def write_back(self, ids: Tensor, records: Tensor, batch: int) -> None:
        with self._writes:
            self._batches.require_next(batch)
            try:
                self._newest.append(ids, records)
            except HomeError as error:
                raise _WriteFailed(error) from error
            self._batches.last = batch

    def seal(self) -> None:
        """Begin a new log, unless the newest has no rows."""
        with self._writes, self.lock:
            self._seal()

    def _seal(self) -> None:
        if len(self._newest.rows):
            self._sealed.insert(0, self._newest)
            self._newest = self._new_log()

    def freeze(self, rows: range) -> FrozenRows:
        self.layout.form.require_rows(rows)
        with self._writes, self.lock:
            self._seal()
            for log in self._sealed:
                log.pin()
            frozen = _FrozenInFiles(self, rows, list(self._sealed))
            self._frozen.append(frozen)
        self._wake()
        return frozen

    def release(self, frozen: _FrozenInFiles) -> None:
        with self.lock:
            self._frozen.remove(frozen)
            self._unpin(frozen.logs)
        self._wake()

    def mergeable(self, *, at_once: bool) -> RecordLog | None:
        """Return the oldest log, if it should be merged and no frozen rows forbid it."""
        with self.lock:
            if not self._sealed or not (at_once or len(self._sealed) > _MOST_SEALED):
                return None
            oldest = self._sealed[-1]
            if any(oldest.number > frozen.newest for frozen in self._frozen):
                return None
            return oldest

    def merge(self, log: RecordLog, pace: Callable[[], int]) -> None:
        """Copy the rows of the oldest log to the base, and retire the log.

        A freeze that begins meanwhile keeps the log, so the base does not matter to it.

        Raises:
            HomeError: a file is damaged, or cannot be read or written. The log stays.
        """
        with self._merges:
            if not self._sealed or self._sealed[-1] is not log:
                return  # cleared
            channels = _PacedChannels(pace)
            ids, places = log.rows.items()
            step = max(1, _MERGE_BYTES // self.layout.blocks.slot_bytes)
            for first in range(0, len(ids), step):
                part = slice(first, first + step)
                if not self._merge_part(channels, log, ids[part], places[part]):
                    return
            with self.lock:
                self._sealed.pop()
                log.retire()
                if log.is_held:
                    self._retired.append(log)

    def _merge_part(
        self, channels: _PacedChannels, log: RecordLog, ids: Tensor, places: Tensor
    ) -> bool:
        """Copy rows to the base. Return False if the merge should stop."""
        channel = channels.next()
        if channel is None:
            return False
        blocks = self.layout.blocks
        rows = torch.empty(len(ids), blocks.slot_bytes, dtype=torch.uint8, device="cpu")
        targets = Targets(ids, None)
        log.point_at(targets, targets.left, places, rows, whole=True)
        targets.read(channel, rows, self.layout, whole=True)
        paths = {self._base.descriptor: self._base.path}
        for part_ids, slots in zip(
            ids.split(_PATCHED_ROWS), rows.split(_PATCHED_ROWS), strict=True
        ):
            channel = channels.next()
            if channel is None:
                return False
            files = torch.full_like(part_ids, self._base.descriptor)
            states = channel.patch(files, part_ids, slots, form=blocks)
            require_right(states, files, part_ids, part_ids, paths, self.layout)
        return True

    def used(self, *, newest_only: bool) -> tuple[int, int]:
        """Return the rows in indexes, and the bytes in segments."""
        with self.lock:
            used = [self._newest] if newest_only else [self._newest, *self._sealed]
        return (
            sum(len(log.rows) for log in used),
            sum(log.log_bytes for log in used),
        )

    def clear(self) -> None:
        with self._merges, self._writes, self.lock:
            if self._frozen:
                raise HomeError(
                    f"table {self.layout.form.table!r}",
                    found=f"{len(self._frozen)} readers of frozen rows",
                    expected="none when a table is cleared",
                    next_step="release them first",
                )
            for log in (self._newest, *self._sealed):
                log.retire()
            self._newest, self._sealed = self._new_log(), []
            self._base.resize(0)
            self._base.resize(self._base_bytes)
            self._batches.last = None

    def add_sizes(self, total: dict[str, int]) -> None:
        with self.lock:
            live = [self._newest, *self._sealed]
            total["index"] += sum(log.rows.nbytes for log in live)
            total["buffers"] += sum(log.buffer_bytes for log in live)
            total["frozen"] += sum(log.rows.nbytes + log.buffer_bytes for log in self._retired)
            total["disk"] += self._base.disk_bytes()
            total["disk"] += sum(log.disk_bytes() for log in live + self._retired)

    def close(self) -> None:
        with self._merges, self._writes, self.lock:
            for frozen in self._frozen:
                frozen.drop()
            for log in (self._newest, *self._sealed, *self._retired):
                log.remove()
            self._frozen, self._sealed, self._retired = [], [], []
            self._base.remove()
