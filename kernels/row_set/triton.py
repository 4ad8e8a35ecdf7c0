"""The row-set coding on a GPU: gaps, bits and symbols there, the zstd frame on the CPU."""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.row_set.coding import (
    ESCAPE,
    Bytes,
    Gaps,
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

__all__ = ["decode", "encode"]

_BLOCK = 1024


@triton.jit
def _set_bits(ids, words, first, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.load(ids + i, mask=i < n, other=0) - first
    tl.atomic_or(words + (bit >> 5), 1 << (bit & 31).to(tl.int32), mask=i < n, sem="relaxed")


@triton.jit
def _get_bits(bits, flags, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bits + (i >> 3), mask=i < n, other=0).to(tl.int32)
    tl.store(flags + i, ((byte >> (i & 7).to(tl.int32)) & 1).to(tl.uint8), mask=i < n)


@triton.jit
def _count_symbols(numbers, counts, gaps, LOW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(numbers + i, mask=i < gaps, other=0)
    gap = tl.load(numbers + i + 1, mask=i < gaps, other=1) - here - 1
    tl.store(counts + i, (gap >> (8 * LOW)) // 255 + 1, mask=i < gaps)


@triton.jit
def _write_gaps(numbers, ends, planes, symbols, gaps, LOW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(numbers + i, mask=i < gaps, other=0)
    gap = tl.load(numbers + i + 1, mask=i < gaps, other=1) - here - 1
    for plane in tl.static_range(LOW):
        byte = ((gap >> (8 * plane)) & 255).to(tl.uint8)
        tl.store(planes + plane * gaps + i, byte, mask=i < gaps)
    end = tl.load(ends + i, mask=i < gaps, other=1)
    tl.store(symbols + end - 1, ((gap >> (8 * LOW)) % 255).to(tl.uint8), mask=i < gaps)


@triton.jit
def _read_gaps(
    symbols, ends, planes, steps, at, gaps, limit, LOW: tl.constexpr, BLOCK: tl.constexpr
):
    """The gaps whose last symbols lie at ends[at: at + gaps], each + 1; 0 for one above `limit`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(ends + at + i, mask=i < gaps, other=0)
    before = tl.load(ends + at + i - 1, mask=(i < gaps) & (at + i > 0), other=-1)
    last = tl.load(symbols + end, mask=i < gaps, other=0).to(tl.int64)
    high = (end - before - 1) * 255 + last
    # `limit` may arrive in 32 bits, which a shift by 32 and more would leave undefined.
    most = tl.zeros_like(high) + limit
    # Compared before it is shifted, so that it stays below 2^63.
    fits = high <= (most >> (8 * LOW))
    gap = tl.where(fits, high, 0) << (8 * LOW)
    for plane in tl.static_range(LOW):
        byte = tl.load(planes + plane * gaps + i, mask=i < gaps, other=0)
        gap |= byte.to(tl.int64) << (8 * plane)
    tl.store(steps + i, tl.where(fits & (gap <= limit), gap + 1, 0), mask=i < gaps)


def encode(ids: Tensor) -> RowSet:
    """Code ids int64 [n], ascending and without duplicates."""
    first, span = extent(ids)
    n = ids.numel()
    here, following = ids[:-1], ids[1:]
    if not bool((following > here).all()):
        raise out_of_order()
    ends = torch.nonzero(following != here + 1).reshape(
        -1
    )  # positions that end a run, but the last
    runs = min(n, 1) + ends.numel()
    coding = choose(n, span, runs)
    if coding == "range":
        return RowSet(coding, first, None)
    if coding == "bitmap":
        words = torch.zeros((span + 31) // 32, dtype=torch.int32, device=ids.device)
        _set_bits[_grid(n)](ids, words, first, n, BLOCK=_BLOCK)
        bits = words.view(torch.uint8)[: (span + 7) // 8]
        return RowSet(coding, first, bitmap_payload(bits.cpu().numpy()))
    if coding == "runs":
        starts = torch.cat([ends.new_zeros(1), ends + 1])
        payload = runs_payload(runs, _stored(ids[starts] - starts), _stored(starts))
        return RowSet(coding, first, payload)
    return RowSet(coding, first, delta_payload(_stored(ids)))


def decode(
    coding: str,
    first: int,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
    device: torch.device | str = "cuda",
) -> Tensor:
    """The ids: int64 [count] on `device`."""
    if coding == "range":
        check_range(first, payload, count=count, rows=rows)
        return torch.arange(first, first + count, dtype=torch.int64, device=device)
    if coding == "bitmap":
        bits = _moved(open_bitmap(first, payload, count=count, rows=rows), device)
        flags = torch.empty(8 * bits.numel(), dtype=torch.uint8, device=device)
        _get_bits[_grid(flags.numel())](bits, flags, flags.numel(), BLOCK=_BLOCK)
        return torch.nonzero(flags).reshape(-1) + first
    if coding == "delta":
        stored = open_delta(first, payload, count=count, rows=rows)
        ends, symbols = _ends(stored, device)
        ids = _numbers(stored, ends, symbols, 0, first, count, limit=rows)
        if ids is None:
            raise outside(rows)
        return ids
    if coding == "runs":
        return _read_runs(first, payload, count=count, rows=rows, device=device)
    raise unknown_coding(coding)


def _read_runs(
    first: int, payload: object, *, count: int, rows: int, device: torch.device | str
) -> Tensor:
    runs, gaps, lengths = open_runs(first, payload, count=count, rows=rows)
    ends, symbols = _ends(gaps, device)
    offsets = _numbers(gaps, ends, symbols, 0, first, runs, limit=rows - count + 1)
    if offsets is None:
        raise outside(rows)
    starts = _numbers(lengths, ends, symbols, runs - 1, 0, runs, limit=count)
    if starts is None:
        raise too_long(count)
    sizes = torch.diff(starts, append=starts.new_tensor([count]))
    ids = torch.repeat_interleave(offsets, sizes, output_size=count)
    return ids + torch.arange(count, dtype=torch.int64, device=device)


def _stored(numbers: Tensor) -> Gaps:
    """The gaps between the numbers, on the CPU."""
    n, device = numbers.numel(), numbers.device
    low, _ = gap_room(n, int(numbers[-1]) - int(numbers[0]) + 1)
    gaps = n - 1
    counts = torch.empty(gaps, dtype=torch.int64, device=device)
    _count_symbols[_grid(gaps)](numbers, counts, gaps, LOW=low, BLOCK=_BLOCK)
    ends = counts.cumsum(0)
    planes = torch.empty(low * gaps, dtype=torch.uint8, device=device)
    symbols = torch.full((int(ends[-1]),), ESCAPE, dtype=torch.uint8, device=device)
    _write_gaps[_grid(gaps)](numbers, ends, planes, symbols, gaps, LOW=low, BLOCK=_BLOCK)
    return Gaps(low, planes.cpu().numpy(), symbols.cpu().numpy())


def _ends(stored: Gaps, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Where the symbols that end a gap are, and the symbols."""
    symbols = _moved(stored.symbols, device)
    return torch.nonzero(symbols != ESCAPE).reshape(-1), symbols


def _numbers(
    stored: Gaps, ends: Tensor, symbols: Tensor, at: int, first: int, count: int, *, limit: int
) -> Tensor | None:
    """`count` numbers from `first` on; None if one is not below `limit`."""
    gaps = count - 1
    planes = _moved(stored.planes, symbols.device)
    steps = torch.empty(gaps, dtype=torch.int64, device=symbols.device)
    _read_gaps[_grid(gaps)](
        symbols, ends, planes, steps, at, gaps, limit, LOW=stored.low, BLOCK=_BLOCK
    )
    numbers = torch.cat([steps.new_tensor([first]), steps.cumsum(0) + first])
    # Steps and limit are at most 2^62 + 1: the first sum to leave the table has not wrapped.
    if bool((steps < 1).any() | (numbers < 0).any() | (numbers >= limit).any()):
        return None
    return numbers


def _moved(data: Bytes, device: torch.device | str) -> Tensor:
    return torch.from_numpy(data.copy()).to(device)


def _grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, _BLOCK),)
