"""Says in how many bits each row is worth storing: the width of least damage and bytes together."""

from __future__ import annotations

from torch import Tensor

from recpoint.kernels.allocation import cpu
from recpoint.kernels.allocation.costs import EXACT, WIDTHS, row_bits

__all__ = ["EXACT", "WIDTHS", "allocate", "row_bits", "weigh"]


def allocate(rows: Tensor, importance: Tensor, price: float, *, exact_bits: int = 32) -> Tensor:
    """Choose a width for each row: u8 [n], each of `WIDTHS`, or `EXACT` (0) to keep it as it is.

    The choice for a row has the least `importance · error + price · bits`, and of equal costs the
    narrower width. `error` is the sum of the squared errors of the row's values if they are stored
    by format §3.2 (method asymmetric, with parameters of binary16 where the row is not wide), and 0
    for `EXACT`. `bits` are those of `row_bits`. The choice depends on the row alone, so rows may
    come in any pieces and order. A row is kept exactly, too, if no width can store it, or if its
    importance is negative, infinite or NaN. The README gives each operation.

    Args:
        rows: f32 [n, dim], contiguous, on the CPU.
        importance: f32 [n], contiguous, on the CPU: loss for each unit of squared error. A value
            below 2^-126 counts as 0.
        price: loss for each stored bit, 0 or more.
        exact_bits: bits that one value of an exact row takes: those of the table's dtype.

    Raises:
        ValueError: a tensor has another shape, dtype or device; the price is negative or not
            finite; exact_bits is below 1.
    """
    return cpu.allocate(rows, importance, price, exact_bits=exact_bits)


def weigh(states: Tensor, scale: float, *, initial: float = 0.0) -> Tensor:
    """Return the importance of each row by a row state that sums up squared gradients: f32 [n].

    It is `scale` times the mean of the row's values, each less `initial` and at least 0, rounded to
    binary32 at the end. Values are added up in binary64, in the order of `row_sums`.

    Args:
        states: [n, m] of a float dtype, contiguous, on the CPU, m >= 1.
        scale: above 0.
        initial: the value with which the optimizer began the state.

    Raises:
        ValueError: the states have another shape, dtype or device.
    """
    return cpu.weigh(states, scale, initial=initial)
