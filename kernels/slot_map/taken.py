"""What a call that gives slots to rows has done, and what it needs to be given."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MOST_USE", "Taken", "as_vector", "require_use"]

#: The latest use that a row can have. Larger integers have a meaning of their own in native.cpp.
MOST_USE = (1 << 62) - 1


class Taken(NamedTuple):
    """The rows that got a slot, and the rows that lost theirs.

    Attributes:
        fetched_ids: int64 [n], ascending: rows that had no slot.
        fetched_slots: int64 [n]: their slots. Free slots come first, lowest first; then the slots
            of the evicted rows, in the order in which these rows lost them.
        evicted_ids: int64 [m], ascending.
        evicted_slots: int64 [m]: the slots that they had.
    """

    fetched_ids: Tensor
    fetched_slots: Tensor
    evicted_ids: Tensor
    evicted_slots: Tensor


def as_vector(ids: Tensor) -> Tensor:
    """Return the ids with their elements one after another in memory.

    Raises:
        ValueError: they are not a vector of int32 or int64 on the CPU.
    """
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1 or not ids.is_cpu:
        raise ValueError(
            f"ids: {ids.dtype} {tuple(ids.shape)} on {ids.device}, expected a vector of int32"
            " or int64 on the cpu"
        )
    return ids.contiguous()


def require_use(name: str, use: int) -> None:
    """Refuse a use that is negative, or too late to be counted.

    Raises:
        ValueError: names the argument.
    """
    if not 0 <= use <= MOST_USE:
        raise ValueError(f"{name}: {use}, expected 0 <= {name} <= {MOST_USE}")
