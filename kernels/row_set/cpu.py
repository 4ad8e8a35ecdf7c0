"""The row-set coding on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.native import library, team_size
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

__all__ = ["decode", "encode", "payload_as"]


def encode(ids: Tensor) -> RowSet:
    """Encode ids int64 [n], ascending and without duplicates."""
    if not ids.is_cpu:
        raise ValueError(f"ids: device {ids.device}, expected cpu")
    first, span = extent(ids)
    runs = _count_runs(ids)
    coding = choose(ids.numel(), span, runs)
    if coding == "range":
        return RowSet(coding, first, None)
    return RowSet(coding, first, payload_as(coding, ids, span=span, runs=runs))


def payload_as(coding: Coding, ids: Tensor, *, span: int, runs: int) -> bytes:
    """The payload of any coding but "range", even if `encode` would choose another coding.

    Args:
        coding: the coding of the payload.
        ids: int64 [n], ascending, in 2 runs or more.
        span: the number of rows from the first id to the last.
        runs: the number of runs of consecutive ids.
    """
    if coding == "bitmap":
        return bitmap_payload(_bits(ids, span))
    if coding == "delta":
        return delta_payload(_write_gaps(ids.numpy()))
    offsets, starts = np.empty(runs, np.int64), np.empty(runs + 1, np.int64)
    library.split_runs(ids.data_ptr(), ids.numel(), offsets.ctypes.data, starts.ctypes.data)
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
    gaps = library.count_gaps(ids.data_ptr(), ids.numel(), team_size(ids.nbytes))
    if gaps < 0:
        raise out_of_order()
    return int(gaps) + 1


def _bits(ids: Tensor, span: int) -> Bytes:
    words = np.zeros((span + 63) // 64, np.uint64)
    library.set_bits(ids.data_ptr(), ids.numel(), words.ctypes.data, team_size(ids.nbytes))
    return words.view(np.uint8)[: (span + 7) // 8]


def _read_bits(bits: Bytes, first: int, count: int) -> Tensor:
    ids = torch.empty(count, dtype=torch.int64, device="cpu")
    library.read_bits(bits.ctypes.data, bits.size, first, ids.data_ptr(), count)
    return ids


def _read_runs(first: int, payload: object, *, count: int, rows: int) -> Tensor:
    runs, gaps, lengths = open_runs(first, payload, count=count, rows=rows)
    offsets, starts = np.empty(runs, np.int64), np.empty(runs, np.int64)
    first_length = _read_gaps(gaps, 0, first, offsets, limit=rows - count + 1)
    if first_length < 0:
        raise outside(rows)
    if _read_gaps(lengths, first_length, 0, starts, limit=count) < 0:
        raise too_long(count)
    ids = torch.empty(count, dtype=torch.int64, device="cpu")
    library.join_runs(offsets.ctypes.data, starts.ctypes.data, runs, ids.data_ptr(), count)
    return ids


def _write_gaps(numbers: Numbers) -> Gaps:
    n = numbers.size
    low, most = gap_room(n, int(numbers[-1]) - int(numbers[0]) + 1)
    planes, symbols = np.empty(low * (n - 1), np.uint8), np.full(most, 255, np.uint8)
    addresses = numbers.ctypes.data, n, low, planes.ctypes.data, symbols.ctypes.data
    return Gaps(low, planes, symbols[: library.write_symbols(*addresses)])


def _read_gaps(stored: Gaps, position: int, first: int, numbers: Numbers, *, limit: int) -> int:
    numbers[0] = first
    return int(
        library.read_symbols(
            stored.symbols.ctypes.data, position, stored.low, stored.planes.ctypes.data,
            numbers.ctypes.data, numbers.size, limit,
        )
    )  # fmt: skip
