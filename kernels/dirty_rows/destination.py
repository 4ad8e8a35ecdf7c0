"""Where the dirty rows of one table go, and what must be true of it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.kernels.arguments import require, require_dense
from recpoint.kernels.row_gather.shapes import require_rows

__all__ = ["Destination", "Room", "into", "row_bytes"]

_ID_BYTES = 8


class Room(NamedTuple):
    """Memory on the CPU that receives an array; no view of it, of which each costs a stall a while.

    Attributes:
        address: of its first byte.
        size_bytes: all of it is written.
        owner: whose memory it is, and as long as which is there.
    """

    address: int
    size_bytes: int
    owner: Tensor


class Destination(NamedTuple):
    """Where a table's dirty rows go.

    Attributes:
        ids: receives the rows' positions: int64 [n], ascending.
        arrays: (source [rows, *e], room for [n, *e] of its dtype) for the weight and each row
            state; sources are contiguous, on the CPU, and overlap no room.
    """

    ids: Room
    arrays: tuple[tuple[Tensor, Room], ...]


def into(ids: Tensor, *arrays: tuple[Tensor, Tensor]) -> Destination:
    """A destination in tensors of their own.

    Args:
        ids: int64 [n], on the CPU.
        arrays: (source [rows, *e], out [n, *e]), contiguous, of one dtype, on the CPU.

    Raises:
        ValueError: names what does not fit.
    """
    require("ids", ids, torch.int64, 1)
    for source, out in arrays:
        require_rows(source, ids, out)
    rooms = tuple((source, _room(out)) for source, out in arrays)
    return Destination(_room(ids), rooms)


def _room(tensor: Tensor) -> Room:
    if not tensor.is_cpu:
        raise ValueError(f"room: device {tensor.device}, expected cpu")
    return Room(tensor.data_ptr(), tensor.nbytes, tensor)


def row_bytes(destination: Destination, *, count: int, rows: int) -> list[int]:
    """Bytes of a row of each array, once all of them are found to fit.

    Raises:
        ValueError: names what does not fit.
    """
    if destination.ids.size_bytes != _ID_BYTES * count:
        raise ValueError(
            f"ids: room for {destination.ids.size_bytes} bytes, expected {_ID_BYTES * count}"
        )
    sizes = []
    for source, room in destination.arrays:
        require_dense("source", source)
        if not source.is_cpu:
            raise ValueError(f"source: device {source.device}, expected cpu")
        shape = source.shape
        if not shape or shape[0] < rows:
            raise ValueError(f"source: {shape[0] if shape else 0} rows, expected {rows}")
        size = source.element_size() * math.prod(shape[1:])
        if room.size_bytes != count * size:
            raise ValueError(f"rows: room for {room.size_bytes} bytes, expected {count * size}")
        sizes.append(size)
    return sizes
