"""The dirty bitmap on a CPU.

The functions that change a bitmap keep the GIL: a trainer thread that marks and a background
thread that merges a refused checkpoint back cannot lose each other's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.dirty_bitmap.shapes import (
    require_bitmap,
    require_fit,
    require_pair,
)
from recpoint.kernels.intrinsics import (
    compiled,
    entry_point,
    inlined,
    lowest_bit,
    pointer,
    prefetch,
    set_bits,
)
from recpoint.kernels.threads import over_rows

__all__ = [
    "clear",
    "collect",
    "compiled_mark",
    "count",
    "count_words",
    "mark",
    "mark_all",
    "mark_many",
    "mark_new",
    "mark_nonzero",
    "marker",
    "merge",
    "swap",
    "write_ids",
]

_INT32 = torch.int32
_INT64 = torch.int64


#: How far ahead words are asked for: the step before has emptied the caches of them.
_IDS_AHEAD = np.uint64(128)


@inlined
def set_each(bitmap: int, words: Any, values: Any, n: int, stride: int) -> None:
    last = np.uint64(n - 1)
    for i in range(n):
        coming = values[min(np.uint64(i) + _IDS_AHEAD, last) * np.uint64(stride)]
        prefetch(bitmap + ((np.int64(coming) >> 5) << 2))
        row = np.uint64(values[np.uint64(i) * np.uint64(stride)])
        words[row >> np.uint64(5)] |= np.uint32(1) << np.uint32(row & np.uint64(31))


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
        set_each(bitmap, words, values, n, 1)
    else:
        set_each(bitmap, words, values, n, stride)
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
        set_each(bitmap, words, values, n, 1)
    else:
        set_each(bitmap, words, values, n, stride)
    return -1


@compiled(nogil=True)
def count_words(words_at: int, words: int) -> int:
    """How many bits of `words` words at an address divisible by 8 are set."""
    # The loop starts at 0: any other start might be negative to numba, whose guard against
    # negative positions would cost five times what the rest of the loop does.
    pairs = carray(pointer(words_at), words // 2, np.uint64)
    total = np.uint64(0)
    for i in range(words // 2):
        total += set_bits(pairs[i])
    if words % 2:
        total += set_bits(np.uint64(carray(pointer(words_at + 4 * words - 4), 1, np.uint32)[0]))
    return int(total)


#: Pairs of words whose ids are written without a look at the room that each leaves.
_BLOCK_PAIRS: Final = 8


@compiled(nogil=True)
def write_ids(words_at: int, words: int, first_row: int, ids: int, room: int) -> int:
    """Write the marked rows of `words` words, the first of which holds row `first_row`.

    Writes at most `room` ids; returns how many are marked, also when that is more.
    """
    out = carray(pointer(ids), room, np.int64)
    most = np.uint64(room)
    n = np.uint64(0)
    crowded = room > 3 * (words // 2)
    blocks = words // (2 * _BLOCK_PAIRS)
    done = 0
    # Where all 64 bits of each word fit, nothing else has to.
    while done < blocks and n + np.uint64(64 * _BLOCK_PAIRS) <= most:
        pairs = carray(pointer(words_at + 8 * _BLOCK_PAIRS * done), _BLOCK_PAIRS, np.uint64)
        first = first_row + 64 * _BLOCK_PAIRS * done
        if crowded:
            n = write_block(pairs, first, out, n, 8)
        else:
            n = write_block(pairs, first, out, n, 2)
        done += 1
    last = _BLOCK_PAIRS * done
    for i in range(last, (words + 1) // 2):
        if 2 * i + 1 < words:
            pair = carray(pointer(words_at + 8 * i), 1, np.uint64)[0]
        else:
            pair = np.uint64(carray(pointer(words_at + 8 * i), 1, np.uint32)[0])
        bits = set_bits(pair)
        if n + max(bits, np.uint64(8)) <= most:
            n = write_pair(pair, first_row + 64 * i, out, n, 2)
            continue
        while pair != np.uint64(0):
            if n < most:
                out[n] = first_row + 64 * i + np.int64(lowest_bit(pair))
            pair &= pair - np.uint64(1)
            n += np.uint64(1)
    return int(n)


@inlined
def write_block(pairs: Any, first_row: int, out: Any, n: Any, always: int) -> Any:
    """Write the ids of a block behind n others; how many there are then."""
    for i in range(_BLOCK_PAIRS):
        n = write_pair(pairs[i], first_row + 64 * i, out, n, always)
    return n


@inlined
def write_pair(pair: Any, row: int, out: Any, n: Any, always: int) -> Any:
    """Write row + p for each bit p behind n ids; how many there are then.

    How often a word goes on is a toss, which no branch prediction survives. So some ids are always
    written; what is none yet is overwritten by those that follow.
    """
    bits = set_bits(pair)
    for j in range(always):
        out[n + np.uint64(j)] = row + np.int64(lowest_bit(pair))
        pair &= pair - np.uint64(1)
    k = np.uint64(always)
    while k < bits:
        out[n + k] = row + np.int64(lowest_bit(pair))
        pair &= pair - np.uint64(1)
        k += np.uint64(1)
    return n + bits


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


def compiled_mark() -> Callable[[int, int, int, int, int], int]:
    """What marks int64 ids, for callers that have checked everything but the ids.

    Its arguments: address of a bitmap, address of the ids, how many, the stride between them in
    entries, rows of the table. It returns -1, or the position of the first id out of range, and has
    marked nothing then.
    """
    return entry_point(_mark64, 5)


def marker(bitmap: Tensor, *, rows: int) -> Callable[[Tensor], None]:
    """`mark` for one bitmap and many batches: the bitmap is checked once, here."""
    require_fit(bitmap, rows)
    address, kernel, int64 = bitmap.data_ptr(), compiled_mark(), _INT64

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


@compiled(nogil=False)
def _mark_new(bitmap: int, ids: int, first: int, n: int, rows: int, out: int) -> int:
    """Mark n ids, or n rows from `first` where `ids` is 0; write the positions of the new ones.

    How many are new, or -1 with nothing marked where an id is out of range.
    """
    words = carray(pointer(bitmap), (rows + 31) // 32, np.uint32)
    positions = carray(pointer(out), n, np.int64)
    values = carray(pointer(ids), n if ids else 0, np.int64)
    largest = np.uint64(0)
    for i in range(n if ids else 0):
        largest = max(largest, np.uint64(values[i]))  # a negative id is a huge unsigned one
    if ids and n > 0 and largest >= np.uint64(rows):
        return -1
    new = np.uint64(0)
    for i in range(n):
        row = np.uint64(values[i]) if ids else np.uint64(first) + np.uint64(i)
        word = words[row >> np.uint64(5)]
        bit = np.uint32(row & np.uint64(31))
        # Each position is written, and overwritten by the next where it is not new: whether a
        # row is, no branch prediction can tell.
        positions[new] = i
        new += np.uint64(1) - np.uint64((word >> bit) & np.uint32(1))
        words[row >> np.uint64(5)] = word | (np.uint32(1) << bit)
    return np.int64(new)  # type: ignore[return-value]  # an unsigned one and -1 would make a float


def mark_new(bitmap: Tensor, ids: Tensor | range, *, rows: int) -> Tensor:
    """Set the bits of `ids`; the positions of those that were not set."""
    require_fit(bitmap, rows)
    address, first, n = 0, 0, len(ids)
    if isinstance(ids, range):
        if ids.step != 1:
            raise ValueError(f"ids: {ids}, expected a range of step 1")
        first = ids.start
        if n and (first < 0 or ids.stop > rows):
            raise IndexError(f"ids: {ids}, expected 0 <= id < {rows}")
    else:
        require("ids", ids, torch.int64, 1)
        if not ids.is_cpu:
            raise ValueError(f"ids: device {ids.device}, expected cpu")
        address = ids.data_ptr()
    positions = torch.empty(n, dtype=torch.int64, device="cpu")
    if n == 0:
        return positions
    new = _mark_new(bitmap.data_ptr(), address, first, n, rows, positions.data_ptr())
    if new < 0:
        assert not isinstance(ids, range)
        wrong = ids[(ids < 0) | (ids >= rows)]
        raise IndexError(f"ids: {int(wrong[0])}, expected 0 <= id < {rows}")
    return positions[:new]


def mark_nonzero(bitmap: Tensor, values: Tensor, *, rows: int) -> None:
    """Set the bits of the rows of `values` that have a bit set.

    Rows are looked at without the GIL, into words of their own; only these are merged with it.
    """
    require_fit(bitmap, rows)
    if values.dim() < 1 or values.shape[0] != rows or not values.is_cpu:
        raise ValueError(
            f"values: {tuple(values.shape)} on {values.device}, expected {rows} rows on the CPU"
        )
    values = values.contiguous()
    row_bytes = values.nbytes // rows if rows else 0
    found = torch.empty_like(bitmap)

    def part(start: int, stop: int) -> None:
        at, to = values.data_ptr() + 32 * start * row_bytes, found.data_ptr() + 4 * start
        _nonzero(at, row_bytes, min(32 * stop, rows) - 32 * start, to)

    if bitmap.numel():
        over_rows(part, bitmap.numel(), row_bytes=32 * row_bytes)
    _merge(bitmap.data_ptr(), found.data_ptr(), bitmap.numel())


@compiled(nogil=True)
def _nonzero(values: int, row_bytes: int, rows: int, words: int) -> None:
    """One bit a row, whether any of its bits is set, to the words of `rows` rows."""
    out = carray(pointer(words), (rows + 31) // 32, np.uint32)
    for word in range((rows + 31) // 32):
        bits = np.uint32(0)
        for k in range(min(32, rows - 32 * word)):
            row = values + (32 * word + k) * row_bytes
            longs = carray(pointer(row), row_bytes // 8, np.uint64)
            seen = np.uint64(0)
            for i in range(row_bytes // 8):
                seen |= longs[i]
            rest = carray(pointer(row + row_bytes - row_bytes % 8), row_bytes % 8, np.uint8)
            for i in range(row_bytes % 8):
                seen |= np.uint64(rest[i])
            if seen != np.uint64(0):
                bits |= np.uint32(1) << np.uint32(k)
        out[word] = bits


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
    return sum(found for _, found in _spans(bitmap))


def collect(bitmap: Tensor, *, rows: int) -> Tensor:
    """The marked rows: int64 [n], ascending.

    Two passes, so that the result has its exact size: the first counts, per part, the second
    writes. A part writes at most what it counted, even if a bit is set in between.
    """
    require_fit(bitmap, rows)
    spans = _spans(bitmap)
    ids = torch.empty(sum(found for _, found in spans), dtype=torch.int64, device="cpu")
    positions = {}
    position = 0
    for first, found in spans:
        positions[first] = (position, found)
        position += found

    def write(start: int, stop: int) -> int:
        to, room = positions[start]
        at, words = _words(bitmap, start, stop)
        return int(write_ids(at, words, 64 * start, ids.data_ptr() + 8 * to, room))

    written = sum(over_rows(write, _pairs(bitmap), row_bytes=64))
    if written != ids.numel():
        raise RuntimeError("bitmap: bits were cleared while it was collected; hold it still")
    return ids


def _spans(bitmap: Tensor) -> list[tuple[int, int]]:
    """(first pair of words, marked rows) of each part of a bitmap."""

    def measure(start: int, stop: int) -> tuple[int, int]:
        return start, int(count_words(*_words(bitmap, start, stop)))

    return over_rows(measure, _pairs(bitmap), row_bytes=64)


def _pairs(bitmap: Tensor) -> int:
    return (bitmap.numel() + 1) // 2


def _words(bitmap: Tensor, start: int, stop: int) -> tuple[int, int]:
    """Address of pair `start`, and the words up to pair `stop`; the last pair may be one word."""
    return bitmap.data_ptr() + 8 * start, min(2 * stop, bitmap.numel()) - 2 * start


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange the contents of two bitmaps."""
    require_pair(a, b)
    if a.data_ptr() != b.data_ptr():
        _swap(a.data_ptr(), b.data_ptr(), a.numel())
