"""Adds up the values of rows in an order that neither threads nor processors change."""

from __future__ import annotations

from torch import Tensor

__all__ = ["row_sums"]


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
