"""Adds up the values of rows in an order that neither threads nor processors change."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["row_sums", "weighed"]


def row_sums(values: Tensor) -> Tensor:
    """Return the sum of each row's values: f64 [n].

    Args:
        values: f64 [n, m], m >= 1.
    """
    sums = values
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        halves = sums[:, :half] + sums[:, half : 2 * half]
        if sums.shape[1] % 2:
            halves[:, 0] += sums[:, -1]
        sums = halves
    return sums[:, 0]


def weighed(states: Tensor, scale: float, initial: float) -> Tensor:
    """Return `scale` times the mean of each row's values less `initial`, at least 0: f32 [n].

    Args:
        states: f64 [n, m], m >= 1.
        scale: above 0.
        initial: what is taken off each value; what is negative then counts as 0.
    """
    sums = row_sums((states - initial).clamp(min=0.0))
    return (sums * (scale / states.shape[1])).to(torch.float32)
