"""The row-set coding on a CPU."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.intrinsics import compiled, lowest_bit, pointer, set_bits
from recpoint.kernels.row_set.coding import (
    Bytes,
    Coding,
    Gaps,
    Numbers,
    RowSet,
    bitmap_payload,
    check_range,
    choose,
    delta_payload,
    extent,
    gap_room,
    open_bitmap,
    open_delta,
    open_runs,
    out_of_order,
    outside,
    runs_payload,
    too_long,
    unknown_coding,
)
from recpoint.kernels.threads import over_rows

__all__ = ["decode", "encode", "payload_as"]


@compiled(nogil=True)
def _count_gaps(ids: int, n: int) -> int:
    """How many of n ids are not followed by the next row, the last left out. -1: not ascending."""
    values = carray(pointer(ids), n, np.int64)
    gaps = np.int64(0)
    wrong = np.int64(0)
    for i in range(n - 1):
        here = values[i]
        wrong |= np.int64(values[i + 1] <= here)
        # The sum wraps for the largest integer only, which no id follows.
        gaps += np.int64(values[i + 1] != here + 1)
    return int(gaps) if wrong == 0 else -1


@compiled(nogil=True)
def _set_bits(ids: int, bits: int, n: int, words: int, start: int, stop: int) -> None:
    """Write the words whose first id is one of ids[start:stop], of n; bit 0 is the first id's."""
    values = carray(pointer(ids), n, np.int64)
    to = carray(pointer(bits), words, np.uint64)
    first = values[0]
    # No two parts write to one word: each leaves the word that the part before it has begun, and
    # goes on until its own last word is full.
    i = start
    at = np.int64(-1) if start == 0 else (values[start - 1] - first) >> 6
    while i < stop and (values[i] - first) >> 6 == at:
        i += 1
    if i == stop:
        return
    at = (values[stop - 1] - first) >> 6
    while stop < n and (values[stop] - first) >> 6 == at:
        stop += 1
    at = np.int64(-1)
    word = np.uint64(0)
    for k in range(i, stop):
        bit = values[k] - first
        word = word if bit >> 6 == at else np.uint64(0)
        at = bit >> 6
        word |= np.uint64(1) << np.uint64(bit & 63)
        to[at] = word


@compiled(nogil=True)
def _count_bits(bits: int, start: int, stop: int) -> int:
    source = carray(pointer(bits), stop, np.uint8)
    total = np.int64(0)
    for i in range(start, stop):
        total += set_bits(source[i])
    return int(total)


