"""Lets a training script run as one process or as one of several ranks under torchrun."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["gathered", "join", "leave", "of_all_ranks", "replicated"]


def join() -> tuple[int, int]:
    """Return (rank, number of ranks); under torchrun, join the process group first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def leave() -> None:
    """Leave the process group; the last call of a process that called `join`.

    For a moment after an exchange, gloo's threads hold the exchanged tensors. If they release them
    after Python has ended, the process ends with SIGABRT, and torchrun reports the job as failed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def replicated(model: nn.Module) -> nn.Module:
    """Return the model in DDP: every rank has rank 0's weights and the mean of all gradients.

    `find_unused_parameters` keeps resumed training equal bit for bit. Without it, DDP puts
    gradients into other buckets after the first step of each process. With three ranks or more, the
    order in which a gradient is summed depends on its place in a bucket.
    """
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(model, find_unused_parameters=True)


def of_all_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the values of all ranks, [ranks * n] from [n] on each rank, in the order of ranks."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.detach())
    return torch.cat(parts)


def gathered(value: Any) -> list[Any]:
    """Return the `value` of each rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
