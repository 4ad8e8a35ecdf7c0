"""Choosing a method for a table by what it does to a sample of the table's rows."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.bit_packing.widths import require_bits
from recpoint.kernels.quantize import cpu
from recpoint.kernels.quantize.method import ASYMMETRIC, Method, MethodName

__all__ = ["MARGIN", "SAMPLE_ROWS", "candidates", "choose", "drawn", "squared_error"]

#: A cheaper method is taken if its squared error is at most this much above the least.
MARGIN: Final = 0.01
#: More rows than this change an error by less than the margin; they only cost time.
SAMPLE_ROWS: Final = 4096
_ROWS_AT_ONCE: Final = 64
#: Places of each end and refits, for each width: time grows with the square of the first.
_GRIDS: Final = {
    2: ((4, 2), (5, 2), (7, 3)),
    3: ((5, 3), (6, 3), (9, 3)),
    4: ((8, 3), (10, 3), (13, 3)),
    5: ((8, 3), (10, 3), (13, 3)),
    6: ((8, 3), (10, 3), (13, 3)),
    8: ((8, 3), (10, 3)),
}
#: Bins and thousandths of the range that may go, in the region that Check-N-Run found worth trying.
_STEPS: Final = {
    2: ((25, 400), (25, 600), (25, 800), (45, 800)),
    3: ((25, 200), (25, 400), (45, 400)),
    4: ((25, 200), (45, 200), (200, 160)),
    5: ((45, 150), (200, 120)),
    6: ((45, 100), (200, 100)),
    8: ((45, 100), (200, 100)),
}


def candidates(bits: int, name: MethodName | None = None) -> tuple[Method, ...]:
    """The methods that `choose` weighs for a width, the cheapest first.

    Without a name, and for 8 bits, that is the asymmetric one alone: a search gains little there.

    Raises:
        ValueError: bits is not one of `BITS`, or there is no such method.
    """
    require_bits(bits)
    refit = tuple(Method(name="refit", bins=b, refits=r) for b, r in _GRIDS[bits])
    if name is None:
        return (ASYMMETRIC,) if bits == 8 else (ASYMMETRIC, *refit)
    if name == "refit":
        return refit
    if name == "greedy":
        return tuple(Method(name="greedy", bins=b, ratio_permille=r) for b, r in _STEPS[bits])
    return (Method(name=name),)


def choose(rows: Tensor, bits: int, *, seed: int, name: MethodName | None = None) -> Method:
    """The cheapest method whose squared error on the rows is within `MARGIN` of the least.

    The same rows, bits and seed give the same method, whatever the machine and its threads: a
    row's codes do not depend on them, and errors are added up in one order.

    Args:
        rows: f32 [n, dim] in CPU memory, a sample of a table or the table; of more than
            `SAMPLE_ROWS` rows that many are drawn.
        bits: one of `BITS`.
        seed: of the draw.
        name: only candidates of this name, for their parameters; None: all of them.

    Raises:
        ValueError: as `quantize`, or there is no method of that name.
    """
    if rows.shape[0] > SAMPLE_ROWS:
        rows = rows[drawn(rows.shape[0], seed)]
    methods = candidates(bits, name)
    errors = [squared_error(rows, bits, method) for method in methods]
    enough = min(errors) * (1.0 + MARGIN)
    return next(m for m, error in zip(methods, errors, strict=True) if error <= enough)


def squared_error(rows: Tensor, bits: int, method: Method) -> float:
    """Sum of squared differences of f32 rows [n, dim] and what they decode to, in binary64.

    Rows that have to be kept exactly count as 0.
    """
    codes, scale, offset, exact, _ = cpu.quantize(rows, bits, method)
    decoded = cpu.dequantize(codes, scale, offset)
    total = 0.0
    # Few rows at a time: fresh memory for all of them would cost ten times the arithmetic.
    for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        difference = np.subtract(decoded[part].numpy(), rows[part].numpy(), dtype=np.float64)
        difference[exact[part].numpy()] = 0.0
        total += float(np.cumsum(np.square(difference))[-1])  # in one order on every machine
    return total


def drawn(count: int, seed: int) -> Tensor:
    """Int64 [SAMPLE_ROWS]: which of `count` rows, more than that, are looked at; ascending."""
    # One row of each of SAMPLE_ROWS equal parts, by a hash that no library's release changes.
    index = np.arange(SAMPLE_ROWS, dtype=np.uint64)
    mixed = (index + np.uint64(seed % 2**64)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    fraction = (mixed >> np.uint64(40)).astype(np.int64)  # 24 bits
    edges = np.arange(SAMPLE_ROWS + 1, dtype=np.int64) * count // SAMPLE_ROWS
    first, length = edges[:-1], np.diff(edges)
    return torch.from_numpy(first + (fraction * length >> 24))
