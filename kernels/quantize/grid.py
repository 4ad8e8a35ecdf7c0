"""What the `refit` search tries, and in which whole numbers it counts (README of this folder).

Every sum of a search is one of integers below 2^24 that binary32 holds exactly, so that no order of
addition changes it and all implementations find the same parameters.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "LARGEST_DIM",
    "candidates",
    "coarser",
    "error_unit",
    "fraction_bits",
    "greedy_steps",
    "half_spacing",
    "largest_error",
]

#: How far a candidate moves each end of the row into its range, in steps of the row's own scale:
#: from .. to. A negative one moves the end out. They hold the best of dense grids over trained,
#: Gaussian, Laplace and Student-t rows.
_SHRINK: Final = {
    2: (-0.5, 1.5),
    3: (-0.7, 1.4),
    4: (-2.0, 2.5),
    5: (-2.0, 2.5),
    6: (-2.0, 2.5),
    8: (-2.0, 2.5),
}
#: Rows of this many values have their best ends farther in: such as lie farther out than this are
#: not tried, which at 4 bits leaves two thirds of the pairs. The error of the rows above stays.
_LONG_DIM: Final = 64
_OUT_OF_LONG: Final = -1.0
#: Without a grid, least squares begin with the row's own ends, moved in by so many steps: near
#: where those of 2 and 3 bits end.
_INSET: Final = 0.25
#: Pairs of ends that leave less of the range than this are not tried.
_SHORTEST: Final = 0.1
_FEWEST_FRACTION_BITS: Final = 2
#: Rows of more values are not searched: sums of errors would become too coarse.
LARGEST_DIM: Final = 1 << 15


def fraction_bits(dim: int, bits: int) -> int:
    """Binary places of a value in steps, such that sums of code · value are exact; 0: no search."""
    places = min(10, 25 - 2 * bits - _ceil_log2(dim))
    return places if places >= _FEWEST_FRACTION_BITS and dim <= LARGEST_DIM else 0


def coarser(dim: int, bits: int) -> float:
    """What values in units are multiplied by, so that sums of their squares are exact."""
    places = fraction_bits(dim, bits)
    half = (_ceil_log2(dim) + 1) // 2
    return 2.0 ** min(0, 13 - bits - half - places)


def error_unit(dim: int) -> int:
    """How many units one squared step is, when squared errors are added up."""
    return 1 << max(0, min(14, 24 - _ceil_log2(dim)))


def largest_error(dim: int) -> int:
    """Sums of squared errors stop here, in units: twice what rounding to the next code can cost."""
    return min(error_unit(dim) << _ceil_log2(dim) >> 1, 1 << 23)


def greedy_steps(bins: int, ratio_permille: int) -> int:
    """How often the greedy search moves an end: never over the whole range."""
    return min(bins * ratio_permille // 1000, bins - 1)


@lru_cache(maxsize=64)
def candidates(dim: int, bits: int, bins: int) -> npt.NDArray[Any]:
    """F32 [bins² or fewer, 2]: slope and shift that turn a value in units into a code.

    Of 0 bins there is one pair, with which least squares begin.

    A value in units is round((x − min) / scale · 2^f) − L · 2^(f − 1), f = `fraction_bits`.
    """
    levels, places = 2**bits - 1, fraction_bits(dim, bits)
    moves = _moves(dim, bits, bins) if bins else [_INSET]
    pairs = [(low, levels - high) for low in moves for high in moves]
    pairs = [(low, high) for low, high in pairs if high - low >= _SHORTEST * levels]
    table = np.empty((len(pairs), 2), np.float32)
    for index, (low, high) in enumerate(pairs):
        step = (high - low) / levels
        table[index] = 1.0 / (step * 2.0**places), (levels / 2 - low) / step
    table.flags.writeable = False
    return table


def _moves(dim: int, bits: int, bins: int) -> list[float]:
    """How far each end is moved into the row's range, in steps of its scale."""
    first, last = _SHRINK[bits]
    moves = [first + (last - first) * i / (bins - 1) for i in range(bins)]
    return [move for move in moves if dim < _LONG_DIM or move >= _OUT_OF_LONG]


def half_spacing(dim: int, bits: int, bins: int) -> float:
    """Half the distance of neighbouring places of an end, in units; 0 if there is no grid."""
    if not bins:
        return 0.0
    first, last = _SHRINK[bits]
    return (last - first) / (bins - 1) / 2 * 2.0 ** fraction_bits(dim, bits)


def _ceil_log2(count: int) -> int:
    return (count - 1).bit_length()
