"""The dirty bitmap on a GPU. Offsets are int64: tables may have more than 2^31 elements."""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.dirty_bitmap.cpu import (
    require_bitmap,
    require_fit,
    require_pair,
    require_room,
)

__all__ = ["clear", "collect", "count", "mark", "mark_all", "merge", "swap"]

_IDS_BLOCK = 1024
_WORDS_BLOCK = 1024
_COLLECT_WORDS = 64


@triton.jit
def _mark(bitmap, ids, n, rows, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + at, mask=at < n, other=-1).to(tl.int64)
    inside = (row >= 0) & (row < rows)
    row = tl.where(inside, row, 0)
    bit = tl.full([BLOCK], 1, tl.int32) << (row & 31).to(tl.int32)
    # Order between the marks of one bitmap does not matter, only that none is lost.
    tl.atomic_or(bitmap + (row >> 5), bit, mask=inside, sem="relaxed")


@triton.jit
def _ones(words):
    """Set bits of each u32, summed in wider and wider fields."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return (words + (words >> 16)) & 0x3F


@triton.jit
def _count_blocks(bitmap, counts, n, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmap + at, mask=at < n, other=0).to(tl.uint32, bitcast=True)
    tl.store(counts + block, tl.sum(_ones(words).to(tl.int64), axis=0))


@triton.jit
def _collect(bitmap, firsts, ids, n, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    bits = tl.arange(0, BLOCK * 32)
    word = block * BLOCK + (bits >> 5)
    value = tl.load(bitmap + word, mask=word < n, other=0)
    marked = (value >> (bits & 31)) & 1
    place = tl.load(firsts + block) + tl.cumsum(marked, axis=0).to(tl.int64) - 1
    tl.store(ids + place, word * 32 + (bits & 31), mask=marked != 0)


@triton.jit
def _merge(into, other, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(into + at, mask=at < n, other=0) | tl.load(other + at, mask=at < n, other=0)
    tl.store(into + at, words, mask=at < n)


@triton.jit
def _swap(a, b, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(a + at, mask=at < n, other=0)
    second = tl.load(b + at, mask=at < n, other=0)
    tl.store(a + at, second, mask=at < n)
    tl.store(b + at, first, mask=at < n)


def mark(bitmap: Tensor, ids: Tensor, *, rows: int) -> None:
    """Set the bits of `ids` (int32 or int64, any shape); ids out of range mark nothing."""
    require_fit(bitmap, rows)
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids: dtype {ids.dtype}, expected torch.int32 or torch.int64")
    flat = ids.to(bitmap.device, non_blocking=True).contiguous()
    n = flat.numel()
    if n:
        _mark[(triton.cdiv(n, _IDS_BLOCK),)](bitmap, flat, n, rows, BLOCK=_IDS_BLOCK)


def mark_all(bitmap: Tensor, *, rows: int) -> None:
    """Set the bits of all rows; those past the last row stay zero."""
    require_fit(bitmap, rows)
    bitmap.fill_(-1)
    if rows % 32:
        bitmap[-1] = (1 << rows % 32) - 1


def merge(into: Tensor, other: Tensor) -> None:
    """Mark in `into` what is marked in `other`."""
    require_pair(into, other)
    n = into.numel()
    if n:
        _merge[(triton.cdiv(n, _WORDS_BLOCK),)](into, other, n, BLOCK=_WORDS_BLOCK)


def clear(bitmap: Tensor) -> None:
    """Mark no row."""
    require_bitmap("bitmap", bitmap)
    bitmap.zero_()


def _counts(bitmap: Tensor, block: int) -> Tensor:
    """Marked rows in each block of words: int64 [blocks]."""
    n = bitmap.numel()
    blocks = triton.cdiv(n, block)
    counts = torch.empty(blocks, dtype=torch.int64, device=bitmap.device)
    if blocks:
        _count_blocks[(blocks,)](bitmap, counts, n, BLOCK=block)
    return counts


def count(bitmap: Tensor) -> int:
    """How many rows are marked."""
    require_bitmap("bitmap", bitmap)
    return int(_counts(bitmap, _WORDS_BLOCK).sum())


def collect(bitmap: Tensor, *, rows: int, out: Tensor | None = None) -> Tensor:
    """The marked rows: int64 [n], ascending; in `out` if it is given.

    Each block of words knows from a running sum of the blocks' counts where its ids start.
    """
    require_fit(bitmap, rows)
    counts = _counts(bitmap, _COLLECT_WORDS)
    ends = counts.cumsum(0)
    total = int(ends[-1]) if counts.numel() else 0
    ids = torch.empty(total, dtype=torch.int64, device=bitmap.device) if out is None else out
    require_room(ids, total)
    if total:
        _collect[(counts.numel(),)](
            bitmap, ends - counts, ids, bitmap.numel(), BLOCK=_COLLECT_WORDS
        )
    return ids


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange the contents of two bitmaps."""
    require_pair(a, b)
    n = a.numel()
    if n and a.data_ptr() != b.data_ptr():
        _swap[(triton.cdiv(n, _WORDS_BLOCK),)](a, b, n, BLOCK=_WORDS_BLOCK)
