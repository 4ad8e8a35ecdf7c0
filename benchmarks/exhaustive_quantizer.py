"""Searches nearly exhaustively for the least squared error of a row with one scale and offset.

It tries a dense grid of pairs of ends, each followed by alternating least squares in binary64 until
nothing changes. It is slow, and shares no code with the searches that it judges.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from torch import Tensor

__all__ = ["least_error"]

_PLACES = 48
_ROUNDS = 12


def least_error(rows: Tensor, bits: int) -> float:
    """Returns the mean, over f32 rows [n, dim], of each row's least sum of squared errors."""
    return float(_least(rows.double().numpy(), 2**bits - 1, _PLACES, _ROUNDS).mean())


@numba.njit(nogil=True)  # type: ignore[misc, unused-ignore]
def _least(rows: Any, levels: int, places: int, rounds: int) -> Any:
    best = np.empty(rows.shape[0])
    for i in range(rows.shape[0]):
        row = rows[i]
        low, high = row.min(), row.max()
        span = high - low
        best[i] = 0.0 if span == 0 else np.inf
        # Ends move out by up to one and a half steps or a tenth, and in by up to six tenths.
        out = max(0.1, 1.5 / levels)
        for a in range(places):
            start = low + span * (-out + (0.6 + out) * a / (places - 1))
            for b in range(places):
                stop = high - span * (-out + (0.6 + out) * b / (places - 1))
                if stop - start > span / (4 * levels):
                    found = _alternated(row, start, (stop - start) / levels, levels, rounds)
                    best[i] = min(best[i], found)
    return best


@numba.njit(nogil=True)  # type: ignore[misc, unused-ignore]
def _alternated(row: Any, offset: float, scale: float, levels: int, rounds: int) -> float:
    n = len(row)
    before = np.inf
    for _ in range(rounds + 1):
        c, p, q, t, error = 0.0, 0.0, 0.0, 0.0, 0.0
        inverse = 1.0 / scale
        for x in row:
            code = np.floor(min(max((x - offset) * inverse, 0.0), float(levels)) + 0.5)
            error += (x - (code * scale + offset)) ** 2
            c += code
            p += code * x
            q += code * code
            t += x
        square = n * q - c * c
        along = n * p - c * t
        if error >= before * (1.0 - 1e-9) or square <= 0.0 or along <= 0.0:
            return min(error, before)
        before = error
        scale = along / square
        offset = (t - scale * c) / n
    return before
