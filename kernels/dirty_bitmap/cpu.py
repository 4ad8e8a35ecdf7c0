"""The dirty bitmap on a CPU.

The functions that change a bitmap keep the GIL: a trainer thread that marks and a background
thread that merges a refused checkpoint back cannot lose each other's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.dirty_bitmap.shapes import (
    require_bitmap,
    require_fit,
    require_pair,
    require_room,
)
from recpoint.kernels.intrinsics import compiled, entry_point, lowest_bit, pointer, set_bits
from recpoint.kernels.threads import over_rows

__all__ = ["clear", "collect", "count", "mark", "mark_all", "mark_many", "marker", "merge", "swap"]

_INT32 = torch.int32
_INT64 = torch.int64

_THREADS_FOR_TWO_PASSES = 4


@compiled(nogil=False)
def _mark64(bitmap: int, ids: int, n: int, stride: int, rows: int) -> int:
    """Mark n int64 ids, `stride` entries apart.

    -1, or the position of the first id out of range with nothing marked.
    """
    words = carray(pointer(bitmap), (rows + 31) // 32, np.uint32)
    values = carray(pointer(ids), n * stride, np.int64)
    last = np.int64(rows - 1)
    signs = np.int64(0)  # negative once an id, or what is left of the rows behind it, is negative
    # The loops differ in the stride alone: a constant one lets the compiler use vectors.
    if stride == 1:
        for i in range(n):
            signs |= values[i] | (last - values[i])
    else:
        for i in range(n):
            signs |= values[i * stride] | (last - values[i * stride])
    if signs < 0:
        for i in range(n):
            if values[i * stride] < 0 or values[i * stride] > last:
                return i
    if stride == 1:
        for i in range(n):
            row = np.uint64(values[i])
            words[row >> np.uint64(5)] |= np.uint32(1) << np.uint32(row & np.uint64(31))
    else:
        for i in range(n):
            row = np.uint64(values[i * stride])
            words[row >> np.uint64(5)] |= np.uint32(1) << np.uint32(row & np.uint64(31))
    return -1


@compiled(nogil=False)
def _mark32(bitmap: int, ids: int, n: int, stride: int, rows: int) -> int:
    """The same for int32 ids."""
    words = carray(pointer(bitmap), (rows + 31) // 32, np.uint32)
    values = carray(pointer(ids), n * stride, np.int32)
    last = np.int32(min(rows - 1, (1 << 31) - 1))
    signs = np.int32(0)
    if stride == 1:
        for i in range(n):
            signs |= values[i] | np.int32(last - values[i])
    else:
        for i in range(n):
            signs |= values[i * stride] | np.int32(last - values[i * stride])
    if signs < 0:
        for i in range(n):
            if values[i * stride] < 0 or values[i * stride] > last:
                return i
    if stride == 1:
        for i in range(n):
            row = np.uint32(values[i])
            words[np.uint64(row >> np.uint32(5))] |= np.uint32(1) << (row & np.uint32(31))
    else:
        for i in range(n):
            row = np.uint32(values[i * stride])
            words[np.uint64(row >> np.uint32(5))] |= np.uint32(1) << (row & np.uint32(31))
    return -1


@compiled(nogil=True)
def _count(bitmap: int, start: int, stop: int) -> int:
    words = carray(pointer(bitmap), stop, np.uint32)
    total = 0
    for i in range(start, stop):
        total += set_bits(words[i])
    return total


@compiled(nogil=True)
def _collect(bitmap: int, ids: int, room: int, start: int, stop: int) -> int:
    """Write the marked rows of words start … stop to `ids`, as far as there is room.

    How many are marked, also when that is more than there is room for.
    """
    words = carray(pointer(bitmap), stop, np.uint32)
    out = carray(pointer(ids), room, np.int64)
    n = np.int64(0)
    i = start
    while i < stop:
        pair = np.uint64(words[i])
        if i + 1 < stop:
            pair |= np.uint64(words[i + 1]) << np.uint64(32)
        row = 32 * i
        i += 2
        bits = np.int64(set_bits(pair))
        if n + max(bits, np.int64(2)) <= room:
            # Whether a word has a bit is a coin toss, which no branch prediction survives. So two
            # are always written; what is not one yet is overwritten by those that follow.
            out[n] = row + np.int64(lowest_bit(pair))
            pair &= pair - np.uint64(1)
            out[n + 1] = row + np.int64(lowest_bit(pair))
            for k in range(2, bits):
                pair &= pair - np.uint64(1)
                out[n + k] = row + np.int64(lowest_bit(pair))
            n += bits
        else:
            while pair != np.uint64(0):
                if n < room:
                    out[n] = row + np.int64(lowest_bit(pair))
                pair &= pair - np.uint64(1)
                n += 1
    return int(n)


def mark(bitmap: Tensor, ids: Tensor, *, rows: int) -> None:
    """Set the bits of `ids` (int32 or int64, any shape); nothing is marked if one is out of range.

    This runs for each lookup of a training step, so the checks are the cheapest that are complete.
    """
    if bitmap.dtype is not _INT32 or not bitmap.is_contiguous():
        require_bitmap("bitmap", bitmap)
    if bitmap.numel() != (rows + 31) >> 5:
        require_fit(bitmap, rows)
    stride = 1
    if not ids.is_cpu:
        ids = ids.cpu()
    if not ids.is_contiguous():
        # One column of a batch is the usual form of a table's ids: a copy would cost the most here.
        if ids.dim() == 1:
            stride = ids.stride(0)
        else:
            ids = ids.contiguous()
    if ids.dtype is _INT64:
        wrong = _mark64(bitmap.data_ptr(), ids.data_ptr(), ids.numel(), stride, rows)
    elif ids.dtype is _INT32:
        wrong = _mark32(bitmap.data_ptr(), ids.data_ptr(), ids.numel(), stride, rows)
    else:
        raise ValueError(f"ids: dtype {ids.dtype}, expected torch.int32 or torch.int64")
    if wrong >= 0:
        raise IndexError(f"ids: {int(ids.reshape(-1)[wrong])}, expected 0 <= id < {rows}")


def marker(bitmap: Tensor, *, rows: int) -> Callable[[Tensor], None]:
    """`mark` for one bitmap and many batches: the bitmap is checked once, here."""
    require_fit(bitmap, rows)
    address, kernel, int64 = bitmap.data_ptr(), entry_point(_mark64, 5), _INT64

    def mark_ids(ids: Tensor) -> None:
        # Runs for each table of each step, after work that has filled the caches with other things:
        # what counts is how little is touched.
        if ids.dtype is int64 and ids.is_cpu and ids.is_contiguous():
            if kernel(address, ids.data_ptr(), ids.numel(), 1, rows) < 0:
                return
        mark(bitmap, ids, rows=rows)  # the closure keeps the bitmap, and with it its address

    return mark_ids


def mark_many(bitmaps: Sequence[Tensor], ids: Sequence[Tensor], *, rows: Sequence[int]) -> None:
    """`mark` for several tables; at an id out of range, the tables before it are marked."""
    for bitmap, some, length in zip(bitmaps, ids, rows, strict=True):
        mark(bitmap, some, rows=length)


def mark_all(bitmap: Tensor, *, rows: int) -> None:
    """Set the bits of all rows; those past the last row stay zero."""
    require_fit(bitmap, rows)
    bitmap.fill_(-1)
    if rows % 32:
        bitmap[-1] = (1 << rows % 32) - 1


def merge(into: Tensor, other: Tensor) -> None:
    """Mark in `into` what is marked in `other`."""
    require_pair(into, other)
    _merge(into.data_ptr(), other.data_ptr(), into.numel())


@compiled(nogil=False)
def _merge(into: int, other: int, n: int) -> None:
    to = carray(pointer(into), n, np.uint32)
    source = carray(pointer(other), n, np.uint32)
    for i in range(n):
        to[i] |= source[i]


@compiled(nogil=False)
def _clear(bitmap: int, n: int) -> None:
    words = carray(pointer(bitmap), n, np.uint32)
    for i in range(n):
        words[i] = np.uint32(0)


@compiled(nogil=False)
def _swap(a: int, b: int, n: int) -> None:
    first = carray(pointer(a), n, np.uint32)
    second = carray(pointer(b), n, np.uint32)
    for i in range(n):
        word = first[i]
        first[i] = second[i]
        second[i] = word


def clear(bitmap: Tensor) -> None:
    """Mark no row."""
    require_bitmap("bitmap", bitmap)
    _clear(bitmap.data_ptr(), bitmap.numel())


def count(bitmap: Tensor) -> int:
    """How many rows are marked."""
    require_bitmap("bitmap", bitmap)
    part = partial(_count, bitmap.data_ptr())
    return sum(over_rows(part, bitmap.numel(), row_bytes=4))


def collect(bitmap: Tensor, *, rows: int, out: Tensor | None = None) -> Tensor:
    """The marked rows: int64 [n], ascending; in `out` if it is given.

    Two passes, so that the result has its exact size: the first counts, per part, the second
    writes. A part writes at most what it counted, even if a bit is set in between. Where `out`
    says how many there are, the first pass only pays with enough threads for the second.
    """
    require_fit(bitmap, rows)
    address, words = bitmap.data_ptr(), bitmap.numel()
    if out is not None and torch.get_num_threads() < _THREADS_FOR_TWO_PASSES:
        require_room(out, out.numel())
        found = int(_collect(address, out.data_ptr(), out.numel(), 0, words))
        require_room(out, found)
        return out
    spans: list[tuple[int, int, int]] = []

    def measure(start: int, stop: int) -> tuple[int, int, int]:
        return start, stop, int(_count(address, start, stop))

    spans = over_rows(measure, words, row_bytes=32)
    total = sum(n for _, _, n in spans)
    ids = torch.empty(total, dtype=torch.int64) if out is None else out
    require_room(ids, total)
    firsts: dict[int, tuple[int, int]] = {}
    position = 0
    for start, _, n in spans:
        firsts[start] = (position, n)
        position += n

    def write(start: int, stop: int) -> int:
        first, room = firsts[start]
        return int(_collect(address, ids.data_ptr() + 8 * first, room, start, stop))

    written = sum(over_rows(write, words, row_bytes=32))
    if written != ids.numel():
        raise RuntimeError("bitmap: bits were cleared while it was collected; hold it still")
    return ids


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange the contents of two bitmaps."""
    require_pair(a, b)
    if a.data_ptr() != b.data_ptr():
        _swap(a.data_ptr(), b.data_ptr(), a.numel())
