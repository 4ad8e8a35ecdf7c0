"""The searches on a GPU, with the operations of `reference_search.py` in their order.

A row stays in registers while all candidates are tried. Sums are of integers that are exact, so
that the order in which threads add them changes nothing, and the parameters found are those that
every other implementation finds.
"""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["greedy_parameters", "refit_parameters"]


@triton.jit
def _rounded(x):
    """To the nearest integer, ties to the even one, for 0 <= x <= 2^23."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _rounded_signed(x):
    """The same for magnitudes below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _cost(
    x, real, scale, offset, per_step, LEVELS: tl.constexpr, UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Squared errors in units, up to a largest sum: f32 [ROWS]."""
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    place = tl.minimum(
        tl.maximum((x - offset[:, None]) * inverse[:, None] + 0.5, 0.0), LEVELS * 1.0
    )
    product = place.to(tl.int32).to(tl.float32) * scale[:, None]
    steps = (x - (product + offset[:, None])) * per_step[:, None]
    units = _rounded(tl.minimum(steps * steps * UNIT, LARGEST * 1.0))
    total = tl.sum(tl.where(real, units, 0.0).to(tl.int64), axis=1)
    return tl.minimum(total, LARGEST).to(tl.float32)


@triton.jit
def _as_stored(scale, offset, stored_scale, stored_offset, halves):
    """The parameters as they are stored; the plain ones where they cannot be."""
    infinity = float("inf")
    usable = (scale >= 1.1754943508222875e-38) & (scale < infinity) & (tl.abs(offset) < infinity)
    half_scale = tl.where(usable, scale, 0.0).to(tl.float16).to(tl.float32)
    half_offset = tl.where(usable, offset, 0.0).to(tl.float16).to(tl.float32)
    fit = (half_scale > 0.0) & (half_scale < infinity) & (tl.abs(half_offset) < infinity)
    usable = usable & (fit | (halves == 0))
    scale = tl.where(halves, half_scale, scale)
    offset = tl.where(halves, half_offset, offset)
    return tl.where(usable, scale, stored_scale), tl.where(usable, offset, stored_offset)


@triton.jit
def _explained(units, real, total, slope, shift, DIM: tl.constexpr, LEVELS: tl.constexpr):
    """Sums of least squares for the codes of a slope and shift, and the score: f32 [ROWS] each."""
    place = units * slope[:, None] + shift[:, None]
    place = tl.where(place < LEVELS * 1.0, place, LEVELS * 1.0)
    code = tl.where(real, _rounded(tl.where(place > 0.0, place, 0.0)), 0.0)
    codes = tl.sum(code, axis=1)
    products = tl.sum(code * units, axis=1)
    squares = tl.sum(code * code, axis=1)
    along = products * (DIM * 1.0) - codes * total
    square = squares * (DIM * 1.0) - codes * codes
    usable = (square > 0.0) & (along > 0.0)
    score = tl.div_rn(along * along, tl.where(usable, square, 1.0))
    return codes, along, square, tl.where(usable, score, 0.0)


@triton.jit
def _better(units, real, total, slope, shift, best, its_slope, its_shift, DIM, LEVELS):
    score = _explained(units, real, total, its_slope, its_shift, DIM, LEVELS)[3]
    better = best < score
    slope = tl.where(better, its_slope, slope)
    shift = tl.where(better, its_shift, shift)
    return slope, shift, tl.where(better, score, best)


@triton.jit
def refit_parameters(
    x, real, step, low, stored_scale, stored_offset, halves, grid, nearby,
    DIM: tl.constexpr, LEVELS: tl.constexpr, FRACTION: tl.constexpr, CANDIDATES: tl.constexpr,
    REFITS: tl.constexpr, LEVELINGS: tl.constexpr, COARSER: tl.constexpr, UNIT: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Scale and offset by a grid, a finer one around its best, and least squares.

    Args:
        x: f32 [ROWS, COLUMNS]; real: which of the columns the row has.
        step, low: f32 [ROWS], the plain scale and offset; 1 and 0 for rows without codes.
        stored_scale, stored_offset: the same as they would be stored.
        halves: bool [ROWS], whether parameters have to be of binary16.
        grid: f32 [CANDIDATES, 2]; [1, 2] if CANDIDATES is 0, where least squares begin.
    """
    ones = tl.full(step.shape, 1.0, tl.float32)
    per_step = tl.div_rn(ones, step)
    places = (x - low[:, None]) * per_step[:, None] * FRACTION
    units = tl.where(real, _rounded_signed(places) - LEVELS * 0.5 * FRACTION, 0.0)
    total = tl.sum(units, axis=1)

    best = ones * 0.0
    slope = ones * tl.load(grid)
    shift = ones * tl.load(grid + 1)
    for number in range(CANDIDATES):
        its_slope = ones * tl.load(grid + 2 * number)
        its_shift = ones * tl.load(grid + 2 * number + 1)
        slope, shift, best = _better(
            units, real, total, slope, shift, best, its_slope, its_shift, DIM, LEVELS
        )
    top = ones * LEVELS
    first = 0.0 - tl.div_rn(shift, slope)
    last = tl.div_rn(top - shift, slope)
    for number in range(9 if CANDIDATES > 0 else 0):
        start = first + nearby * (number // 3 - 1)
        its_slope = tl.div_rn(top, last + nearby * (number % 3 - 1) - start)
        slope, shift, best = _better(
            units, real, total, slope, shift, best, its_slope, 0.0 - start * its_slope, DIM, LEVELS
        )
    for _ in range(REFITS):
        codes, along, square, score = _explained(units, real, total, slope, shift, DIM, LEVELS)
        usable = score > 0.0
        along = tl.where(usable, along, 1.0)
        square = tl.where(usable, square, 1.0)
        its_slope = tl.div_rn(square, along)
        start = tl.div_rn(total - tl.div_rn(along, square) * codes, ones * DIM)
        slope = tl.where(usable, its_slope, slope)
        shift = tl.where(usable, 0.0 - start * its_slope, shift)

    if LEVELINGS > 0:
        values = _rounded_signed(units * COARSER)
        sums = tl.sum(values, axis=1)
        squares = tl.sum(values * values, axis=1)
        own = (squares * (DIM * 1.0) - sums * sums) * (1.0 / COARSER) * (1.0 / COARSER)
        for _ in range(LEVELINGS):
            codes, along, square, score = _explained(units, real, total, slope, shift, DIM, LEVELS)
            usable = (score > 0.0) & (own > 0.0)
            its_slope = tl.div_rn(along, tl.where(usable, own, 1.0))
            its_shift = tl.div_rn(codes - its_slope * total, ones * DIM)
            slope = tl.where(usable, its_slope, slope)
            shift = tl.where(usable, its_shift, shift)

    scale = step * tl.div_rn(ones * (1.0 / FRACTION), slope)
    offset = low + step * (LEVELS * 0.5 - tl.div_rn(shift, slope) * (1.0 / FRACTION))
    scale, offset = _as_stored(scale, offset, stored_scale, stored_offset, halves)
    cost = _cost(x, real, scale, offset, per_step, LEVELS, UNIT, LARGEST)
    plain = _cost(x, real, stored_scale, stored_offset, per_step, LEVELS, UNIT, LARGEST)
    improves = cost + 1.25 * DIM <= plain
    return tl.where(improves, scale, stored_scale), tl.where(improves, offset, stored_offset)


@triton.jit
def greedy_parameters(
    x, real, step, low, stored_scale, stored_offset, halves,
    DIM: tl.constexpr, LEVELS: tl.constexpr, BINS: tl.constexpr, STEPS: tl.constexpr,
    UNIT: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Scale and offset by moving in the end that costs less; arguments as above."""
    ones = tl.full(step.shape, 1.0, tl.float32)
    per_step = tl.div_rn(ones, step)
    levels = ones * LEVELS
    high = low + step * levels
    move = tl.div_rn(step * levels, ones * BINS)
    plain = _cost(x, real, stored_scale, stored_offset, per_step, LEVELS, UNIT, LARGEST)
    scale, offset, best = stored_scale, stored_offset, plain
    for _ in range(STEPS):
        raised, lowered = low + move, high - move
        up_scale, up_offset = _as_stored(
            tl.div_rn(high - raised, levels), raised, stored_scale, stored_offset, halves
        )
        down_scale, down_offset = _as_stored(
            tl.div_rn(lowered - low, levels), low, stored_scale, stored_offset, halves
        )
        up = _cost(x, real, up_scale, up_offset, per_step, LEVELS, UNIT, LARGEST)
        down = _cost(x, real, down_scale, down_offset, per_step, LEVELS, UNIT, LARGEST)
        take_up = up < down
        low = tl.where(take_up, raised, low)
        high = tl.where(take_up, high, lowered)
        cost = tl.where(take_up, up, down)
        better = cost < best
        scale = tl.where(better, tl.where(take_up, up_scale, down_scale), scale)
        offset = tl.where(better, tl.where(take_up, up_offset, down_offset), offset)
        best = tl.where(better, cost, best)
    improves = best + 1.25 * DIM <= plain
    return tl.where(improves, scale, stored_scale), tl.where(improves, offset, stored_offset)
