"""Digests of rows in one compiled pass, without the GIL and in the calling thread alone.

Rows are independent, so that a processor works on several of them at once although each is a chain
of multiplications.
"""

from __future__ import annotations

from math import gcd

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.intrinsics import compiled, pointer
from recpoint.kernels.row_digest.shapes import FIRST, FOLD, LAST, MASK, require_digestible

__all__ = ["digest", "digest_each"]

_FIRST, _FOLD, _LAST = np.uint64(FIRST), np.uint64(FOLD), np.uint64(LAST)
_ONE, _29, _32 = np.uint64(1), np.uint64(29), np.uint64(32)


@compiled(nogil=True)
def folded(value: np.uint64, word: np.uint64) -> np.uint64:
    value = (value ^ word) * _FOLD
    return value ^ (value >> _32)


@compiled(nogil=True)
def ended(value: np.uint64) -> np.uint64:
    value = (value ^ (value >> _29)) * _LAST
    return value ^ (value >> _32)


@compiled(nogil=True)
def _digest_words(rows: int, ids: int, first: int, words: int, n: int) -> np.uint64:
    """Of rows of whole words at an address divisible by 8; `ids` 0: from `first` on."""
    total = np.uint64(0)
    values = carray(pointer(rows), max(n * words, 1), np.uint64)
    listed = carray(pointer(ids if ids else rows), max(n, 1), np.int64)
    at = np.uint64(0)
    for i in range(n):
        row = listed[i] if ids else first + i
        value = (np.uint64(row) + _ONE) * _FIRST
        for _ in range(words):
            value = folded(value, values[at])
            at += _ONE
        total += ended(value)
    return total


@compiled(nogil=True)
def _digest_bytes(rows: int, ids: int, first: int, row_bytes: int, n: int) -> np.uint64:
    """Of rows of any bytes at any address."""
    total = np.uint64(0)
    values = carray(pointer(rows), max(n * row_bytes, 1), np.uint8)
    listed = carray(pointer(ids if ids else rows), max(n, 1), np.int64)
    at = np.uint64(0)
    for i in range(n):
        row = listed[i] if ids else first + i
        value = (np.uint64(row) + _ONE) * _FIRST
        word, shift = np.uint64(0), np.uint64(0)
        for _ in range(row_bytes):
            word |= np.uint64(values[at]) << shift
            at += _ONE
            shift += np.uint64(8)
            if shift == np.uint64(64):
                value = folded(value, word)
                word, shift = np.uint64(0), np.uint64(0)
        if shift:
            value = folded(value, word)
        total += ended(value)
    return total


@compiled(nogil=True)
def _each_of_words(rows: int, ids: int, words: int, n: int, out: int) -> None:
    found = carray(pointer(out), max(n, 1), np.uint64)
    for i in range(n):
        found[i] = _digest_words(rows + i * words * 8, ids + i * 8, 0, words, 1)


@compiled(nogil=True)
def _each_of_bytes(rows: int, ids: int, row_bytes: int, n: int, out: int) -> None:
    found = carray(pointer(out), max(n, 1), np.uint64)
    for i in range(n):
        found[i] = _digest_bytes(rows + i * row_bytes, ids + i * 8, 0, row_bytes, 1)


def digest(rows: Tensor, ids: Tensor | int) -> int:
    """Sum of the rows' digests, modulo 2^64."""
    n, row_bytes = require_digestible(rows, ids)
    # An empty tensor has no address: then neither has the kernel anything to read there.
    listed, first = (0, ids) if isinstance(ids, int) else (ids.data_ptr(), 0)
    if n == 0:
        return 0
    if gcd(row_bytes, rows.data_ptr()) % 8 == 0:
        total = _digest_words(rows.data_ptr(), listed, first, row_bytes // 8, n)
    else:
        total = _digest_bytes(rows.data_ptr(), listed, first, row_bytes, n)
    return int(total) & MASK


def digest_each(rows: Tensor, ids: Tensor) -> Tensor:
    """The digest of each row."""
    n, row_bytes = require_digestible(rows, ids)
    out = torch.empty(n, dtype=torch.int64, device="cpu")
    if n == 0:
        return out
    if gcd(row_bytes, rows.data_ptr()) % 8 == 0:
        _each_of_words(rows.data_ptr(), ids.data_ptr(), row_bytes // 8, n, out.data_ptr())
    else:
        _each_of_bytes(rows.data_ptr(), ids.data_ptr(), row_bytes, n, out.data_ptr())
    return out
