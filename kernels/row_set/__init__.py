"""Coding of ascending row ids (format §3.1): a range, a bitmap, runs, or gaps.

On CPUs only: ids are coded where they are stored or read, in host memory.
"""

from __future__ import annotations

from torch import Tensor

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
    return cpu.encode(ids)


def decode(
    coding: str,
    first: int,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
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

    Raises:
        ValueError: any defect; says which.
    """
    return cpu.decode(coding, first, payload, count=count, rows=rows)
