"""Which rows can be subtracted, and how much room a decoded residual is given."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require

__all__ = ["MOST_ERROR", "require_like"]

#: The root of the squared errors of 2^20 values is below this many times the largest of them.
MOST_ERROR: Final = 2.0**10


def require_like(rows: Tensor, base: Tensor) -> None:
    """Refuse rows that are not f32 [n, dim] on the CPU, and a base of another shape.

    Raises:
        ValueError: names the argument, and what is expected.
    """
    for name, tensor in (("rows", rows), ("base", base)):
        require(name, tensor, torch.float32, 2)
        if not tensor.is_cpu:
            raise ValueError(f"{name}: device {tensor.device}, expected cpu")
    if base.shape != rows.shape:
        raise ValueError(f"base: {tuple(base.shape)}, expected {tuple(rows.shape)} as the rows")
