"""Row gather and scatter on a CPU: one copy of known length for each row."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.intrinsics import compiled, copy_row, inlined, pointer, prefetch, stream_line
from recpoint.kernels.row_gather.shapes import require_rows, require_same_rows
from recpoint.kernels.threads import over_rows

__all__ = ["copy_rows", "gather", "lines_to_stream", "move", "scatter"]

#: How far ahead of the copy rows are asked for: enough to hide the way to memory and the page walk.
_AHEAD_BYTES: Final = 8192
#: At most this much of a coming row; the processor's own prefetcher follows longer rows by itself.
_REACH_BYTES: Final = 256
#: Smaller results are wanted in the cache, where streaming would not leave them.
_STREAM_BYTES: Final = 4 << 20


@compiled(nogil=True)
def _first_outside(ids: int, n: int, limit: int) -> int:
    """The position of the first id that is not in 0 … limit - 1; -1 if there is none."""
    values = carray(pointer(ids), n, np.uint64)
    largest = np.uint64(0)
    for i in range(n):
        largest = max(largest, values[i])  # a negative id is a huge unsigned one
    if n > 0 and largest >= np.uint64(limit):
        for i in range(n):
            if values[i] >= np.uint64(limit):
                return i
    return -1


@inlined
def copy_each(source: int, ids: int, out: int, row_bytes: int, lines: int, n: int) -> None:
    values = carray(pointer(ids), n, np.int64)
    last = np.uint64(n - 1)
    ahead = np.uint64(max(1, _AHEAD_BYTES // max(row_bytes, 64)))
    reach = min(row_bytes, _REACH_BYTES)
    for i in range(n):
        coming = source + values[min(np.uint64(i) + ahead, last)] * row_bytes
        for at in range(0, reach, 64):
            prefetch(coming + at)
        row = source + values[i] * row_bytes
        to = out + i * row_bytes
        if lines == 0:
            copy_row(to, row, row_bytes)
        else:
            for line in range(lines):
                stream_line(to + 64 * line, row + 64 * line)


@compiled(nogil=True)
def copy_rows(source: int, ids: int, out: int, row_bytes: int, lines: int, n: int) -> None:
    """Copy rows source[ids[i]] to out[i]; `lines` of 64 bytes a row, or 0 for rows of any bytes."""
    # Common lengths are constants to the compiler: loops that run once or twice a row, or a call
    # for four bytes, would cost more than the row.
    if lines == 1:
        copy_each(source, ids, out, 64, 1, n)
    elif lines == 2:
        copy_each(source, ids, out, 128, 2, n)
    elif lines == 4:
        copy_each(source, ids, out, 256, 4, n)
    elif row_bytes == 4:
        copy_each(source, ids, out, 4, 0, n)
    elif row_bytes == 8:
        copy_each(source, ids, out, 8, 0, n)
    elif row_bytes == 32:
        copy_each(source, ids, out, 32, 0, n)
    else:
        copy_each(source, ids, out, row_bytes, lines, n)


@compiled(nogil=True)
def _scatter(rows: int, ids: int, dest: int, row_bytes: int, lines: int, n: int) -> None:
    """Copy rows[i] to dest[ids[i]]; `lines` as in `copy_rows`."""
    values = carray(pointer(ids), n, np.int64)
    last = np.uint64(n - 1)
    ahead = np.uint64(max(1, _AHEAD_BYTES // max(row_bytes, 64)))
    reach = min(row_bytes, _REACH_BYTES) if lines == 0 else 0  # what is streamed is not read
    for i in range(n):
        coming = dest + values[min(np.uint64(i) + ahead, last)] * row_bytes
        for at in range(0, reach, 64):
            prefetch(coming + at)
        row = rows + i * row_bytes
        to = dest + values[i] * row_bytes
        if lines == 0:
            copy_row(to, row, row_bytes)
        else:
            for line in range(lines):
                stream_line(to + 64 * line, row + 64 * line)


@compiled(nogil=True)
def _move(
    source: int, positions: int, dest: int, ids: int, row_bytes: int, lines: int, n: int
) -> None:
    """Copy source[positions[i]] to dest[ids[i]]; `lines` as in `copy_rows`."""
    chosen = carray(pointer(positions), n, np.int64)
    places = carray(pointer(ids), n, np.int64)
    last = np.uint64(n - 1)
    ahead = np.uint64(max(1, _AHEAD_BYTES // max(row_bytes, 64)))
    reach = min(row_bytes, _REACH_BYTES)
    for i in range(n):
        later = min(np.uint64(i) + ahead, last)
        for at in range(0, reach, 64):
            prefetch(source + chosen[later] * row_bytes + at)
        if lines == 0:  # what is streamed is not read
            for at in range(0, reach, 64):
                prefetch(dest + places[later] * row_bytes + at)
        row = source + chosen[i] * row_bytes
        to = dest + places[i] * row_bytes
        if lines == 0:
            copy_row(to, row, row_bytes)
        else:
            for line in range(lines):
                stream_line(to + 64 * line, row + 64 * line)


def lines_to_stream(row_bytes: int, total_bytes: int, *addresses: int) -> int:
    """Lines of 64 bytes in a row where whole lines can be streamed and it pays; 0 elsewhere."""
    if row_bytes % 64 or any(address % 32 for address in addresses):
        return 0
    return row_bytes // 64 if total_bytes >= _STREAM_BYTES else 0


def _check(table: Tensor, ids: Tensor, part: Tensor) -> int:
    row_bytes = require_rows(table, ids, part)
    _check_ids("ids", ids, table.shape[0])
    return row_bytes


def _check_ids(name: str, ids: Tensor, limit: int) -> None:
    wrong = _first_outside(ids.data_ptr(), ids.numel(), limit)
    if wrong >= 0:
        raise IndexError(f"{name}: {int(ids[wrong])}, expected 0 <= id < {limit}")


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]; nothing is copied if an id is out of range."""
    row_bytes = _check(source, ids, out)
    addresses = source.data_ptr(), ids.data_ptr(), out.data_ptr()
    lines = lines_to_stream(row_bytes, ids.numel() * row_bytes, addresses[0], addresses[2])

    def part(start: int, stop: int) -> None:
        table, listed, to = addresses
        copy_rows(table, listed + 8 * start, to + start * row_bytes, row_bytes, lines, stop - start)

    over_rows(part, ids.numel(), row_bytes=2 * row_bytes)


