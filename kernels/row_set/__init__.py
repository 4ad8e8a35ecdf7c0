"""Coding of ascending row ids (format §3.1): a range, a bitmap, runs, or gaps."""

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
        the coding, the first id, and the payload, None for a range. The coding follows from how
        many ids, rows between their ends and runs of consecutive ids there are (README); a range
        whenever that is possible. An empty set is the range of no rows at 0.

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
    first: int,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The ids of a row set: int64 [count], ascending, without duplicates, each 0 <= id < rows.

    Safe for hostile input: the frame's stated size is compared with what `count` allows before
    anything is decompressed, and nothing is larger than a small multiple of `count` ids.

    Args:
        coding: "range", "bitmap", "runs" or "delta".
        first: the first id.
        payload: what `encode` gave; None for a range.
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
