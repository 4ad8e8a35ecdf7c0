"""Gives rows of a table as a restore of a full would have them, at a price of a bit or in 8 bits.

A restore of an increment with residuals costs no more at the same price, so what is measured on
these rows holds for it, too. Residuals of the looked-up rows would say too little: most of the cost
lies in rows that have not changed since the full, which a restore takes from it (decision 59).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.persist.row_widths import importance
from recpoint.format.dtypes import item_bytes
from recpoint.kernels.allocation import EXACT, WIDTHS, allocate
from recpoint.kernels.quantize import ASYMMETRIC, Method, dequantize, quantize
from recpoint.trainer_plugin.snapshot.live_tables import LiveTable
from recpoint.trainer_plugin.state.second_moments import SecondMoment

__all__ = ["WIDEST", "RoundedRows", "rounded_rows"]

#: The width of all rows that have no price.
WIDEST: Final = max(WIDTHS)


class RoundedRows(NamedTuple):
    """Rows of a table as a restore would have them.

    Attributes:
        values: [n, dim], of the table's dtype.
        widths: bits of each row, u8 [n]; `EXACT` for rows that are kept as they are.
        damage: importance times squared error of each row, f64 [n], 0 for rows whose importance is
            not finite; None: no importance is known.
    """

    values: Tensor
    widths: Tensor
    damage: Tensor | None


def rounded_rows(
    live: LiveTable,
    ids: Tensor,
    moment: SecondMoment | None,
    price: float | None,
    method: Method,
) -> RoundedRows:
    """Round rows as the agent will, except that it may give a few rows more bits.

    Args:
        live: the table, on the CPU.
        ids: int64 [n].
        moment: says which row state the importance is made of; None: there is none yet.
        price: price of a bit; None, or without a moment: all rows get plain codes of 8 bits.
        method: finds the codes of rows that have a price.
    """
    stored = live.weight.detach()[ids]
    rows = stored.to(torch.float32).contiguous()
    weight = None
    if moment is not None:
        states = live.row_states[moment.state].detach()[ids]
        weight = importance(states, moment.scale, moment.initial)
    if weight is None or price is None:
        widths = torch.full((len(ids),), WIDEST, dtype=torch.uint8, device="cpu")
        method = ASYMMETRIC
    else:
        exact_bits = 8 * item_bytes(live.spec.dtype)
        widths = allocate(rows, weight, price, exact_bits=exact_bits)
    values = stored.clone()
    inexact = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    if stored.dtype == torch.float64:
        # Only rows whose conversion to F32 is exact may be quantized (format §3.2).
        inexact = (rows.to(torch.float64) != stored).any(dim=1)
    for width in WIDTHS:
        positions = torch.nonzero(widths == width).flatten()
        if not len(positions):
            continue
        coded = quantize(rows[positions], width, method, half_parameters=True)
        can_store = ~(coded.exact | inexact[positions])
        decoded = dequantize(coded.codes, coded.scale, coded.offset)
        values[positions[can_store]] = decoded[can_store].to(stored.dtype)
        widths[positions[~can_store]] = EXACT
    damage = None
    if weight is not None:
        errors = values.to(torch.float64) - stored.to(torch.float64)
        damage = weight.to(torch.float64) * (errors * errors).sum(dim=1)
        # Exact rows cost nothing, whatever they hold; infinite importances make rows exact.
        damage[(widths == EXACT) | ~weight.isfinite()] = 0.0
    return RoundedRows(values, widths, damage)
