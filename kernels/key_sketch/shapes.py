"""What a sketch of counts needs to be given."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require

__all__ = ["DEPTH", "MOST_COUNT", "require_counts"]

#: Counts of a key, one in each row of a sketch.
DEPTH: Final = 4
#: The largest count. It stands for any larger one.
MOST_COUNT: Final = 255
_MOST_WIDTH: Final = (1 << 31) - 1


def require_counts(counts: Tensor) -> None:
    """Refuse a tensor that is no sketch.

    Raises:
        ValueError: says what was found.
    """
    require("counts", counts, torch.uint8, 2)
    if not counts.is_cpu:
        raise ValueError(f"counts: device {counts.device}, expected cpu")
    depth, width = counts.shape
    if depth != DEPTH or not 1 <= width <= _MOST_WIDTH:
        raise ValueError(
            f"counts: shape {tuple(counts.shape)}, expected ({DEPTH}, 1 to {_MOST_WIDTH:,})"
        )
