"""Keeps the rows of a home in memory, which follows the rows that were written.

A table is a region of virtual memory with a place for each row, and a flag for each row that was
written. The kernel backs a page when it is first written, so a table of 10^9 rows costs nothing at
the start. Records that are replaced while rows are frozen go to a second region of that kind.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.embeddings.home.contract import FrozenRows, Home
from recpoint.embeddings.home.forms import BatchOrder, HomeTables, TableForm
from recpoint.errors import HomeError
from recpoint.kernels import erasure, row_gather

__all__ = ["MemoryHome"]

_PAGE_BYTES: Final = mmap.PAGESIZE
#: Lets a mapping be larger than the memory of the machine. Python names it from 3.13 on.
_NORESERVE: Final = 0x4000


class MemoryHome(Home):
    """Keeps rows in memory. A write-back copies the records, and a fetch copies them out."""

    may_add_rows = True

    def __init__(self) -> None:
        self._tables: HomeTables[_TableInMemory] = HomeTables("a home in memory")

    def add_table(self, table: str, *, rows: int, record_bytes: int) -> None:
        """Reserve addresses for a table, without memory."""
        self._tables.add(TableForm(table, rows, record_bytes), _TableInMemory)

    def add_rows(self, table: str, *, rows: int) -> None:
        """Reserve further addresses; the system moves the table without copying it."""
        self._tables.add_rows(table, rows, _TableInMemory.add_rows)

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        """Copy records out of the table."""
        return self._tables.get(table).fetch(ids, out)

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        """Copy records into the table; first save those that are frozen."""
        self._tables.get(table).write_back(ids, records, batch)

    def exclusive_or(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        """Change the records in their places; first save those that are frozen."""
        self._tables.get(table).exclusive_or(ids, records, batch)

    def freeze(self, table: str, rows: range) -> FrozenRows:
        """Save the records of these rows from now on, before they are replaced."""
        return self._tables.get(table).freeze(rows)

    def clear(self, table: str) -> None:
        """Give the memory of the table back."""
        self._tables.get(table).clear()

    def size_bytes(self) -> dict[str, int]:
        """Count the pages that were written."""
        total = {"rows": 0, "index": 0, "frozen": 0, "buffers": 0, "disk": 0}
        for table in self._tables.all():
            table.add_sizes(total)
        return total

    def close(self) -> None:
        """Give all memory back."""
        for table in self._tables.close():
            table.close()


class _FirstTime(NamedTuple):
    """Rows that are written for the first time, and pages that they are the first to touch."""

    ids: Tensor
    record_pages: Tensor
    flag_pages: Tensor


class _Region:
    """A place for each of `rows` records, and a flag for each that was written."""

    def __init__(self, rows: int, record_bytes: int) -> None:
        self._record_bytes = record_bytes
        #: Records, flags, and flags of the pages of both.
        self._memory = [_Lazy(size_bytes) for size_bytes in self._sizes(rows)]
        self._find_memory()
        self.record_pages = 0
        self.flag_pages = 0

    def _sizes(self, rows: int) -> tuple[int, ...]:
        sizes = rows * self._record_bytes, rows
        return *sizes, *(-(-size_bytes // _PAGE_BYTES) for size_bytes in sizes)

    def _find_memory(self) -> None:
        records, flags, *page_flags = (memory.bytes for memory in self._memory)
        self._records = records.view(-1, self._record_bytes)
        self._has = flags.view(torch.bool)
        self._pages = tuple(flags_of_pages.view(torch.bool) for flags_of_pages in page_flags)

    def add_rows(self, rows: int) -> None:
        """Make room for so many rows. After an error, some of the room is there, unused.

        Raises:
            OSError: the system has no addresses left.
        """
        try:
            for memory, size_bytes in zip(self._memory, self._sizes(rows), strict=True):
                memory.extend(size_bytes)
        finally:
            self._find_memory()  # the old addresses are not valid any more

    def has(self, ids: Tensor) -> Tensor:
        return self._has[ids]

    def put(self, ids: Tensor, records: Tensor) -> None:
        """Store the records of `ids`, or raise and change nothing."""
        first = self._first_time(ids)
        row_gather.scatter(records, ids, self._records)
        self._note(first)

    def exclusive_or(self, ids: Tensor, records: Tensor) -> None:
        """Store the records of `ids` XOR these, or raise and change nothing.

        A place that was never written has zeros.
        """
        first = self._first_time(ids)
        erasure.apply(self._records, ids, records)
        self._note(first)

    def _first_time(self, ids: Tensor) -> _FirstTime:
        """Return what `_note` is about to note. This takes all memory that a change needs."""
        ids = ids[~self._has[ids]]
        if not ids.numel():
            return _FirstTime(ids, ids, ids)
        return _FirstTime(
            ids,
            self._new_pages(
                0,
                ids * self._record_bytes // _PAGE_BYTES,
                ((ids + 1) * self._record_bytes - 1) // _PAGE_BYTES,
            ),
            self._new_pages(1, ids // _PAGE_BYTES, ids // _PAGE_BYTES),
        )

    def _new_pages(self, which: int, first: Tensor, last: Tensor) -> Tensor:
        """Return those of the pages first … last of each row that were never written, ascending."""
        touched = [first]
        while bool((more := first < last).any()):
            first, last = first[more] + 1, last[more]
            touched.append(first)
        pages: Tensor = torch.unique(torch.cat(touched))
        return pages[~self._pages[which][pages]]

    def _note(self, first: _FirstTime) -> None:
        """Note that rows are written. It allocates nothing, so it does not fail."""
        self._has.index_fill_(0, first.ids, True)
        self._pages[0].index_fill_(0, first.record_pages, True)
        self._pages[1].index_fill_(0, first.flag_pages, True)
        self.record_pages += first.record_pages.numel()
        self.flag_pages += first.flag_pages.numel()

    def get(self, ids: Tensor, out: Tensor, has: Tensor | None = None) -> None:
        """Copy the records of `ids` to `out`, or only those that `has`, bool [n], names."""
        if has is None or has.all():
            row_gather.gather(self._records, ids, out)
        else:
            positions = has.nonzero().view(-1)
            row_gather.move(self._records, ids[positions], out, positions)


class _FrozenInMemory(FrozenRows):
    def __init__(self, table: _TableInMemory, rows: range) -> None:
        self._table: _TableInMemory | None = table
        self._form = table.form
        self.rows = rows
        self._saved = _Region(max(1, len(rows)), table.form.record_bytes)
        self._is_saved = _Lazy(max(1, len(rows))).bytes.view(torch.bool)

    def save(self, ids: Tensor, has: Tensor, live: _Region) -> None:
        """Save the live records of these rows, as far as they are frozen and not saved before."""
        is_frozen = (ids >= self.rows.start) & (ids < self.rows.stop)
        ids, has = ids[is_frozen], has[is_frozen]
        new = ~self._is_saved[ids - self.rows.start]
        ids, has = ids[new], has[new]
        places, ids = ids - self.rows.start, ids[has]
        if ids.numel():
            records = torch.empty(
                len(ids), self._form.record_bytes, dtype=torch.uint8, device="cpu"
            )
            live.get(ids, records)
            self._saved.put(ids - self.rows.start, records)
        # Last: if there was no memory to save a row, the live record is still the frozen one.
        self._is_saved.index_fill_(0, places, True)

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        table = self._table
        if table is None:
            raise HomeError(
                f"frozen rows of table {self._form.table!r}",
                found="a fetch after release()",
                expected="no fetch after release(), clear() or close()",
                next_step="freeze the rows again",
            )
        self._form.require_records(ids, "out", out, self.rows)
        with table.lock:
            place = ids - self.rows.start
            is_saved = self._is_saved[place]
            is_present = torch.where(is_saved, self._saved.has(place), table.live.has(ids))
            self._saved.get(place, out, is_present & is_saved)
            table.live.get(ids, out, is_present & ~is_saved)
        return is_present

    def add_sizes(self, total: dict[str, int]) -> None:
        saved = self._saved
        # The flags of saved rows, and those of their records, are written together.
        total["frozen"] += (saved.record_pages + 2 * saved.flag_pages) * _PAGE_BYTES

    def release(self) -> None:
        table, self._table = self._table, None
        if table is not None:
            with table.lock:
                table.frozen.discard(self)
                del self._saved, self._is_saved

    def drop(self) -> None:
        """Give the records up, because the table is closed."""
        self._table = None
        del self._saved, self._is_saved


class _TableInMemory:
    """One table. `lock` is held while records are copied, which takes microseconds a thousand."""

    def __init__(self, form: TableForm) -> None:
        self.form = form
        self.lock = threading.Lock()
        self.live = _Region(form.rows, form.record_bytes)
        self.frozen: set[_FrozenInMemory] = set()
        self._batches = BatchOrder(form.table)

    def add_rows(self, larger_form: TableForm) -> None:
        with self.lock:
            try:
                self.live.add_rows(larger_form.rows)
            except OSError as error:
                raise HomeError(
                    f"table {self.form.table!r}",
                    found=f"no addresses for {larger_form.rows} rows: {error}",
                    expected=f"{larger_form.rows * larger_form.record_bytes} bytes of addresses",
                    next_step="raise the limit of addresses (ulimit -v)",
                ) from error
            self.form = larger_form

    def fetch(self, ids: Tensor, out: Tensor) -> Tensor:
        self.form.require_records(ids, "out", out)
        with self.lock:
            is_present = self.live.has(ids)
            self.live.get(ids, out, is_present)
        return is_present

    def write_back(self, ids: Tensor, records: Tensor, batch: int) -> None:
        self.form.require_records(ids, "records", records)
        with self.lock:
            self._before_change(ids, batch)
            self.live.put(ids, records)
            self._batches.last = batch

    def exclusive_or(self, ids: Tensor, records: Tensor, batch: int) -> None:
        self.form.require_records(ids, "records", records)
        with self.lock:
            self._before_change(ids, batch)
            self.live.exclusive_or(ids, records)
            self._batches.last = batch

    def _before_change(self, ids: Tensor, batch: int) -> None:
        """Refuse an earlier batch, and save those of the rows that are frozen."""
        self._batches.require_next(batch)
        if self.frozen:
            is_present = self.live.has(ids)
            for frozen in self.frozen:
                frozen.save(ids, is_present, self.live)

    def freeze(self, rows: range) -> FrozenRows:
        self.form.require_rows(rows)
        with self.lock:
            frozen = _FrozenInMemory(self, rows)
            self.frozen.add(frozen)
        return frozen

    def clear(self) -> None:
        with self.lock:
            if self.frozen:
                raise HomeError(
                    f"table {self.form.table!r}",
                    found=f"{len(self.frozen)} readers of frozen rows",
                    expected="none when a table is cleared",
                    next_step="release them first",
                )
            self.live = _Region(self.form.rows, self.form.record_bytes)
            self._batches.last = None

    def add_sizes(self, total: dict[str, int]) -> None:
        with self.lock:
            total["rows"] += self.live.record_pages * _PAGE_BYTES
            total["index"] += self.live.flag_pages * _PAGE_BYTES
            for frozen in self.frozen:
                frozen.add_sizes(total)

    def close(self) -> None:
        with self.lock:
            for frozen in self.frozen:
                frozen.drop()
            self.frozen.clear()
            del self.live


class _Lazy:
    """Zeros in pages that the kernel backs when they are written.

    Attributes:
        bytes: uint8 [size]; valid until `extend`.
    """

    def __init__(self, size_bytes: int) -> None:
        self._memory = mmap.mmap(
            -1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        )
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            # A large page would back 512 pages for the first row in one of them.
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)  # keeps the memory alive

    def extend(self, size_bytes: int) -> None:
        """Make it larger. The kernel moves the pages to other addresses without copying them.

        Raises:
            OSError: there are no addresses left; nothing has changed.
        """
        if size_bytes > len(self._memory):
            self._memory.resize(size_bytes)
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
