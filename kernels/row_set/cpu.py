"""The row-set coding on a CPU: differences and byte planes in one pass over the ids."""

from __future__ import annotations

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.intrinsics import compiled, pointer
from recpoint.kernels.row_set.coding import (
    ITEM_BYTES,
    RowSet,
    compress,
    decode_range,
    decompress,
    encode_range,
    out_of_order,
    outside,
)

__all__ = ["decode", "encode"]


@compiled(nogil=True)
def _largest_difference(ids: int, n: int) -> int:
    """The largest difference minus 1, or -1 for ids that do not ascend from 0 on."""
    values = carray(pointer(ids), n, np.int64)
    if n > 0 and values[0] < 0:
        return -1
    largest = values[0] if n > 0 else np.int64(0)
    ascending = True
    for i in range(1, n):
        ascending &= values[i] > values[i - 1]
        # Overflows only after a negative id, and then the ids do not ascend.
        largest = max(largest, values[i] - values[i - 1] - 1)
    return int(largest) if ascending else -1


@compiled(nogil=True)
def _shuffle32(ids: int, planes: int, n: int) -> None:
    values = carray(pointer(ids), n, np.int64)
    to = carray(pointer(planes), 4 * n, np.uint8)
    before = np.int64(-1)
    for i in range(n):
        word = np.uint32(values[i] - before - 1)
        before = values[i]
        to[i] = np.uint8(word & 255)
        to[n + i] = np.uint8((word >> 8) & 255)
        to[2 * n + i] = np.uint8((word >> 16) & 255)
        to[3 * n + i] = np.uint8((word >> 24) & 255)


@compiled(nogil=True)
def _shuffle64(ids: int, planes: int, n: int) -> None:
    values = carray(pointer(ids), n, np.int64)
    to = carray(pointer(planes), 8 * n, np.uint8)
    before = np.int64(-1)
    for i in range(n):
        word = values[i] - before - 1
        before = values[i]
        for plane in range(8):
            to[plane * n + i] = np.uint8((word >> (8 * plane)) & 255)


@compiled(nogil=True)
def _unshuffle32(planes: int, ids: int, n: int, rows: int) -> bool:
    source = carray(pointer(planes), 4 * n, np.uint8)
    values = carray(pointer(ids), n, np.int64)
    following = np.int64(0)  # the smallest id that may come next, at most rows
    for i in range(n):
        difference = (
            np.int64(source[i])
            | (np.int64(source[n + i]) << 8)
            | (np.int64(source[2 * n + i]) << 16)
            | (np.int64(source[3 * n + i]) << 24)
        )
        if difference >= rows - following:
            return False
        values[i] = following + difference
        following += difference + 1
    return True


@compiled(nogil=True)
def _unshuffle64(planes: int, ids: int, n: int, rows: int) -> bool:
    source = carray(pointer(planes), 8 * n, np.uint8)
    values = carray(pointer(ids), n, np.int64)
    following = np.int64(0)
    for i in range(n):
        difference = np.int64(0)
        for plane in range(8):
            difference |= np.int64(source[plane * n + i]) << (8 * plane)
        # Compared before it is added, so that no sum overflows; negative: 2^63 or more was stored.
        if difference < 0 or difference >= rows - following:
            return False
        values[i] = following + difference
        following += difference + 1
    return True


def encode(ids: Tensor) -> RowSet:
    """Code ids int64 [n], ascending and without duplicates."""
    span = encode_range(ids)
    n = ids.numel()
    largest = int(_largest_difference(ids.data_ptr(), n))
    if largest < 0:
        raise out_of_order()
    if span is not None:
        return span
    coding, shuffle = ("delta32", _shuffle32) if largest < 1 << 32 else ("delta64", _shuffle64)
    planes = np.empty(n * ITEM_BYTES[coding], np.uint8)
    shuffle(ids.data_ptr(), planes.ctypes.data, n)
    return RowSet(coding, None, compress(planes.data))


def decode(
    coding: str,
    first: int | None,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
) -> Tensor:
    """The ids: int64 [count]."""
    if coding == "range":
        start = decode_range(first, payload, count=count, rows=rows)
        return torch.arange(start, start + count, dtype=torch.int64)
    planes = np.frombuffer(decompress(coding, first, payload, count=count, rows=rows), np.uint8)
    ids = torch.empty(count, dtype=torch.int64)
    unshuffle = _unshuffle32 if coding == "delta32" else _unshuffle64
    if not unshuffle(planes.ctypes.data, ids.data_ptr(), count, rows):
        raise outside(rows)
    return ids
