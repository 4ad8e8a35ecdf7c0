"""Copying chosen rows of a table out of it, and back into it. Any dtype: rows are bytes here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.kernels.arguments import unsupported_device
from recpoint.kernels.row_gather import cpu

__all__ = ["first_unordered", "gather", "gather_many", "move", "scatter"]


def first_unordered(ids: Tensor, start: int, stop: int) -> int:
    """The position of the first id that is out of range, or not above the id before it.

    Args:
        ids: int64 [n], contiguous, on the CPU.
        start: the least id that is allowed.
        stop: the first one after those that are.

    Returns:
        The position; -1: all ids ascend within the range.

    Raises:
        ValueError: the ids have another form, or are on another device.
    """
    if not ids.is_cpu:
        raise ValueError(f"ids: device {ids.device}, expected cpu")
    return cpu.first_unordered(ids, start, stop)


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


def gather_many(sources: Sequence[Tensor], ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """`gather` for several sources, on a GPU in one launch.

    Args:
        sources: tables and the row states that belong to them, all on one device.
        ids: for each source, int64 [n]; sources that belong together share a tensor.
        outs: for each source; parts of one buffer, for instance.

    Raises:
        IndexError: on a CPU, an id is out of range; its source and those after it are not copied.
        ValueError: as `gather`, or the numbers of sources, ids and outs differ.
    """
    if not sources or sources[0].is_cpu:
        for source, row_ids, out in zip(sources, ids, outs, strict=True):
            cpu.gather(source, row_ids, out)
    elif sources[0].is_cuda:
        from recpoint.kernels.row_gather import triton

        with torch.cuda.device_of(sources[0]):  # Triton launches on the current device
            triton.gather_many(sources, ids, outs)
    else:
        raise unsupported_device("sources", sources[0])


def move(source: Tensor, positions: Tensor, dest: Tensor, ids: Tensor) -> None:
    """dest[ids[i]] = source[positions[i]]: a gather and a scatter without what lies between.

    Args:
        source: [n, *e], contiguous, on the CPU.
        positions: int64 [m], each 0 <= position < n.
        dest: [R, *e], same dtype as source, contiguous, on the CPU, not overlapping source.
        ids: int64 [m], each 0 <= id < R, without duplicates.

    Raises:
        IndexError: a position or an id is out of range; nothing was copied.
        ValueError: shapes or dtypes do not fit, or a tensor is not contiguous or not on the CPU.
    """
    if not dest.is_cpu:
        raise unsupported_device("dest", dest)
    cpu.move(source, positions, dest, ids)


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
