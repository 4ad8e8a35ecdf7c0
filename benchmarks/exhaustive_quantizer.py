"""Searches nearly exhaustively for the least squared error of a row with one scale and offset.

It tries a dense grid of pairs of ends, each followed by alternating least squares in binary64 until
nothing changes. It is slow, and shares no code with the searches that it judges.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["least_error"]

_PLACES = 48
_ROUNDS = 12


def least_error(rows: Tensor, bits: int) -> float:
    """Return the mean, over f32 rows [n, dim], of each row's least sum of squared errors."""
    return sum(_least(row, 2**bits - 1) for row in rows.double()) / len(rows)


def _least(row: Tensor, levels: int) -> float:
    low, span = row.min(), row.max() - row.min()
    if span == 0:
        return 0.0
    # Ends move out by up to one and a half steps or a tenth, and in by up to six tenths.
    out = max(0.1, 1.5 / levels)
    moves = span * torch.linspace(-out, 0.6, _PLACES, dtype=row.dtype)
    start = (low + moves)[:, None].expand(_PLACES, _PLACES).flatten()
    stop = (low + span - moves)[None, :].expand(_PLACES, _PLACES).flatten()
    is_long = stop - start > span / (4 * levels)
    return _alternated(row, start[is_long], (stop[is_long] - start[is_long]) / levels, levels)


def _alternated(row: Tensor, offset: Tensor, scale: Tensor, levels: int) -> float:
    """Return the least error that least squares reach from these pairs, f64 [pairs] each."""
    n, total = len(row), row.sum()
    best = float("inf")
    error_before = torch.full_like(scale, float("inf"))
    for _ in range(_ROUNDS + 1):
        places = (row - offset[:, None]) / scale[:, None]
        codes = (places.clamp(0.0, levels) + 0.5).floor()
        error = (row - (codes * scale[:, None] + offset[:, None])).square().sum(dim=1)
        best = min(best, float(error.min()))
        sums, products = codes.sum(dim=1), codes @ row
        square = n * codes.square().sum(dim=1) - sums * sums
        along = n * products - sums * total
        goes_on = (error < error_before * (1.0 - 1e-9)) & (square > 0.0) & (along > 0.0)
        if not goes_on.any():
            break
        error_before = error[goes_on]
        scale = along[goes_on] / square[goes_on]
        offset = (total - scale * sums[goes_on]) / n
    return best
