"""What a row costs at a width, and which arguments can be allocated."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.bit_packing.widths import BITS, packed_width
from recpoint.kernels.quantize.shapes import require_rows

__all__ = [
    "BIAS",
    "EXACT",
    "SMALLEST_SPAN",
    "WIDTHS",
    "require_allocatable",
    "require_states",
    "row_bits",
]

#: The widths of codes that a row can have.
WIDTHS: Final = BITS
#: Stands for a row without codes: it is stored as it is.
EXACT: Final = 0

#: The sum of a row's squared errors starts here, so that terms which a processor may take for zero
#: (subnormal values) change no sum. It is taken off again.
BIAS: Final = 2.0**-60
#: A row whose values differ by less than this counts as one that every width stores without error.
SMALLEST_SPAN: Final = 2.0**-56


def row_bits(dim: int, width: int, *, wide: bool, exact_bits: int = 32) -> int:
    """Return the stored bits of a row's values and parameters; ids and row states are not in it.

    Args:
        dim: values of the row.
        width: one of `WIDTHS`, or `EXACT`.
        wide: whether scale and offset take 32 bits each, and not 16 (format §3.2).
        exact_bits: bits of one value of an exact row.

    Raises:
        ValueError: there is no such width.
    """
    if width == EXACT:
        return dim * exact_bits
    return 8 * packed_width(dim, width) + (64 if wide else 32)


def require_allocatable(rows: Tensor, importance: Tensor, price: float, exact_bits: int) -> None:
    """Refuse rows, importances or numbers that do not fit.

    Raises:
        ValueError: names the argument, and what is expected.
    """
    require_rows(rows, WIDTHS[0])
    require("importance", importance, torch.float32, 1)
    if importance.numel() != rows.shape[0]:
        raise ValueError(f"importance: {importance.numel()}, expected one for each of {len(rows)}")
    for name, tensor in (("rows", rows), ("importance", importance)):
        if not tensor.is_cpu:
            raise ValueError(f"{name}: device {tensor.device}, expected cpu")
    if not (math.isfinite(price) and price >= 0.0):
        raise ValueError(f"price: {price!r}, expected a finite number that is not negative")
    if exact_bits < 1:
        raise ValueError(f"exact_bits: {exact_bits!r}, expected 1 or more")


def require_states(states: Tensor) -> None:
    """Refuse row states that do not fit.

    Raises:
        ValueError: names what is expected.
    """
    if not states.dtype.is_floating_point:
        raise ValueError(f"states: dtype {states.dtype}, expected a float dtype")
    require("states", states, states.dtype, 2)
    if not states.is_cpu:
        raise ValueError(f"states: device {states.device}, expected cpu")
    if states.shape[1] < 1:
        raise ValueError("states: 0 values a row, expected 1 or more")
