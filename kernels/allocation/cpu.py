"""The choice of widths in one compiled pass, without the GIL, with a row in each lane."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from recpoint.kernels.allocation.costs import (
    EXACT,
    WIDTHS,
    require_allocatable,
    require_states,
    row_bits,
)
from recpoint.kernels.allocation.sums import weighed
from recpoint.kernels.native import library, team_size

__all__ = ["allocate", "prices", "weigh"]

#: Trying all widths takes as long as reading and writing some six times as many bytes.
_PASS_BYTES = 6


def allocate(rows: Tensor, importance: Tensor, price: float, *, exact_bits: int = 32) -> Tensor:
    """Choose the width of least cost for each row: u8 [n]."""
    require_allocatable(rows, importance, price, exact_bits)
    n, dim = rows.shape
    widths = torch.empty(n, dtype=torch.uint8, device="cpu")
    size_prices = array("d", prices(dim, price, exact_bits))
    prices_at, _ = size_prices.buffer_info()
    library.allocate_widths(
        rows.data_ptr(), importance.data_ptr(), dim, prices_at, widths.data_ptr(), n,
        team_size(_PASS_BYTES * rows.nbytes),
    )  # fmt: skip
    return widths


def weigh(states: Tensor, scale: float, *, initial: float = 0.0) -> Tensor:
    """Return the importance of each row by its row state: f32 [n]."""
    require_states(states)
    if states.dtype is torch.float64:  # no optimizer of a table of F32 has such states
        return weighed(states, scale, initial)
    n, m = states.shape
    singles = states.to(torch.float32)
    importance = torch.empty(n, dtype=torch.float32, device="cpu")
    library.weigh_rows(
        singles.data_ptr(), m, initial, scale / m, importance.data_ptr(), n,
        team_size(singles.nbytes),
    )  # fmt: skip
    return importance


def prices(dim: int, price: float, exact_bits: int) -> list[float]:
    """Return what a row's bits cost: at each width, the same for a wide row, and kept exactly."""
    bits = [row_bits(dim, width, wide=wide) for wide in (False, True) for width in WIDTHS]
    bits.append(row_bits(dim, EXACT, wide=False, exact_bits=exact_bits))
    return [price * float(count) for count in bits]
