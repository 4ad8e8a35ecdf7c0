"""Row gather and scatter on a CPU: one copy of known length for each row."""

from __future__ import annotations

import numpy as np
from numba import carray
from torch import Tensor

from recpoint.kernels.intrinsics import compiled, copy_row, pointer
from recpoint.kernels.row_gather.shapes import require_rows
from recpoint.kernels.threads import over_rows

__all__ = ["gather", "scatter"]


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


@compiled(nogil=True)
def _gather(source: int, ids: int, out: int, row_bytes: int, start: int, stop: int) -> None:
    values = carray(pointer(ids), stop, np.int64)
    for i in range(start, stop):
        copy_row(out + i * row_bytes, source + values[i] * row_bytes, row_bytes)


@compiled(nogil=True)
def _scatter(rows: int, ids: int, dest: int, row_bytes: int, start: int, stop: int) -> None:
    values = carray(pointer(ids), stop, np.int64)
    for i in range(start, stop):
        copy_row(dest + values[i] * row_bytes, rows + i * row_bytes, row_bytes)


def _check(table: Tensor, ids: Tensor, part: Tensor) -> int:
    row_bytes = require_rows(table, ids, part)
    wrong = _first_outside(ids.data_ptr(), ids.numel(), table.shape[0])
    if wrong >= 0:
        raise IndexError(f"ids: {int(ids[wrong])}, expected 0 <= id < {table.shape[0]}")
    return row_bytes


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]; nothing is copied if an id is out of range."""
    row_bytes = _check(source, ids, out)
    addresses = source.data_ptr(), ids.data_ptr(), out.data_ptr()

    def part(start: int, stop: int) -> None:
        _gather(*addresses, row_bytes, start, stop)

    over_rows(part, ids.numel(), row_bytes=2 * row_bytes)


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]; nothing is copied if an id is out of range."""
    row_bytes = _check(dest, ids, rows)
    addresses = rows.data_ptr(), ids.data_ptr(), dest.data_ptr()

    def part(start: int, stop: int) -> None:
        _scatter(*addresses, row_bytes, start, stop)

    over_rows(part, ids.numel(), row_bytes=2 * row_bytes)
