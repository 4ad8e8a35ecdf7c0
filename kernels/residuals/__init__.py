"""Takes from rows what the full of their chain decodes to (format §3.7), on CPUs."""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.residuals import cpu

__all__ = ["subtract"]


def subtract(rows: Tensor, base: Tensor, most: float) -> Tensor:
    """Return `rows - base`, f32 [n, dim]; NaN in all of a row that MUST be stored exactly.

    Args:
        rows: f32 [n, dim], contiguous, on the CPU.
        base: like `rows`: what the full decodes to.
        most: the greatest finite value of the table's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    return cpu.subtract(rows, base, most)
