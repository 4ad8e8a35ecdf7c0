"""The searches on a CPU: sixteen rows at a time, one in each lane (README of this folder)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.np.numpy_support import carray

from recpoint.kernels.intrinsics import compiled, pointer
from recpoint.kernels.quantize import binary16
from recpoint.kernels.quantize.lanes import (
    LANES,
    both,
    exact_multiply_add,
    less,
    load,
    maximum,
    minimum,
    rounded,
    select,
    spread,
    store,
    whole,
)
from recpoint.kernels.quantize.plain import plain_parameters, write_row
from recpoint.kernels.quantize.vectors import CODES_AT_ONCE, ends_of_row

__all__ = ["search_rows"]

_ZERO = np.float32(0.0)
_HALF = np.float32(0.5)
_ONE = np.float32(1.0)
#: Units a value by which rounded sums of errors must differ for the exact ones to differ.
_MARGIN = np.float32(1.25)
_TINY = np.float32(2.0**-126)
_FINITE = np.float32(np.finfo(np.float32).max)
_LINE = 4 * LANES

# Lines of the array that holds what a search knows of each lane's row.
_STEP, _LOW, _PER_STEP = 0, 1, 2  # the plain scale, the minimum, and 1 / scale
_PLAIN_SCALE, _PLAIN_OFFSET, _PLAIN_COST = 3, 4, 5  # of binary16 if asked for
_SCALE, _OFFSET, _COST = 6, 7, 8  # the best found
_RAISED, _LOWERED, _END_LOW, _END_HIGH = 9, 12, 15, 16  # greedy: two trials, and where it stands
_LINES = 17


@compiled(nogil=True)
def code_sums(units: int, dim: int, slope: Any, shift: Any, top: Any) -> Any:
    """Sums over a row's codes c and values u in units: of c, of c · u, of c²."""
    zero = spread(_ZERO)
    codes, products, squares = zero, zero, zero
    for k in range(dim):
        value = load(units + _LINE * k)
        code = rounded(maximum(minimum(value * slope + shift, top), zero))
        codes = codes + code
        products = exact_multiply_add(code, value, products)
        squares = exact_multiply_add(code, code, squares)
    return codes, products, squares


@compiled(nogil=True)
def error_sums(
    values: int, dim: int, scale: Any, offset: Any, per_step: Any, top: Any, unit: Any, largest: Any
) -> Any:
    """Squared errors of rows that are decoded with these parameters, in whole units."""
    zero = spread(_ZERO)
    half = spread(_HALF)
    inverse = spread(_ONE) / scale
    total = zero
    for k in range(dim):
        value = load(values + _LINE * k)
        code = whole(maximum(minimum((value - offset) * inverse + half, top), zero))
        steps = (value - (code * scale + offset)) * per_step
        # An infinite error is the largest one; there is no NaN, since code · scale is finite.
        total = minimum(total + rounded(minimum(steps * steps * unit, largest)), largest)
    return total


@compiled(nogil=True)
def explained(units: int, dim: int, slope: Any, shift: Any, top: Any, total: Any) -> Any:
    """Sums of least squares: of codes, count · covariance and count · variance of the codes, and
    what of the row's squares they explain, 0 where codes do not rise with the values."""
    zero, count = spread(_ZERO), spread(np.float32(dim))
    codes, products, squares = code_sums(units, dim, slope, shift, top)
    along = count * products - codes * total
    square = count * squares - codes * codes
    usable = both(less(zero, square), less(zero, along))
    return codes, along, square, select(usable, along * along / square, zero)


