"""Coding of ascending row ids (format §3.1): a range, or compressed differences."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import unsupported_device
from recpoint.kernels.row_set import cpu
from recpoint.kernels.row_set.coding import RowSet

__all__ = ["RowSet", "decode", "encode"]


def encode(ids: Tensor) -> RowSet:
    """Code ids int64 [n], ascending, without duplicates, 0 or more.

    Returns:
        coding "range" with `first`, whenever that is possible; otherwise "delta32" or "delta64"
        with `payload`. An empty set is the range of no rows at 0.

    Raises:
        ValueError: the ids are not int64 [n], not ascending, or negative.
    """
    if ids.is_cpu:
        return cpu.encode(ids)
    if ids.is_cuda:
        from recpoint.kernels.row_set import triton

        with torch.cuda.device_of(ids):  # Triton launches on the current device
            return triton.encode(ids)
    raise unsupported_device("ids", ids)


def decode(
    coding: str,
    first: int | None,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The ids of a row set: int64 [count], ascending, without duplicates, each 0 <= id < rows.

    Safe for hostile input: the frame's stated size is compared with what `count` implies before
    anything is decompressed, and nothing is larger than `count` rows need.

    Args:
        coding: "range", "delta32" or "delta64".
        first: the first id of a range; None otherwise.
        payload: the zstd frame of a delta coding; None for a range.
        count: how many ids there must be.
        rows: rows of the table, at most 2^62.
        device: where the ids are wanted.

    Raises:
        ValueError: any defect; says which.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return cpu.decode(coding, first, payload, count=count, rows=rows)
    if kind == "cuda":
        from recpoint.kernels.row_set import triton

        with torch.cuda.device(device):  # Triton launches on the current device
            return triton.decode(coding, first, payload, count=count, rows=rows, device=device)
    raise ValueError(f"device: {device}, expected cpu or cuda")
