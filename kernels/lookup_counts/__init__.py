"""Counts the lookups of rows in one byte a row, whose steps grow with the count.

On CPUs only: counts are kept where the marks of tables in host memory are.
"""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.lookup_counts import cpu
from recpoint.kernels.lookup_counts.steps import MOST, values

__all__ = ["MOST", "count", "values"]


def count(codes: Tensor, ids: Tensor, *, start: int) -> None:
    """Count one lookup of a row for each id that names it, in place.

    A code stands for a count (`values`). It is exact up to 16. Above, it rises with a chance of one
    to the step, so on average it counts each lookup. Chances follow from the number of the lookup
    alone, so the same lookups give the same codes. A code of 255 stays.

    Args:
        codes: u8 [rows], contiguous, on the CPU.
        ids: int32 or int64 of any shape, on the CPU; an id may come many times.
        start: number of the first of these lookups, 0 or more. Later lookups have later numbers.

    Raises:
        IndexError: an id is negative or >= rows; nothing is counted.
        ValueError: codes or ids have another dtype or lie elsewhere, or start is negative.
    """
    cpu.count(codes, ids, start=start)
