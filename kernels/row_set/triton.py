"""The row-set coding on a GPU: differences and byte planes there, the zstd frame on the CPU."""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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

_BLOCK = 1024


@triton.jit
def _shuffle(ids, planes, n, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = tl.load(ids + i, mask=i < n, other=0)
    before = tl.load(ids + i - 1, mask=(i > 0) & (i < n), other=-1)
    word = here - before - 1
    for plane in tl.static_range(ITEM):
        tl.store(planes + plane * n + i, ((word >> (8 * plane)) & 255).to(tl.uint8), mask=i < n)


@triton.jit
def _unshuffle(planes, steps, n, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.zeros([BLOCK], tl.int64)
    for plane in tl.static_range(ITEM):
        byte = tl.load(planes + plane * n + i, mask=i < n, other=0)
        word |= byte.to(tl.int64) << (8 * plane)
    tl.store(steps + i, word, mask=i < n)


def encode(ids: Tensor) -> RowSet:
    """Code ids int64 [n], ascending and without duplicates."""
    span = encode_range(ids)
    if not bool((ids[1:] > ids[:-1]).all()):
        raise out_of_order()
    if span is not None:
        return span
    largest = max(int(ids[0]), int((ids[1:] - ids[:-1]).max()) - 1)
    coding = "delta32" if largest < 1 << 32 else "delta64"
    n = ids.numel()
    planes = torch.empty(ITEM_BYTES[coding] * n, dtype=torch.uint8, device=ids.device)
    _shuffle[(triton.cdiv(n, _BLOCK),)](ids, planes, n, ITEM=ITEM_BYTES[coding], BLOCK=_BLOCK)
    return RowSet(coding, None, compress(planes.cpu().numpy().data))


def decode(
    coding: str,
    first: int | None,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
    device: torch.device | str = "cuda",
) -> Tensor:
    """The ids: int64 [count] on `device`."""
    if coding == "range":
        start = decode_range(first, payload, count=count, rows=rows)
        return torch.arange(start, start + count, dtype=torch.int64, device=device)
    shuffled = decompress(coding, first, payload, count=count, rows=rows)
    steps = torch.empty(count, dtype=torch.int64, device=device)
    if count == 0:
        return steps
    planes = torch.frombuffer(bytearray(shuffled), dtype=torch.uint8).to(device)
    _unshuffle[(triton.cdiv(count, _BLOCK),)](
        planes, steps, count, ITEM=ITEM_BYTES[coding], BLOCK=_BLOCK
    )
    # Each step is checked before it is added up and each sum after: while the sums are below 2^62
    # and a step is too, the next sum cannot wrap, so the first one to leave the table is seen.
    ids = (steps + 1).cumsum(0) - 1
    if bool(((steps < 0) | (steps >= rows) | (ids < 0) | (ids >= rows)).any()):
        raise outside(rows)
    return ids
