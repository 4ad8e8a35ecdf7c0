"""Copying chosen rows of a table out of it, and back into it. Any dtype: rows are bytes here."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import unsupported_device
from recpoint.kernels.row_gather import cpu

__all__ = ["gather", "scatter"]


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]].

    Args:
        source: [R, *e], contiguous.
        ids: int64 [n], each 0 <= id < R, in any order, duplicates allowed.
        out: [n, *e], same dtype and device as source, contiguous, not overlapping it.

    On a GPU an id out of range is not reported and touches no memory.

    Raises:
        IndexError: on a CPU, an id is out of range; nothing was copied.
        ValueError: shapes, dtypes or devices do not fit, or a tensor is not contiguous.
    """
    if source.is_cpu:
        cpu.gather(source, ids, out)
    elif source.is_cuda:
        from recpoint.kernels.row_gather import triton

        with torch.cuda.device_of(source):  # Triton launches on the current device
            triton.gather(source, ids, out)
    else:
        raise unsupported_device("source", source)


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i].

    Args:
        rows: [n, *e], contiguous.
        ids: int64 [n], each 0 <= id < R, without duplicates.
        dest: [R, *e], same dtype and device as rows, contiguous, not overlapping it.

    On a GPU an id out of range is not reported and touches no memory.

    Raises:
        IndexError: on a CPU, an id is out of range; nothing was copied.
        ValueError: shapes, dtypes or devices do not fit, or a tensor is not contiguous.
    """
    if dest.is_cpu:
        cpu.scatter(rows, ids, dest)
    elif dest.is_cuda:
        from recpoint.kernels.row_gather import triton

        with torch.cuda.device_of(rows):  # Triton launches on the current device
            triton.scatter(rows, ids, dest)
    else:
        raise unsupported_device("dest", dest)
