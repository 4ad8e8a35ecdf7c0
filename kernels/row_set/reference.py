"""The row-set coding in Python integers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.row_set.coding import (
    ESCAPE,
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


def encode(ids: Tensor) -> RowSet:
    """Code ids int64 [n], ascending and without duplicates."""
    first, span = extent(ids)
    rows: list[int] = ids.tolist()
    steps = [next_row - row for row, next_row in zip(rows, rows[1:], strict=False)]
    if any(step <= 0 for step in steps):
        raise out_of_order()
    starts = [0, *(i + 1 for i, step in enumerate(steps) if step > 1)]
    coding = choose(len(rows), span, len(starts) if rows else 0)
    if coding == "range":
        return RowSet(coding, first, None)
    if coding == "bitmap":
        bits = sum(1 << row - first for row in rows).to_bytes((span + 7) // 8, "little")
        return RowSet(coding, first, bitmap_payload(np.frombuffer(bits, np.uint8)))
    if coding == "runs":
        offsets = [rows[i] - i for i in starts]
        payload = runs_payload(len(starts), _write_gaps(offsets), _write_gaps(starts))
        return RowSet(coding, first, payload)
    return RowSet(coding, first, delta_payload(_write_gaps(rows)))


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
        ids = list(range(first, first + count))
    elif coding == "bitmap":
        bits = open_bitmap(first, payload, count=count, rows=rows).tolist()
        ids = [first + i for i in range(8 * len(bits)) if bits[i // 8] >> i % 8 & 1]
    elif coding == "runs":
        ids = _read_runs(first, payload, count=count, rows=rows)
    elif coding == "delta":
        gaps = open_delta(first, payload, count=count, rows=rows)
        ids, _ = _read_gaps(gaps, 0, first, count)
        if ids[-1] >= rows:
            raise outside(rows)
    else:
        raise unknown_coding(coding)
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def _read_runs(first: int, payload: object, *, count: int, rows: int) -> list[int]:
    runs, gaps, lengths = open_runs(first, payload, count=count, rows=rows)
    offsets, first_length = _read_gaps(gaps, 0, first, runs)
    if offsets[-1] + count > rows:
        raise outside(rows)
    starts, _ = _read_gaps(lengths, first_length, 0, runs)
    if starts[-1] >= count:
        raise too_long(count)
    ends = [*starts[1:], count]
    return [
        offset + i
        for offset, start, end in zip(offsets, starts, ends, strict=True)
        for i in range(start, end)
    ]


def _write_gaps(numbers: list[int]) -> Gaps:
    low, _ = gap_room(len(numbers), numbers[-1] - numbers[0] + 1)
    gaps = [
        next_number - number - 1 for number, next_number in zip(numbers, numbers[1:], strict=False)
    ]
    planes = b"".join(bytes(gap >> 8 * plane & 255 for gap in gaps) for plane in range(low))
    symbols = bytearray()
    for gap in gaps:
        escapes, remainder = divmod(gap >> 8 * low, ESCAPE)
        symbols += bytes([ESCAPE] * escapes + [remainder])
    return Gaps(low, np.frombuffer(planes, np.uint8), np.frombuffer(bytes(symbols), np.uint8))


def _read_gaps(stored: Gaps, position: int, first: int, count: int) -> tuple[list[int], int]:
    """Return `count` numbers from `first` on, and where their symbols, from `position` on, end."""
    planes, symbols = stored.planes.tolist(), stored.symbols.tolist()
    numbers = [first]
    for i in range(count - 1):
        gap = 0
        while symbols[position] == ESCAPE:
            gap += ESCAPE
            position += 1
        gap = gap + symbols[position] << 8 * stored.low
        position += 1
        for plane in range(stored.low):
            gap |= planes[plane * (count - 1) + i] << 8 * plane
        numbers.append(numbers[-1] + 1 + gap)
    return numbers, position
