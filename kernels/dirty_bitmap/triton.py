"""The dirty bitmap on a GPU. Offsets are int64: tables may have more than 2^31 elements."""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.descriptors import Launch, entry_and_part, plan
from recpoint.kernels.dirty_bitmap.shapes import (
    require_bitmap,
    require_features,
    require_fit,
    require_pair,
)

__all__ = [
    "clear",
    "collect",
    "collect_many",
    "count",
    "mark",
    "mark_features",
    "mark_many",
    "merge",
]

#: Ids that a program marks at once, and how often, one after another. Ids are skewed: a bit set in
#: the first round is only read in the next, and no longer queues up at the word of a popular row.
_IDS_BLOCK: Final = 1024
_ROUNDS: Final = 4
_MARK_WARPS: Final = 8
_WORDS_BLOCK: Final = 1024
_SCAN_WORDS: Final = 512


@triton.jit
def _set_bits(bitmap, row, rows, valid, BLOCK: tl.constexpr):
    valid = valid & (row >= 0) & (row < rows)
    row = tl.where(valid, row, 0)
    word = bitmap + (row >> 5)
    bit = tl.full([BLOCK], 1, tl.int32) << (row & 31).to(tl.int32)
    # Past the first-level cache, which would go on showing a word as it was. A bit that is seen set
    # stays set; one that is not yet seen is set again, which is the same.
    old_word = tl.load(word, mask=valid, other=0, cache_modifier=".cg")
    # Order between the marks of one bitmap does not matter, only that none is lost.
    tl.atomic_or(word, bit, mask=valid & ((old_word & bit) == 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "rows"], do_not_specialize_on_alignment=["ids"])