@compiled(nogil=True)
def refitted(
    units: int, dim: int, top: Any, grid: int, candidates: int, nearby: np.float32, refits: int
) -> Any:
    """Slope and shift: the best of the grid, then of the eight around it, then least squares."""
    zero = spread(_ZERO)
    total = zero
    for k in range(dim):
        total = total + load(units + _LINE * k)
    table = carray(pointer(grid), 2 * candidates, np.float32)
    best = zero
    slope, shift = spread(table[0]), spread(table[1])
    for index in range(candidates):
        its_slope, its_shift = spread(table[2 * index]), spread(table[2 * index + 1])
        score = explained(units, dim, its_slope, its_shift, top, total)[3]
        better = less(best, score)
        best = select(better, score, best)
        slope, shift = select(better, its_slope, slope), select(better, its_shift, shift)

    low, high = zero - shift / slope, (top - shift) / slope
    for index in range(9):
        its_low = low + spread(np.float32(nearby * np.float32(index // 3 - 1)))
        its_high = high + spread(np.float32(nearby * np.float32(index % 3 - 1)))
        its_slope = top / (its_high - its_low)
        its_shift = zero - its_low * its_slope
        score = explained(units, dim, its_slope, its_shift, top, total)[3]
        better = less(best, score)
        best = select(better, score, best)
        slope, shift = select(better, its_slope, slope), select(better, its_shift, shift)

    for _ in range(refits):
        codes, along, square, score = explained(units, dim, slope, shift, top, total)
        its_slope = square / along
        start = (total - along / square * codes) / spread(np.float32(dim))
        usable = less(zero, score)
        slope = select(usable, its_slope, slope)
        shift = select(usable, zero - start * its_slope, shift)
    return slope, shift


@compiled(nogil=True)
def cost(values: Any, dim: int, lanes: Any, line: int, levels: np.float32, limits: Any) -> None:
    """Fill line + 2 with what the scale and offset of `line` and line + 1 cost."""
    to = lanes.ctypes.data
    total = error_sums(
        values.ctypes.data, dim, load(to + _LINE * line), load(to + _LINE * (line + 1)),
        load(to + _LINE * _PER_STEP), spread(levels), spread(limits[0]), spread(limits[1]),
    )  # fmt: skip
    store(to + _LINE * (line + 2), total)


@compiled(nogil=True)
def keep_representable(lanes: Any, line: int, halves: Any) -> None:
    """Make the parameters in `line` and line + 1 such as are stored, the plain ones if need be."""
    for lane in range(LANES):
        scale, offset = lanes[line, lane], lanes[line + 1, lane]
        usable = scale >= _TINY and scale <= _FINITE and np.float32(abs(offset)) <= _FINITE
        if usable and halves[lane]:
            scale, offset = binary16.nearest(scale), binary16.nearest(offset)
            usable = scale > _ZERO and scale <= binary16.LARGEST
            usable = usable and np.float32(abs(offset)) <= binary16.LARGEST
        lanes[line, lane] = scale if usable else lanes[_PLAIN_SCALE, lane]
        lanes[line + 1, lane] = offset if usable else lanes[_PLAIN_OFFSET, lane]


@compiled(nogil=True)
def refit_block(
    values: Any, in_units: Any, dim: int, levels: np.float32, fraction: np.float32,
    grid: int, candidates: int, nearby: np.float32, refits: int,
    lanes: Any, halves: Any, limits: Any,
) -> None:  # fmt: skip
    block, units, to = values.ctypes.data, in_units.ctypes.data, lanes.ctypes.data
    step, low = load(to + _LINE * _STEP), load(to + _LINE * _LOW)
    per_step = load(to + _LINE * _PER_STEP)
    unit = spread(fraction)
    half_levels = spread(np.float32(levels * _HALF))
    middle = half_levels * unit
    for k in range(dim):
        steps = (load(block + _LINE * k) - low) * per_step
        store(units + _LINE * k, rounded(steps * unit) - middle)
    slope, shift = refitted(units, dim, spread(levels), grid, candidates, nearby, refits)
    unit_steps = spread(_ONE) / unit
    store(to + _LINE * _SCALE, step * (unit_steps / slope))
    store(to + _LINE * _OFFSET, low + step * (half_levels - shift / slope * unit_steps))
    keep_representable(lanes, _SCALE, halves)
    cost(values, dim, lanes, _SCALE, levels, limits)


@compiled(nogil=True)
def greedy_block(
    values: Any, dim: int, levels: np.float32, bins: int, steps: int,
    lanes: Any, halves: Any, limits: Any,
) -> None:  # fmt: skip
    """Move in the end that costs less, step by step, and keep the best pair of ends seen."""
    for lane in range(LANES):
        low = lanes[_LOW, lane]
        lanes[_END_LOW, lane] = low
        lanes[_END_HIGH, lane] = np.float32(low + np.float32(lanes[_STEP, lane] * levels))
        for part in range(3):
            lanes[_SCALE + part, lane] = lanes[_PLAIN_SCALE + part, lane]
    for _ in range(steps):
        for lane in range(LANES):
            low, high = lanes[_END_LOW, lane], lanes[_END_HIGH, lane]
            move = np.float32(np.float32(lanes[_STEP, lane] * levels) / np.float32(bins))
            raised, lowered = np.float32(low + move), np.float32(high - move)
            lanes[_RAISED, lane] = np.float32(np.float32(high - raised) / levels)
            lanes[_RAISED + 1, lane] = raised
            lanes[_LOWERED, lane] = np.float32(np.float32(lowered - low) / levels)
            lanes[_LOWERED + 1, lane] = low
        for line in (_RAISED, _LOWERED):
            keep_representable(lanes, line, halves)
            cost(values, dim, lanes, line, levels, limits)
        for lane in range(LANES):
            low, high = lanes[_END_LOW, lane], lanes[_END_HIGH, lane]
            move = np.float32(np.float32(lanes[_STEP, lane] * levels) / np.float32(bins))
            if lanes[_RAISED + 2, lane] < lanes[_LOWERED + 2, lane]:
                line = _RAISED
                lanes[_END_LOW, lane] = np.float32(low + move)
            else:
                line = _LOWERED
                lanes[_END_HIGH, lane] = np.float32(high - move)
            if lanes[line + 2, lane] < lanes[_COST, lane]:
                for part in range(3):
                    lanes[_SCALE + part, lane] = lanes[line + part, lane]


@compiled(nogil=True)
def load_row(
    row: int, dim: int, lane: int, levels: np.float32, half: bool, values: Any, lanes: Any,
    halves: Any,
) -> Any:  # fmt: skip
    """Put a row into its lane; its plain scale, offset, exact and wide."""
    low_key, high_key = ends_of_row(row, dim)
    step, low, _, _ = plain_parameters(low_key, high_key, levels, False, False)
    scale, offset, exact, wide = plain_parameters(low_key, high_key, levels, False, half)
    live = scale > _ZERO
    lanes[_STEP, lane] = step if live else _ONE
    lanes[_LOW, lane] = low if live else _ZERO
    lanes[_PER_STEP, lane] = np.float32(_ONE / step) if live else _ONE
    lanes[_PLAIN_SCALE, lane] = scale if live else _ONE
    lanes[_PLAIN_OFFSET, lane] = offset if live else _ZERO
    halves[lane] = half and not wide
    source = carray(pointer(row), dim, np.float32)
    for k in range(dim):
        values[k, lane] = source[k] if live else _ZERO
    return scale, offset, exact, wide


@compiled(nogil=True)
def search_rows(
    rows: int, dim: int, bits: int, half: bool,
    grid: int, candidates: int, nearby: np.float32, refits: int, fraction: np.float32,
    bins: int, steps: int, unit: np.float32, largest: np.float32,
    packed: int, code_bits: int, width: int,
    scales: int, offsets: int, exacts: int, wides: int, start: int, stop: int,
) -> None:  # fmt: skip
    """Quantize rows start … stop by the greedy search if `bins`, else by the refit search."""
    scale_of = carray(pointer(scales), stop, np.float32)
    offset_of = carray(pointer(offsets), stop, np.float32)
    exact_of = carray(pointer(exacts), stop, np.uint8)
    wide_of = carray(pointer(wides), stop, np.uint8)
    levels = np.float32((1 << bits) - 1)
    margin = np.float32(np.float32(dim) * _MARGIN)
    values, in_units = np.empty((dim, LANES), np.float32), np.empty((dim, LANES), np.float32)
    lanes, halves = np.empty((_LINES, LANES), np.float32), np.empty(LANES, np.bool_)
    limits = np.array([unit, largest], np.float32)
    codes = np.empty(dim + CODES_AT_ONCE, np.uint8)

    for first in range(start, stop, LANES):
        for lane in range(LANES):
            i = min(first + lane, stop - 1)  # the last block repeats its last row
            row = rows + 4 * dim * i
            found = load_row(row, dim, lane, levels, half, values, lanes, halves)
            scale_of[i], offset_of[i] = found[0], found[1]
            exact_of[i], wide_of[i] = np.uint8(found[2]), np.uint8(found[3])
        cost(values, dim, lanes, _PLAIN_SCALE, levels, limits)
        if bins:
            greedy_block(values, dim, levels, bins, steps, lanes, halves, limits)
        else:
            refit_block(
                values, in_units, dim, levels, fraction, grid, candidates, nearby, refits,
                lanes, halves, limits,
            )  # fmt: skip
        for lane in range(min(LANES, stop - first)):
            i = first + lane
            live = scale_of[i] > _ZERO
            if live and np.float32(lanes[_COST, lane] + margin) <= lanes[_PLAIN_COST, lane]:
                scale_of[i], offset_of[i] = lanes[_SCALE, lane], lanes[_OFFSET, lane]
            write_row(
                rows + 4 * dim * i, dim, bits, code_bits, scale_of[i], offset_of[i],
                codes, packed + i * width, width, (stop - i) * width,
            )  # fmt: skip
