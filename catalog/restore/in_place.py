"""Writes values into live tensors, also where several elements of a tensor share memory.

`torch.ones(1, 3).expand(4, 3)` has 12 elements in the memory of 3, and torch refuses to write into
it. Such a tensor can hold a value only if the elements that share memory are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fits", "shares_memory", "write"]


def shares_memory(tensor: Tensor) -> bool:
    """Whether several elements of the tensor may lie in the same memory."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    end = 0  # the highest offset of an element, over the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= end:
            return True
        end += stride * (size - 1)
    return False


def fits(live: Tensor, value: Tensor) -> bool:
    """Whether `live` can hold `value`, of the same shape and dtype, bit for bit.

    Args:
        live: a tensor of any strides; it does not change.
        value: a dense tensor.
    """
    if not shares_memory(live):
        return True
    memory = torch.empty(_span(live), dtype=live.dtype, device=value.device)
    copy = memory.as_strided(live.shape, live.stride())
    write(copy, value)
    return _bits(copy).equal(_bits(value))


def write(target: Tensor, value: Tensor) -> None:
    """Write `value` into the memory of `target`, whether autograd allows changes in place or not.

    Args:
        target: a dense tensor of any strides that `fits` the value.
        value: a tensor of the same shape.
    """
    # The detached tensor has the same memory and counts its changes in the same place.
    target, value = target.detach(), value.detach()
    for dim, (stride, size) in enumerate(zip(target.stride(), target.shape, strict=True)):
        if stride == 0 and size > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if not shares_memory(target):
        target.copy_(value)
        return
    # torch refuses to write into windows that overlap (unfold()), so each element is written by
    # its offset. Elements of one offset are equal, because `target` fits the value.
    offsets = torch.zeros((), dtype=torch.int64, device=target.device)
    for stride, size in zip(target.stride(), target.shape, strict=True):
        offsets = offsets.unsqueeze(-1) + stride * torch.arange(size, device=target.device)
    memory = target.as_strided((_span(target),), (1,))
    memory[offsets.reshape(-1)] = value.to(memory).reshape(-1)


def _span(tensor: Tensor) -> int:
    """Return the number of places in memory from the first element to the last."""
    places = zip(tensor.stride(), tensor.shape, strict=True)
    return 1 + sum(stride * (size - 1) for stride, size in places)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)