def _mark(bitmap, ids, n, rows, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    rounds = tl.minimum(ROUNDS, tl.cdiv(n - first, BLOCK)).to(tl.int32)
    for number in range(rounds):
        index = first + number * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(ids + index, mask=index < n, other=-1).to(tl.int64)
        _set_bits(bitmap, row, rows, index < n, BLOCK)


@triton.jit
def _mark_many(
    table, SLOTS: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    entry, part = entry_and_part(table, SLOTS)
    fields = table + SLOTS + entry
    bitmap = tl.load(fields).to(tl.pointer_type(tl.int32))
    ids = tl.load(fields + SLOTS)
    n = tl.load(fields + 2 * SLOTS)
    rows = tl.load(fields + 3 * SLOTS)
    stride = tl.load(fields + 4 * SLOTS)
    wide = tl.load(fields + 5 * SLOTS) != 0
    first = part * (BLOCK * ROUNDS)
    rounds = tl.minimum(ROUNDS, tl.cdiv(n - first, BLOCK)).to(tl.int32)
    for number in range(rounds):
        index = first + number * BLOCK + tl.arange(0, BLOCK)
        valid = index < n
        row = tl.full([BLOCK], -1, tl.int64)
        if WIDE:
            long = ids.to(tl.pointer_type(tl.int64)) + index * stride
            row = tl.load(long, mask=valid & wide, other=-1)
        if NARROW:
            short = ids.to(tl.pointer_type(tl.int32)) + index * stride
            narrow = tl.load(short, mask=valid & (wide == 0), other=-1).to(tl.int64)
            row = tl.where(wide, row, narrow)
        _set_bits(bitmap, row, rows, valid, BLOCK)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids"])
def _mark_features(
    table, offsets, ids, n, SLOTS: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr
):
    # How many ids a feature has is known on the device only. So each program finds its feature: it
    # reads where all features begin and end, and adds up how many programs those before take.
    slot = tl.arange(0, SLOTS)
    fields = table + SLOTS + slot
    start = tl.load(offsets + tl.load(fields)).to(tl.int64)
    stop = tl.load(offsets + tl.load(fields + SLOTS)).to(tl.int64)
    # Unused slots begin and end at the first bag. No bound reaches past the ids.
    start = tl.minimum(tl.maximum(start, 0), n)
    stop = tl.minimum(tl.maximum(stop, start), n)
    parts = (stop - start + (BLOCK * ROUNDS - 1)) // (BLOCK * ROUNDS)
    ends = tl.cumsum(parts, axis=0)
    program = tl.program_id(0).to(tl.int64)
    is_own_feature = (ends > program) & (ends - parts <= program)
    if tl.sum(is_own_feature.to(tl.int32), axis=0) > 0:
        begin = start + (program - (ends - parts)) * (BLOCK * ROUNDS)
        first = tl.sum(tl.where(is_own_feature, begin, 0), axis=0)
        end = tl.sum(tl.where(is_own_feature, stop, 0), axis=0)
        feature = table + SLOTS + tl.sum(tl.where(is_own_feature, slot, 0), axis=0)
        bitmap = tl.load(feature + 2 * SLOTS).to(tl.pointer_type(tl.int32))
        rows = tl.load(feature + 3 * SLOTS)
        rounds = tl.minimum(ROUNDS, tl.cdiv(end - first, BLOCK)).to(tl.int32)
        for number in range(rounds):
            index = first + number * BLOCK + tl.arange(0, BLOCK)
            row = tl.load(ids + index, mask=index < end, other=-1).to(tl.int64)
            row = tl.where((row < -1) | (row >= rows), 0, row)
            _set_bits(bitmap, row, rows, index < end, BLOCK)


@triton.jit
def _ones(words):
    """Set bits of each u32, summed in wider and wider fields."""
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    words = words + (words >> 8)
    return ((words + (words >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _count_many(table, counts, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    entry, part = entry_and_part(table, SLOTS)
    fields = table + SLOTS + entry
    bitmap = tl.load(fields).to(tl.pointer_type(tl.int32))
    index = part * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bitmap + index, mask=index < tl.load(fields + SLOTS), other=0)
    ones = _ones(words.to(tl.uint32, bitcast=True))
    tl.store(counts + tl.program_id(0), tl.sum(ones, axis=0))


@triton.jit
def _collect_many(table, ends, ids, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    entry, part = entry_and_part(table, SLOTS)
    fields = table + SLOTS + entry
    program = tl.program_id(0)
    first = tl.load(ends + program - 1, mask=program > 0, other=0)
    room = (tl.load(ends + program) - first).to(tl.int32)
    if room > 0:
        bitmap = tl.load(fields).to(tl.pointer_type(tl.int32))
        index = part * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(bitmap + index, mask=index < tl.load(fields + SLOTS), other=0)
        ones = _ones(words.to(tl.uint32, bitcast=True))
        place = tl.cumsum(ones, axis=0) - ones
        for bit in tl.static_range(32):
            marked = (words >> bit) & 1
            # Never more than was counted, even if a bit is set in between.
            tl.store(ids + first + place, index * 32 + bit, mask=(marked != 0) & (place < room))
            place += marked


@triton.jit
def _merge(into, other, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(into + index, mask=index < n, other=0) | tl.load(
        other + index, mask=index < n, other=0
    )
    tl.store(into + index, words, mask=index < n)


def _require_ids(ids: Tensor) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids: dtype {ids.dtype}, expected torch.int32 or torch.int64")


def mark(bitmap: Tensor, ids: Tensor, *, rows: int) -> None:
    """Set the bits of `ids` (int32 or int64, any shape); ids out of range mark nothing."""
    require_fit(bitmap, rows)
    _require_ids(ids)
    flat = ids.to(bitmap.device, non_blocking=True).contiguous()
    n = flat.numel()
    if n:
        grid = (triton.cdiv(n, _IDS_BLOCK * _ROUNDS),)
        _mark[grid](bitmap, flat, n, rows, BLOCK=_IDS_BLOCK, ROUNDS=_ROUNDS, num_warps=_MARK_WARPS)


def mark_many(bitmaps: Sequence[Tensor], ids: Sequence[Tensor], *, rows: Sequence[int]) -> None:
    """`mark` for each table, in one launch; a column of a batch is read where it lies."""
    entries: list[tuple[int, ...]] = []
    programs: list[int] = []
    copies: list[Tensor] = []  # copies stay until the kernel is in the stream
    wide = narrow = False
    for bitmap, table_ids, limit in zip(bitmaps, ids, rows, strict=True):
        require_fit(bitmap, limit)
        _require_ids(table_ids)
        _require_same_device(bitmap, bitmaps[0])
        if table_ids.device != bitmap.device:
            table_ids = table_ids.to(bitmap.device, non_blocking=True)
        # Positions in a tensor that is not one sequence have no single stride.
        if table_ids.dim() != 1 and not table_ids.is_contiguous():
            table_ids = table_ids.contiguous()
        n = table_ids.numel()
        if n == 0:
            continue
        copies.append(table_ids)
        stride = table_ids.stride(0) if table_ids.dim() == 1 else 1
        is_wide = table_ids.dtype == torch.int64
        wide, narrow = wide or is_wide, narrow or not is_wide
        entries.append((bitmap.data_ptr(), table_ids.data_ptr(), n, limit, stride, int(is_wide)))
        programs.append(triton.cdiv(n, _IDS_BLOCK * _ROUNDS))
    if entries:
        launch = plan(entries, programs, bitmaps[0].device)
        _mark_many[(launch.programs,)](
            launch.table, SLOTS=launch.slots, NARROW=narrow, WIDE=wide,
            BLOCK=_IDS_BLOCK, ROUNDS=_ROUNDS, num_warps=_MARK_WARPS,
        )  # fmt: skip


def mark_features(
    bitmaps: Sequence[Tensor],
    ids: Tensor,
    offsets: Tensor,
    bags: Sequence[tuple[int, int]],
    *,
    rows: Sequence[int],
) -> None:
    """Set the bits of the ids of many features that lie in one tensor, in one launch.

    See the reference. Bounds that do not ascend mark no id outside `ids`, and touch no other
    memory. Nothing waits for the device.
    """
    require_features(bitmaps, ids, offsets, bags, rows)
    if not bitmaps or not ids.numel():
        return
    device = bitmaps[0].device
    ids = ids.to(device, non_blocking=True).contiguous()
    offsets = offsets.to(device, non_blocking=True).contiguous()
    entries = [
        (first, end, bitmap.data_ptr(), limit)
        for (first, end), bitmap, limit in zip(bags, bitmaps, rows, strict=True)
    ]
    launch = plan(entries, [1] * len(entries), device)
    # Each feature leaves at most one program that is not full.
    programs = triton.cdiv(ids.numel(), _IDS_BLOCK * _ROUNDS) + len(entries)
    _mark_features[(programs,)](
        launch.table, offsets, ids, ids.numel(), SLOTS=launch.slots,
        BLOCK=_IDS_BLOCK, ROUNDS=_ROUNDS, num_warps=_MARK_WARPS,
    )  # fmt: skip


def _require_same_device(bitmap: Tensor, first: Tensor) -> None:
    if bitmap.device != first.device:
        raise ValueError(
            f"bitmaps: on {first.device} and on {bitmap.device}, expected one device a call"
        )


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


class _Scan(NamedTuple):
    """The launch over the words of many bitmaps, and for each of its programs how many rows are
    marked up to its end: int64 [programs]."""

    launch: Launch
    ends: Tensor


def _scan(bitmaps: Sequence[Tensor]) -> _Scan | None:
    """None if there is no word in any of them."""
    filled = [bitmap for bitmap in bitmaps if bitmap.numel()]
    if not filled:
        return None
    device = filled[0].device
    for bitmap in filled:
        _require_same_device(bitmap, filled[0])
    programs = [triton.cdiv(bitmap.numel(), _SCAN_WORDS) for bitmap in filled]
    entries = []
    last = -1
    for bitmap, own_programs in zip(filled, programs, strict=True):
        last += own_programs
        entries.append((bitmap.data_ptr(), bitmap.numel(), last))
    launch = plan(entries, programs, device)
    counts = torch.empty(launch.programs, dtype=torch.int32, device=device)
    _count_many[(launch.programs,)](launch.table, counts, SLOTS=launch.slots, BLOCK=_SCAN_WORDS)
    return _Scan(launch, counts.cumsum(0, dtype=torch.int64))


def _totals(bitmaps: Sequence[Tensor], scan: _Scan | None) -> list[int]:
    """How many rows of each are marked: the one wait for the device."""
    if scan is None:
        return [0] * len(bitmaps)
    filled = sum(bitmap.numel() > 0 for bitmap in bitmaps)
    ends = iter(scan.ends.index_select(0, scan.launch.table[3, :filled]).tolist())
    totals, last_end = [], 0
    for bitmap in bitmaps:
        end = next(ends) if bitmap.numel() else last_end
        totals.append(end - last_end)
        last_end = end
    return totals


def _write(scan: _Scan | None, ids: Tensor) -> None:
    if scan is not None and ids.numel():
        _collect_many[(scan.launch.programs,)](
            scan.launch.table, scan.ends, ids, SLOTS=scan.launch.slots, BLOCK=_SCAN_WORDS
        )


def count(bitmap: Tensor) -> int:
    """How many rows are marked."""
    require_bitmap("bitmap", bitmap)
    return _totals([bitmap], _scan([bitmap]))[0]


def collect(bitmap: Tensor, *, rows: int) -> Tensor:
    """The marked rows: int64 [n], ascending."""
    return collect_many([bitmap], rows=[rows])[0]


def collect_many(bitmaps: Sequence[Tensor], *, rows: Sequence[int]) -> list[Tensor]:
    """The marked rows of each: int64 [n], ascending, parts of one tensor; waits once.

    Each block of words knows from a running sum of all blocks' counts where its ids start.
    """
    for bitmap, limit in zip(bitmaps, rows, strict=True):
        require_fit(bitmap, limit)
    scan = _scan(bitmaps)
    totals = _totals(bitmaps, scan)
    device = bitmaps[0].device if bitmaps else None
    ids = torch.empty(sum(totals), dtype=torch.int64, device=device)
    _write(scan, ids)
    return list(ids.split(totals)) if totals else []
