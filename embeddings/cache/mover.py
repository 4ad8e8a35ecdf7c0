"""Moves rows between the slots of a cache and their home, in a thread of its own.

The *home thread* writes back rows that leave their slots and fetches rows that enter, in the order
in which they were planned. A fetch therefore follows the last write-back of its row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.cache.call_thread import CallThread
from recpoint.embeddings.cache.meeting import Meeting
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.cache.reserved_slots import FIRST_RESERVED
from recpoint.embeddings.cache.residents import CachedRows, FirstValues
from recpoint.embeddings.cache.turns import Act
from recpoint.embeddings.home.contract import FrozenRows, Home, TableRows
from recpoint.lookahead.oracle import Step

__all__ = ["Mover"]

#: Rows that are copied to the home at a time.
_PIECE_ROWS: Final = 65_536


class Mover:
    """The home thread of a cache.

    Args:
        home: where rows are that have no slot.
        tables: name -> slots and first values.
        stats: of the cache.
        meeting: lets home threads of several trainers meet.

    Attributes:
        home, tables, meeting: as given.
        thread: the home thread.
        error: of the home thread, which does no guarded work after it; None: it has not failed.
        dense: held while an optimizer's step reads and writes all slots, so that no row may enter
            one meanwhile.
    """

    def __init__(
        self, home: Home, tables: Mapping[str, CachedRows], stats: CacheStats, meeting: Meeting
    ) -> None:
        self.home = home
        self.tables = tables
        self.meeting = meeting
        self.thread = CallThread("recpoint-home")
        self.error: BaseException | None = None
        self.dense = threading.Lock()
        self._stats = stats
        self._moves = 0  # numbers the write-backs

    def submit(self, act: Callable[[], None]) -> Future[None]:
        """Have the home thread do something, unless it has failed before."""
        return self.thread.submit(self.guarded(act))

    def guarded(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return `act` as the home thread may do it: not after an error, whose first it keeps."""

        def guarded() -> None:
            self.raise_error()
            try:
                act()
            except BaseException as error:
                self.error = error  # before other ranks can leave this one
                self.meeting.leave()  # the other home threads must not wait for this one
                raise

        return guarded

    def raise_error(self) -> None:
        """Raise the error of the home thread, if it has failed."""
        if self.error is not None:
            raise self.error

    def wait(self, futures: Iterable[Future[None]]) -> None:
        """Wait for work of the home thread, or of another one, and count the time."""
        unfinished = [
            future for future in futures if not (future.done() and future.exception() is None)
        ]
        if not unfinished:
            return
        started = time.perf_counter()
        for future in unfinished:
            future.result()
        self._stats.waits += 1
        self._stats.wait_seconds += time.perf_counter() - started

    def wait_for_all(self) -> None:
        """Wait until the home thread has done what it has to do, also if it has failed."""
        self.wait([self.thread.submit(lambda: None)])

    def end(self, *, within_seconds: float | None) -> None:
        """End the home thread after what it has to do; see `CallThread.end`."""
        self.thread.end(within_seconds=within_seconds)

    def start(self, moves: Sequence[tuple[CachedRows, Step]], batch: int) -> Future[None]:
        """Have the home thread move the rows of a batch's steps, at most one a table."""
        for rows, step in moves:
            rows.slots.ready[step.fetched_slots] = False
        return self.submit(lambda: self._move(moves, batch))

    def bring(self, rows: CachedRows, ids: Tensor, slots: Tensor) -> Future[None]:
        """Have the home thread fetch rows into slots that no plan has."""
        return self.submit(lambda: self._bring(rows, ids, slots))

    def _bring(self, rows: CachedRows, ids: Tensor, slots: Tensor) -> None:
        ((records, is_at_home),) = self._read_home([(rows, ids)])
        self._put(rows, ids, slots, records, is_at_home)

    def _move(self, moves: Sequence[tuple[CachedRows, Step]], batch: int) -> None:
        leaving = [(rows, step) for rows, step in moves if step.evicted_slots.numel()]
        self.write_back([changed for changed in map(_changed, leaving) if changed is not None])
        for rows, step in leaving:
            rows.slots.ids[step.evicted_slots] = -1
        # No row that enters a slot next is still being written back.
        self.meeting.meet(Act.MOVE_ROWS, batch)
        entering = []
        for rows, step in moves:
            # Ids are ascending: reserved slots come last.
            count = int(torch.searchsorted(step.fetched_ids, FIRST_RESERVED))
            reserved = step.fetched_slots[count:]
            rows.slots.enter(torch.full_like(reserved, -1), reserved)
            if count:
                entering.append((rows, step.fetched_ids[:count], step.fetched_slots[:count]))
        read = self._read_home([(rows, ids) for rows, ids, _ in entering])
        for (rows, ids, chosen_slots), (records, is_at_home) in zip(entering, read, strict=True):
            self._put(rows, ids, chosen_slots, records, is_at_home)

    def write_back(self, changed: Sequence[TableRows]) -> None:
        """Write rows of several tables to the home. Only the home thread calls it."""
        if not changed:
            return
        for rows in changed:
            self.put_at_home(self.tables[rows.table])
        self._moves += 1
        self.home.write_back_all(changed, batch=self._moves)
        self._stats.written_rows += sum(len(rows.ids) for rows in changed)
        self._stats.written_bytes += sum(rows.records.nbytes for rows in changed)

    def empty(self, rows: CachedRows, ids: Tensor) -> None:
        """Write zeros and new row states of rows that are in no slot; by the home thread alone.

        Rows that the home does not have are zeros already.

        Args:
            rows: the table, whose first values are zeros.
            ids: int64 [n], ascending.
        """
        if not rows.is_at_home:
            return
        for part_ids in ids.split(_PIECE_ROWS):
            self._write(rows, part_ids, rows.slots.new_records(rows.initial(part_ids)))

    def put_at_home(self, rows: CachedRows) -> None:
        """Have the home know a table. Only the home thread, or nobody else, may be at work."""
        if not rows.is_at_home:
            layout = rows.slots.fix_layout()
            self.home.add_table(
                rows.slots.name, rows=rows.slots.rows, record_bytes=layout.size_bytes
            )
            rows.is_at_home = True

    def add_rows(self, rows: CachedRows, count: int, initial: FirstValues) -> None:
        """Give a table more rows, here and at home. The thread must be idle.

        Args:
            rows: the table.
            count: rows of the table afterwards.
            initial: returns the first values of the new rows.

        Raises:
            HomeError: the home has failed, or refuses; nothing has changed.
        """
        self.raise_error()
        if rows.is_at_home:
            self.home.add_rows(rows.slots.name, rows=count)
        rows.add_rows(count, initial)

    def _put(
        self,
        rows: CachedRows,
        ids: Tensor,
        chosen_slots: Tensor,
        records: Tensor | None,
        is_at_home: Tensor,
    ) -> None:
        slots = rows.slots
        is_new = ~is_at_home
        new_values = rows.initial(ids[is_new]) if bool(is_new.any()) else None
        with self.dense:
            if records is not None and new_values is None:
                slots.put(chosen_slots, records)
            elif records is not None:
                slots.put(chosen_slots[is_at_home], records[is_at_home])
            if new_values is not None:
                slots.put_new(chosen_slots[is_new], new_values)
            slots.enter(ids, chosen_slots)
        self._stats.fetched_rows += ids.numel()
        if records is not None:
            self._stats.fetched_bytes += int(is_at_home.sum()) * records.shape[1]

    def _read_home(
        self, entering: Sequence[tuple[CachedRows, Tensor]]
    ) -> list[tuple[Tensor | None, Tensor]]:
        """Return for each table records, uint8 [n, bytes], and which of them the home has."""
        unread: list[tuple[Tensor | None, Tensor]] = []
        requests: list[TableRows] = []
        for rows, ids in entering:
            is_at_home = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
            layout, records = rows.slots.layout, None
            if rows.is_at_home and layout is not None:
                records = torch.empty(len(ids), layout.size_bytes, dtype=torch.uint8, device="cpu")
                requests.append(TableRows(rows.slots.name, ids, records))
            unread.append((records, is_at_home))
        answers = iter(self.home.fetch_all(requests) if requests else [])
        return [
            (records, is_at_home if records is None else next(answers))
            for records, is_at_home in unread
        ]

    def freeze(self, name: str) -> FrozenRows | None:
        """Return a table's rows at home, frozen; None: the home does not know the table."""
        self.raise_error()
        rows = self.tables[name]
        return self.home.freeze(name, range(rows.slots.rows)) if rows.is_at_home else None

    def copy_storage(self, rows: CachedRows) -> None:
        """Have the values of a table that had storage copied to the home, once."""
        if rows.storage is not None and not rows.is_copying:
            rows.is_copying = True
            self.submit(partial(self._copy_storage, rows))

    def _copy_storage(self, rows: CachedRows) -> None:
        storage, slots = rows.storage, rows.slots
        assert storage is not None
        if self.meeting.is_first:
            self.put_at_home(rows)
            for first in range(0, len(storage), _PIECE_ROWS):  # the table may have got more rows
                ids = torch.arange(
                    first, min(first + _PIECE_ROWS, len(storage)), dtype=torch.int64, device="cpu"
                )
                self._write(rows, ids, slots.new_records(storage[ids.to(storage.device)].cpu()))
        rows.drop_storage()
        self.meeting.meet(Act.COPY_TABLE)

    def begin_anew(self) -> None:
        """Take all rows out of slots and home, also after an error. The thread must be idle."""
        self.error = None
        for rows in self.tables.values():
            rows.begin_anew()
            if rows.is_at_home:
                self.home.clear(rows.slots.name)

    def _write(self, rows: CachedRows, ids: Tensor, records: Tensor) -> None:
        self._moves += 1
        self.home.write_back(rows.slots.name, ids, records, batch=self._moves)

    def fetch_idle(self, name: str, ids: Tensor, records: Tensor) -> None:
        """Read rows that `write_idle` wrote, while nothing is trained.

        Args:
            name: name of the table.
            ids: int64 [n], ascending.
            records: uint8 [n, bytes]. Those of rows that the home has are written to it.
        """
        self.put_at_home(self.tables[name])
        self.home.fetch(name, ids, records)

    def write_idle(self, name: str, ids: Tensor, records: Tensor) -> None:
        """Write rows to the home while nothing is trained.

        Args:
            name: name of the table.
            ids: int64 [n], ascending.
            records: uint8 [n, bytes], as the slots' layout says.
        """
        rows = self.tables[name]
        self.put_at_home(rows)
        self._write(rows, ids, records)


def _changed(leaving: tuple[CachedRows, Step]) -> TableRows | None:
    """Return those of the rows that leave that differ from the home's; None: none does."""
    rows, step = leaving
    differs = rows.slots.changed[step.evicted_slots]
    if not bool(differs.any()):
        return None
    # A step that writes every slot writes the same bytes to these.
    records = rows.slots.records(step.evicted_slots[differs])
    return TableRows(rows.slots.name, step.evicted_ids[differs], records)
