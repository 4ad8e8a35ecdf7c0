"""One process, or one of several that torchrun has started: all that differs between the two."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["gathered", "join", "leave", "of_all_ranks", "replicated"]


def join() -> tuple[int, int]:
    """This process's rank, and how many train together; under torchrun it has met them then."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def leave() -> None:
    """The last call of a process that has met others.

    For a moment after an exchange gloo's threads hold what was exchanged. Where Python is gone when
    they let go of it, they end the process with SIGABRT, and torchrun takes the job for failed.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def replicated(model: nn.Module) -> nn.Module:
    """The model on every rank, with the weights of rank 0 and the mean of all ranks' gradients.

    `find_unused_parameters` is there for the bits: without it DDP sorts gradients into other
    buckets after the first step of each life, and with three ranks or more the order in which a
    gradient is summed follows from its place in a bucket.
    """
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(model, find_unused_parameters=True)


def of_all_ranks(values: torch.Tensor) -> torch.Tensor:
    """[ranks * n] of [n] on each rank, in the order of ranks."""
    if not dist.is_initialized():
        return values
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.detach())
    return torch.cat(parts)


def gathered(value: Any) -> list[Any]:
    """`value` of each rank, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
