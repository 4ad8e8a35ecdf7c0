"""Dirty rows on CPUs: one pass over the bitmaps to count, one to copy, however many tables.

A table is cut into parts of `_PART_WORDS` words. Threads take part after part from a shared
counter inside one compiled call without the GIL; one that is late, or slow, holds the others up by
a part at most.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.dirty_bitmap.cpu import count_words, write_ids
from recpoint.kernels.dirty_bitmap.shapes import require_fit
from recpoint.kernels.dirty_rows.destination import Destination, row_bytes
from recpoint.kernels.intrinsics import compiled, compiled_team_work, pointer, take_turn
from recpoint.kernels.row_gather.cpu import copy_rows, lines_to_stream
from recpoint.kernels.threads import as_team, team_size

__all__ = ["Tally", "count"]

#: Words of a bitmap in one part: 65,536 rows, whose ids stay in the second-level cache.
_PART_WORDS: Final = 2048

#: Parts that a thread counts before it takes the next: the processor asks for memory by itself once
#: it is read in order for some pages.
_COUNTED_PARTS: Final = 8

#: Dirty rows that a thread copies before it takes the next, or more where they lie close.
_TASK_ROWS: Final = 1 << 14

# Columns of the parts.
_WORDS_AT: Final = 0  # address of the first word
_WORDS: Final = 1
_FIRST_ROW: Final = 2
_ROWS: Final = 3  # rows of the table from the first one on
_COUNT: Final = 4
_IDS_AT: Final = 5  # address of the first id
_START: Final = 6  # how many dirty rows of the table come before
_ARRAYS: Final = 7  # which arrays, as a range
_ARRAYS_END: Final = 8
_COLUMNS: Final = 9

# Columns of the arrays.
_SOURCE_AT: Final = 0
_OUT_AT: Final = 1
_ROW_BYTES: Final = 2
_LINES: Final = 3
_ARRAY_COLUMNS: Final = 4

# Fields of what the threads work on.
_PARTS_AT: Final = 0
_PARTS: Final = 1
_ARRAYS_AT: Final = 2
_ARRAYS_N: Final = 3
_TURN: Final = 4  # the next part to take
_CHANGED: Final = 5  # parts that were not as they were counted
_FIELDS: Final = 6


@compiled_team_work
def _count(data: int) -> None:
    """Fill in the counts of parts, some at a time. Data: the fields, without arrays."""
    work = carray(pointer(data), _FIELDS, np.int64)
    n, turn = work[_PARTS], data + 8 * _TURN
    table = carray(pointer(work[_PARTS_AT]), (n, _COLUMNS), np.int64)
    first = _COUNTED_PARTS * take_turn(turn)
    while first < n:
        for part in range(first, min(first + _COUNTED_PARTS, n)):
            table[part, _COUNT] = count_words(table[part, _WORDS_AT], table[part, _WORDS])
        first = _COUNTED_PARTS * take_turn(turn)


@compiled_team_work
def _copy(data: int) -> None:
    """Write ids and rows of parts, taken one by one, and count those that have changed.

    Nothing is written outside a part's room, and no row of a part that has changed is copied.
    """
    work = carray(pointer(data), _FIELDS, np.int64)
    n, turn = work[_PARTS], data + 8 * _TURN
    table = carray(pointer(work[_PARTS_AT]), (n, _COLUMNS), np.int64)
    arrays = carray(pointer(work[_ARRAYS_AT]), (max(work[_ARRAYS_N], 1), _ARRAY_COLUMNS), np.int64)
    part = take_turn(turn)
    while part < n:
        room = table[part, _COUNT]
        ids = table[part, _IDS_AT]
        first_row = table[part, _FIRST_ROW]
        found = write_ids(table[part, _WORDS_AT], table[part, _WORDS], first_row, ids, room)
        last = carray(pointer(ids), room, np.int64)[room - 1]
        if found != room or last - first_row >= table[part, _ROWS]:
            take_turn(data + 8 * _CHANGED)
        else:
            for k in range(table[part, _ARRAYS], table[part, _ARRAYS_END]):
                size = arrays[k, _ROW_BYTES]
                to = arrays[k, _OUT_AT] + table[part, _START] * size
                copy_rows(arrays[k, _SOURCE_AT], ids, to, size, arrays[k, _LINES], room)
        part = take_turn(turn)


class Tally:
    """What `count` found, of bitmaps that stay as they are until the copy is done.

    Attributes:
        counts: marked rows of each table.
    """

    def __init__(self, bitmaps: Sequence[Tensor], rows: Sequence[int]) -> None:
        for bitmap, expected in zip(bitmaps, rows, strict=True):
            if not bitmap.is_cpu:
                raise ValueError(f"bitmap: device {bitmap.device}, expected cpu")
            require_fit(bitmap, expected)
        self._bitmaps = tuple(bitmaps)  # their addresses are in the parts
        self._rows = tuple(rows)
        sizes = [-(-bitmap.numel() // _PART_WORDS) for bitmap in bitmaps]
        self._spans = tuple(zip(accumulate(sizes, initial=0), accumulate(sizes), strict=False))
        self._parts = torch.empty((sum(sizes), _COLUMNS), dtype=torch.int64, device="cpu")
        parts_at = self._parts.data_ptr()
        for (start, stop), bitmap, expected in zip(self._spans, bitmaps, rows, strict=True):
            _cut_up(parts_at, start, stop, bitmap.data_ptr(), bitmap.numel(), expected)
        _run(_count(), parts_at, sum(sizes), [], sum(b.nbytes for b in bitmaps))
        self.counts = tuple(_total(parts_at, start, stop) for start, stop in self._spans)

    def copy(
        self,
        destinations: Sequence[Destination | None],
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Copy the rows out, table by table as they were given to `count`.

        Args:
            destinations: None: no row of that table is wanted.
            meanwhile: is called once, while other threads copy, and also where nothing is to be
                copied; see `threads.as_team`.

        Raises:
            ValueError: a destination does not fit its table; nothing was copied or called.
            RuntimeError: a bitmap was changed since it was counted; what was copied is worthless.
            BaseException: what `meanwhile` raised.
        """
        arrays: list[int] = []  # row by row
        # `meanwhile` may give a source other memory: what its address is of stays until the end.
        kept: list[torch.UntypedStorage] = []
        tasks = torch.empty_like(self._parts)
        parts_at, tasks_at = self._parts.data_ptr(), tasks.data_ptr()
        n = total_bytes = 0
        tables = zip(self._spans, self.counts, self._rows, destinations, strict=True)
        for (start, stop), count, rows, to in tables:
            if to is None or count == 0:
                continue
            first_array = len(arrays) // _ARRAY_COLUMNS
            for size, (source, room) in zip(
                row_bytes(to, count=count, rows=rows), to.arrays, strict=True
            ):
                kept.append(source.untyped_storage())
                addresses = source.data_ptr(), room.address
                arrays += *addresses, size, lines_to_stream(size, count * size, *addresses)
                total_bytes += 2 * count * size
            n = _join(
                parts_at, start, stop, count,
                tasks_at, n, to.ids.address, first_array, len(arrays) // _ARRAY_COLUMNS,
            )  # fmt: skip
        if not n:
            if meanwhile is not None:
                meanwhile()
            return
        changed = _run(_copy(), tasks_at, n, arrays, total_bytes, meanwhile)
        if changed:
            raise RuntimeError(f"dirty bitmap: {changed} parts have changed while they were read")


