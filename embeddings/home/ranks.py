"""Tells which rank of a training this process is."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["rank_and_count"]


def rank_and_count() -> tuple[int, int]:
    """Return the rank of this process and how many there are: 0 and 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
