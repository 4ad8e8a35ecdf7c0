"""The row-set coding in Python integers."""

from __future__ import annotations

import torch
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


def encode(ids: Tensor) -> RowSet:
    """Code ids int64 [n], ascending and without duplicates."""
    span = encode_range(ids)
    differences = []
    before = -1
    for row in ids.tolist():
        if row <= before:
            raise out_of_order()
        differences.append(row - before - 1)
        before = row
    if span is not None:
        return span
    coding = "delta32" if max(differences) < 1 << 32 else "delta64"
    item_bytes = ITEM_BYTES[coding]
    words = [difference.to_bytes(item_bytes, "little") for difference in differences]
    planes = [bytes(word[plane] for word in words) for plane in range(item_bytes)]
    return RowSet(coding, None, compress(b"".join(planes)))


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
        return torch.tensor(range(start, start + count), dtype=torch.int64)
    shuffled = decompress(coding, first, payload, count=count, rows=rows)
    ids = []
    before = -1
    for i in range(count):
        word = bytes(shuffled[plane * count + i] for plane in range(ITEM_BYTES[coding]))
        before += int.from_bytes(word, "little") + 1
        if before >= rows:
            raise outside(rows)
        ids.append(before)
    return torch.tensor(ids, dtype=torch.int64)