def move(source: Tensor, positions: Tensor, dest: Tensor, ids: Tensor) -> None:
    """dest[ids[i]] = source[positions[i]]; nothing is copied if one is out of range."""
    require("positions", positions, torch.int64, 1)
    if positions.numel() != ids.numel():
        raise ValueError(f"positions: {positions.numel()}, expected {ids.numel()} as ids")
    row_bytes = require_same_rows(dest, ids, source)
    _check_ids("positions", positions, source.shape[0])
    _check_ids("ids", ids, dest.shape[0])
    n = ids.numel()
    addresses = source.data_ptr(), dest.data_ptr()
    lines = lines_to_stream(row_bytes, n * row_bytes, *addresses)

    def part(start: int, stop: int) -> None:
        at = 8 * start
        listed = positions.data_ptr() + at, addresses[1], ids.data_ptr() + at
        _move(addresses[0], *listed, row_bytes, lines, stop - start)

    over_rows(part, n, row_bytes=2 * row_bytes)


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]; nothing is copied if an id is out of range."""
    row_bytes = _check(dest, ids, rows)
    addresses = rows.data_ptr(), ids.data_ptr(), dest.data_ptr()
    lines = lines_to_stream(row_bytes, ids.numel() * row_bytes, addresses[0], addresses[2])

    def part(start: int, stop: int) -> None:
        given, listed, to = addresses
        _scatter(given + start * row_bytes, listed + 8 * start, to, row_bytes, lines, stop - start)

    over_rows(part, ids.numel(), row_bytes=2 * row_bytes)
