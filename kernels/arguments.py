"""Checks tensor arguments before a kernel gets their addresses."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["require", "require_dense", "require_integers", "unsupported_device"]


def require(name: str, tensor: Tensor, dtype: torch.dtype, dims: int) -> None:
    """Refuse a tensor with another dtype or number of dimensions, or that is not contiguous.

    Raises:
        ValueError: names the argument and what is expected.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: dtype {tensor.dtype}, expected {dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {dims} dimensions")
    require_dense(name, tensor)


def require_integers(name: str, values: Tensor) -> None:
    """Refuse what is no contiguous vector of int64 on the CPU.

    Raises:
        ValueError: names the argument and what is expected.
    """
    # Lookups of keyed tables pass here many times; int64 is never a lazy view.
    if values.dtype is torch.int64 and values.dim() == 1 and values.is_cpu:
        if values.is_contiguous():
            return
    require(name, values, torch.int64, 1)
    if not values.is_cpu:
        raise ValueError(f"{name}: device {values.device}, expected cpu")


def require_dense(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose elements do not lie one after another in memory.

    Raises:
        ValueError: names the argument.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name}: not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()});"
            " pass .contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name}: a lazy conjugate or negative view; pass .resolve_conj()")


def unsupported_device(name: str, tensor: Tensor) -> ValueError:
    """The error for a tensor on a device that has no kernels here."""
    return ValueError(f"{name}: device {tensor.device}, expected cpu or cuda")
