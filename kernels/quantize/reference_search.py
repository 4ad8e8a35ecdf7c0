"""The searches, written with whole-matrix operations; sums are exact, so in any order the same."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.quantize import grid
from recpoint.kernels.quantize.method import Method

__all__ = ["cost", "found_parameters"]

_TINY = 2.0**-126


def found_parameters(
    rows: Tensor,
    bits: int,
    method: Method,
    plain: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    halves: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scale and offset, f32 [n], of rows f32 [n, dim] that are neither constant nor exact.

    Args:
        rows: finite, not constant.
        bits: one of `BITS`.
        method: one that searches.
        plain: scale and offset by the row's ends, of binary32.
        stored: the same as they would be stored.
        halves: bool [n], whether parameters have to be of binary16.
    """
    dim = rows.shape[1]
    if method.name == "greedy":
        if dim > grid.LARGEST_DIM:
            return stored
        searched = _greedy(rows, bits, method, plain, stored, halves)
    else:
        if not grid.fraction_bits(dim, bits):
            return stored
        searched = _stored(*_refit(rows, bits, method, *plain), stored, halves)
    margin = torch.tensor(1.25 * dim, dtype=torch.float32, device="cpu")
    better = cost(rows, bits, *searched, plain[0]) + margin <= cost(rows, bits, *stored, plain[0])
    return torch.where(better, searched[0], stored[0]), torch.where(better, searched[1], stored[1])


def cost(rows: Tensor, bits: int, scale: Tensor, offset: Tensor, step: Tensor) -> Tensor:
    """Squared errors in units of step² / `grid.error_unit`, each rounded, up to a largest sum."""
    dim, largest = rows.shape[1], float(grid.largest_error(rows.shape[1]))
    places = (rows - offset[:, None]) * (1.0 / scale)[:, None] + 0.5
    codes = places.clamp(0.0, float(2**bits - 1)).trunc()
    product = codes * scale[:, None]
    steps = (rows - (product + offset[:, None])) * (1.0 / step)[:, None]
    units = (steps * steps * float(grid.error_unit(dim))).clamp(max=largest).round()
    return units.double().sum(dim=1).clamp(max=largest).float()


def _stored(
    scale: Tensor, offset: Tensor, stored: tuple[Tensor, Tensor], halves: Tensor
) -> tuple[Tensor, Tensor]:
    """The parameters as they are stored; the plain ones where they cannot be."""
    usable = (scale >= _TINY) & scale.isfinite() & offset.isfinite()
    half_scale, half_offset = scale.half().float(), offset.half().float()
    fit = (half_scale > 0) & half_scale.isfinite() & half_offset.isfinite()
    usable &= fit | ~halves
    scale = torch.where(halves, half_scale, scale)
    offset = torch.where(halves, half_offset, offset)
    return torch.where(usable, scale, stored[0]), torch.where(usable, offset, stored[1])


def _refit(
    rows: Tensor, bits: int, method: Method, step: Tensor, low: Tensor
) -> tuple[Tensor, Tensor]:
    dim = rows.shape[1]
    top = torch.tensor(float(2**bits - 1), dtype=torch.float32, device="cpu")
    unit = torch.tensor(
        float(1 << grid.fraction_bits(dim, bits)), dtype=torch.float32, device="cpu"
    )
    middle = top * 0.5 * unit
    steps = (rows - low[:, None]) * (1.0 / step)[:, None]
    units = (steps * unit).round() - middle
    sums = _Sums(units, top)

    slope, shift = torch.ones_like(step), torch.zeros_like(step)
    best = torch.zeros_like(step)
    table = torch.from_numpy(grid.candidates(dim, bits, method.bins).copy())
    slope, shift = table[0, 0].expand_as(step), table[0, 1].expand_as(step)

    def consider(its_slope: Tensor, its_shift: Tensor) -> None:
        nonlocal best, slope, shift
        score = sums.of(its_slope, its_shift)[3]
        better = best < score
        best = torch.where(better, score, best)
        slope, shift = torch.where(better, its_slope, slope), torch.where(better, its_shift, shift)

    if method.bins:
        for its_slope, its_shift in table:
            consider(its_slope.expand_as(step), its_shift.expand_as(step))
    nearby = torch.tensor(
        grid.half_spacing(dim, bits, method.bins), dtype=torch.float32, device="cpu"
    )
    first, last = 0.0 - shift / slope, (top - shift) / slope
    for raised in (-1.0, 0.0, 1.0) if method.bins else ():
        for lowered in (-1.0, 0.0, 1.0):
            start = first + nearby * raised
            its_slope = top / (last + nearby * lowered - start)
            consider(its_slope, 0.0 - start * its_slope)
    for _ in range(method.refits):
        codes, along, square, score = sums.of(slope, shift)
        its_slope = square / along
        start = (sums.total - along / square * codes) / float(dim)
        slope = torch.where(score > 0, its_slope, slope)
        shift = torch.where(score > 0, 0.0 - start * its_slope, shift)
    if method.levelings:
        slope, shift = _leveled(sums, slope, shift, grid.coarser(dim, bits), method.levelings)
    unit_steps = 1.0 / unit
    return step * (unit_steps / slope), low + step * (top * 0.5 - shift / slope * unit_steps)