@compiled(nogil=True)
def _collect(bits: int, ids: int, n: int, first: int, start: int, stop: int) -> None:
    """Write `first` + the positions of the n bits that are set in bytes start … stop."""
    source = carray(pointer(bits), stop, np.uint8)
    words = carray(pointer(bits), stop // 8, np.uint64)
    out = carray(pointer(ids), n, np.int64)
    k = np.int64(0)
    i = start
    while i < stop:
        row = first + 8 * i
        if i % 8 == 0 and i + 8 <= stop:
            word = words[i // 8]
            i += 8
        else:
            word = np.uint64(source[i])
            i += 1
        while word != np.uint64(0):
            out[k] = row + np.int64(lowest_bit(word))
            word &= word - np.uint64(1)
            k += 1


@compiled(nogil=True)
def _split_runs(ids: int, n: int, offsets: int, starts: int, runs: int) -> None:
    """For each run its first id less that id's position, and that position; n at the end."""
    values = carray(pointer(ids), n, np.int64)
    to_offsets = carray(pointer(offsets), runs, np.int64)
    to_starts = carray(pointer(starts), runs + 1, np.int64)
    to_starts[0] = 0
    run = np.int64(-1)
    before = np.int64(-2)
    for i in range(n):
        run += np.int64(values[i] != before + 1)
        before = values[i]
        # Each id writes, whether it ends its run or not: there is nothing to predict.
        to_offsets[run] = before - i
        to_starts[run + 1] = i + 1


@compiled(nogil=True)
def _join_runs(offsets: int, starts: int, runs: int, ids: int, n: int) -> None:
    """Undo `_split_runs`: starts ascend from 0 and are below n."""
    from_offsets = carray(pointer(offsets), runs, np.int64)
    from_starts = carray(pointer(starts), runs, np.int64)
    out = carray(pointer(ids), n, np.int64)
    for i in range(n):
        out[i] = 0
    # A loop for each run would guess its end wrong each time; sums of jumps guess nothing.
    before = np.int64(0)
    for run in range(runs):
        out[from_starts[run]] = from_offsets[run] - before
        before = from_offsets[run]
    offset = np.int64(0)
    for i in range(n):
        offset += out[i]
        out[i] = offset + i


@compiled(nogil=True)
def _write_symbols(numbers: int, n: int, low: int, planes: int, symbols: int, most: int) -> int:
    """Write the gaps between n numbers as planes and, over escapes, symbols; how many these are."""
    values = carray(pointer(numbers), n, np.int64)
    gaps = n - 1
    to_planes = carray(pointer(planes), low * gaps, np.uint8)
    to = carray(pointer(symbols), most, np.uint8)
    at = np.int64(0)
    for plane in range(low):
        to_plane = to_planes[plane * gaps : (plane + 1) * gaps]
        for i in range(gaps):
            gap = values[i + 1] - values[i] - 1
            to_plane[i] = np.uint8((gap >> (8 * plane)) & 255)
    for i in range(gaps):
        high = np.uint64(values[i + 1] - values[i] - 1) >> np.uint64(8 * low)
        escapes = high // np.uint64(255)
        at += np.int64(escapes)
        to[at] = np.uint8(high - np.uint64(255) * escapes)
        at += 1
    return int(at)


@compiled(nogil=True)
def _read_symbols(
    symbols: int, total: int, at: int, low: int, planes: int, numbers: int, n: int, limit: int
) -> int:
    """Write n numbers below `limit`, the first of which is there: the symbol after them, or -1.

    n - 1 or more of the symbols from `at` end a gap.
    """
    source = carray(pointer(symbols), total, np.uint8)
    gaps = n - 1
    from_planes = carray(pointer(planes), low * gaps, np.uint8)
    out = carray(pointer(numbers), n, np.int64)
    following = out[0] + 1  # the smallest number that may come next
    k = np.int64(1)
    if low == 0:
        # Sums of bytes cannot overflow, so the last number is checked for all.
        while k < n:
            symbol = source[at]
            at += 1
            following += np.int64(symbol)
            out[k] = following
            ends = np.int64(symbol != 255)
            following += ends
            k += ends
        return at if out[n - 1] < limit else -1
    high = np.int64(0)
    for i in range(gaps):
        while source[at] == 255:
            high += 255
            at += 1
        high += np.int64(source[at])
        at += 1
        # Compared before it is shifted and before it is added, so that no sum overflows.
        if following >= limit or high > (limit - following) >> (8 * low):
            return -1
        gap = high << (8 * low)
        high = np.int64(0)
        for plane in range(low):
            gap |= np.int64(from_planes[plane * gaps + i]) << (8 * plane)
        if gap >= limit - following:
            return -1
        out[i + 1] = following + gap
        following += gap + 1
    return at


def encode(ids: Tensor) -> RowSet:
    """Code ids int64 [n], ascending and without duplicates."""
    first, span = extent(ids)
    runs = _count_runs(ids)
    coding = choose(ids.numel(), span, runs)
    if coding == "range":
        return RowSet(coding, first, None)
    return RowSet(coding, first, payload_as(coding, ids, span=span, runs=runs))


def payload_as(coding: Coding, ids: Tensor, *, span: int, runs: int) -> bytes:
    """The payload of a coding that is not "range", whether or not it is the one to choose.

    Args:
        coding: which one.
        ids: int64 [n], ascending, in 2 runs or more.
        span: rows from the first id to the last.
        runs: how many runs of consecutive ids there are.
    """
    if coding == "bitmap":
        return bitmap_payload(_bits(ids, span))
    if coding == "delta":
        return delta_payload(_write_gaps(ids.numpy()))
    offsets, starts = np.empty(runs, np.int64), np.empty(runs + 1, np.int64)
    _split_runs(ids.data_ptr(), ids.numel(), offsets.ctypes.data, starts.ctypes.data, runs)
    return runs_payload(runs, _write_gaps(offsets), _write_gaps(starts[:-1]))


def decode(
    coding: str,
    first: int,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
) -> Tensor:
    """The ids: int64 [count]."""
    if coding == "range":
        check_range(first, payload, count=count, rows=rows)
        return torch.arange(first, first + count, dtype=torch.int64, device="cpu")
    if coding == "bitmap":
        bits = open_bitmap(first, payload, count=count, rows=rows)
        return _read_bits(bits, first, count)
    if coding == "delta":
        stored = open_delta(first, payload, count=count, rows=rows)
        ids = torch.empty(count, dtype=torch.int64, device="cpu")
        if _read_gaps(stored, 0, first, ids.numpy(), limit=rows) < 0:
            raise outside(rows)
        return ids
    if coding == "runs":
        return _read_runs(first, payload, count=count, rows=rows)
    raise unknown_coding(coding)


def _count_runs(ids: Tensor) -> int:
    n, address = ids.numel(), ids.data_ptr()

    def part(start: int, stop: int) -> int:
        # One id more, so that no pair of neighbours is left out between two parts.
        return int(_count_gaps(address + 8 * start, min(stop + 1, n) - start))

    gaps = over_rows(part, n, row_bytes=8)
    if min(gaps) < 0:
        raise out_of_order()
    return sum(gaps) + 1


def _bits(ids: Tensor, span: int) -> Bytes:
    words = np.zeros((span + 63) // 64, np.uint64)
    part = partial(_set_bits, ids.data_ptr(), words.ctypes.data, ids.numel(), words.size)
    over_rows(part, ids.numel(), row_bytes=8)
    return words.view(np.uint8)[: (span + 7) // 8]


def _read_bits(bits: Bytes, first: int, count: int) -> Tensor:
    ids = torch.empty(count, dtype=torch.int64, device="cpu")
    address = bits.ctypes.data

    def measure(start: int, stop: int) -> tuple[int, int]:
        return start, int(_count_bits(address, start, stop))

    firsts: dict[int, tuple[int, int]] = {}
    position = 0
    for start, found in over_rows(measure, bits.size, row_bytes=16):
        firsts[start] = (position, found)
        position += found

    def write(start: int, stop: int) -> None:
        position, found = firsts[start]
        _collect(address, ids.data_ptr() + 8 * position, found, first, start, stop)

    over_rows(write, bits.size, row_bytes=16)
    return ids


def _read_runs(first: int, payload: object, *, count: int, rows: int) -> Tensor:
    runs, gaps, lengths = open_runs(first, payload, count=count, rows=rows)
    offsets, starts = np.empty(runs, np.int64), np.empty(runs, np.int64)
    at = _read_gaps(gaps, 0, first, offsets, limit=rows - count + 1)
    if at < 0:
        raise outside(rows)
    if _read_gaps(lengths, at, 0, starts, limit=count) < 0:
        raise too_long(count)
    ids = torch.empty(count, dtype=torch.int64, device="cpu")
    _join_runs(offsets.ctypes.data, starts.ctypes.data, runs, ids.data_ptr(), count)
    return ids


def _write_gaps(numbers: Numbers) -> Gaps:
    n = numbers.size
    low, most = gap_room(n, int(numbers[-1]) - int(numbers[0]) + 1)
    planes, symbols = np.empty(low * (n - 1), np.uint8), np.full(most, 255, np.uint8)
    addresses = numbers.ctypes.data, n, low, planes.ctypes.data, symbols.ctypes.data
    return Gaps(low, planes, symbols[: _write_symbols(*addresses, most)])


def _read_gaps(stored: Gaps, at: int, first: int, numbers: Numbers, *, limit: int) -> int:
    numbers[0] = first
    symbols, planes = stored.symbols, stored.planes
    return int(
        _read_symbols(
            symbols.ctypes.data,
            symbols.size,
            at,
            stored.low,
            planes.ctypes.data,
            numbers.ctypes.data,
            numbers.size,
            limit,
        )
    )
