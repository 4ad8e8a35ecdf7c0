"""Where the dirty rows of one table go, and what must be true of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.row_gather.shapes import require_rows

__all__ = ["Destination", "row_bytes"]


class Destination(NamedTuple):
    """Where a table's dirty rows go.

    Attributes:
        ids: receives the rows' positions: int64 [n], ascending.
        arrays: (source [rows, *e], out [n, *e]) for the weight and each row state: contiguous, of
            one dtype, on the CPU, not overlapping.
    """

    ids: Tensor
    arrays: tuple[tuple[Tensor, Tensor], ...]


def row_bytes(destination: Destination, *, count: int, rows: int) -> list[int]:
    """Bytes of a row of each array, once all of them are found to fit.

    Raises:
        ValueError: names what does not fit.
    """
    require("ids", destination.ids, torch.int64, 1)
    if destination.ids.numel() != count:
        raise ValueError(f"ids: room for {destination.ids.numel()}, expected {count}")
    sizes = []
    for source, out in destination.arrays:
        sizes.append(require_rows(source, destination.ids, out))
        if source.shape[0] < rows:
            raise ValueError(f"source: {source.shape[0]} rows, expected {rows}")
    return sizes