def _leveled(
    sums: _Sums, slope: Tensor, shift: Tensor, coarser: float, times: int
) -> tuple[Tensor, Tensor]:
    """Fit codes to values, so that rows of errors have no part along their rows of values."""
    count = float(sums.units.shape[1])
    values = (sums.units * coarser).round()
    sum_of_values, squares = values.sum(dim=1), (values * values).sum(dim=1)
    own = (count * squares - sum_of_values * sum_of_values) * (1.0 / coarser) * (1.0 / coarser)
    for _ in range(times):
        codes, along, _, score = sums.of(slope, shift)
        usable = (score > 0) & (own > 0)
        fitted_slope = along / own
        slope = torch.where(usable, fitted_slope, slope)
        shift = torch.where(usable, (codes - fitted_slope * sums.total) / count, shift)
    return slope, shift


class _Sums:
    def __init__(self, units: Tensor, top: Tensor) -> None:
        self.units, self.top = units, top
        self.total = units.sum(dim=1)

    def of(self, slope: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums of least squares for the codes of a slope and shift, each f32 [n]."""
        places = self.units * slope[:, None] + shift[:, None]
        # NaN comes of no row's best candidate; as the fast versions take it, it is the top code.
        codes = torch.where(places < self.top, places, self.top).clamp(min=0.0).round()
        count = float(self.units.shape[1])
        sums, products = codes.sum(dim=1), (codes * self.units).sum(dim=1)
        squares = (codes * codes).sum(dim=1)
        along = count * products - sums * self.total
        square = count * squares - sums * sums
        usable = (square > 0) & (along > 0)
        score = torch.where(usable, along * along / square, torch.zeros_like(square))
        return sums, along, square, score


def _greedy(
    rows: Tensor,
    bits: int,
    method: Method,
    plain: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    halves: Tensor,
) -> tuple[Tensor, Tensor]:
    step, low = plain
    levels = torch.tensor(float(2**bits - 1), dtype=torch.float32, device="cpu")
    high = low + step * levels
    move = step * levels / float(method.bins)
    best, best_cost = stored, cost(rows, bits, *stored, step)
    for _ in range(grid.greedy_steps(method.bins, method.ratio_permille)):
        raised, lowered = low + move, high - move
        up = _stored((high - raised) / levels, raised, stored, halves)
        down = _stored((lowered - low) / levels, low, stored, halves)
        up_cost, down_cost = cost(rows, bits, *up, step), cost(rows, bits, *down, step)
        take_up = up_cost < down_cost
        low, high = torch.where(take_up, raised, low), torch.where(take_up, high, lowered)
        now = tuple(torch.where(take_up, a, b) for a, b in zip(up, down, strict=True))
        now_cost = torch.where(take_up, up_cost, down_cost)
        better = now_cost < best_cost
        best_cost = torch.where(better, now_cost, best_cost)
        best = torch.where(better, now[0], best[0]), torch.where(better, now[1], best[1])
    return best