@compiled(nogil=True)
def _cut_up(parts_at: int, start: int, stop: int, words_at: int, words: int, rows: int) -> None:
    """Parts start … stop: those of a bitmap of `words` words, of a table of `rows` rows."""
    table = carray(pointer(parts_at), (stop, _COLUMNS), np.int64)
    for part in range(start, stop):
        first = (part - start) * _PART_WORDS
        table[part, _WORDS_AT] = words_at + 4 * first
        table[part, _WORDS] = min(words - first, _PART_WORDS)
        table[part, _FIRST_ROW] = 32 * first
        table[part, _ROWS] = rows - 32 * first
        table[part, _COUNT] = 0


@compiled(nogil=True)
def _total(parts_at: int, start: int, stop: int) -> int:
    """Marked rows of parts start … stop."""
    table = carray(pointer(parts_at), (stop, _COLUMNS), np.int64)
    total = 0
    for part in range(start, stop):
        total += table[part, _COUNT]
    return total


@compiled(nogil=True)
def _join(
    parts_at: int, start: int, stop: int, marked: int,
    tasks_at: int, n: int, ids_at: int, first_array: int, end_array: int,
) -> int:  # fmt: skip
    """Write parts start … stop, a table's, behind the first n tasks; how many there are then.

    Neighbouring parts become one task, so that each has `_TASK_ROWS` dirty rows or is one part:
    small ones would spend most of their time waiting for their first rows.
    """
    parts = carray(pointer(parts_at), (stop, _COLUMNS), np.int64)
    tasks = carray(pointer(tasks_at), (n + stop - start, _COLUMNS), np.int64)
    before, full = 0, -1
    for part in range(start, stop):
        count = parts[part, _COUNT]
        # What comes behind the last dirty row joins the task before: alone it would have no id.
        if before // _TASK_ROWS != full and before < marked:
            full = before // _TASK_ROWS
            for column in range(_COUNT):
                tasks[n, column] = parts[part, column]
            tasks[n, _COUNT] = count
            tasks[n, _IDS_AT] = ids_at + 8 * before
            tasks[n, _START] = before
            tasks[n, _ARRAYS] = first_array
            tasks[n, _ARRAYS_END] = end_array
            n += 1
        else:
            tasks[n - 1, _WORDS] += parts[part, _WORDS]
            tasks[n - 1, _COUNT] += count
        before += count
    return n


def _run(
    work: int,
    parts_at: int,
    parts: int,
    arrays: Sequence[int],
    traffic_bytes: int,
    meanwhile: Callable[[], None] | None = None,
) -> int:
    """Compiled work on all parts, in as many threads as pay; how many parts had changed."""
    # Not numpy's arrays, nor views of them: out of cold caches their addresses alone take long.
    table = array("q", arrays)
    table_at, _ = table.buffer_info()
    data = array("q", (parts_at, parts, table_at, len(table) // _ARRAY_COLUMNS, 0, 0))
    data_at, _ = data.buffer_info()
    as_team(work, data_at, threads=team_size(parts, traffic_bytes), meanwhile=meanwhile)
    return int(data[_CHANGED])


def count(bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> Tally:
    """Count the marked rows of each table."""
    return Tally(bitmaps, rows)
