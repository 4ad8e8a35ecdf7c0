"""What more bits promise: a bound, always; a smaller error only where grids are nested."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recpoint.kernels import quantize
from recpoint.kernels.bit_packing import BITS
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, default_method

#: Relative error of one rounding to binary32.
ROUNDING = 2.0**-24


@st.composite
def finite_rows(draw: st.DrawFn) -> Tensor:
    """f32 [n, dim] of one magnitude, or of values that are small multiples of one step."""
    n, dim = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    if draw(st.booleans()):
        exponent = draw(st.integers(-130, 120))
        unit = st.floats(-1, 1, width=32)
        values = draw(st.lists(unit, min_size=n * dim, max_size=n * dim))
        array = (np.array(values, np.float64) * 2.0**exponent).astype(np.float32)
    else:
        step = draw(st.sampled_from([1.0, 1 / 3, 1 / 7, 1e-20, 1e20]))
        codes = draw(st.lists(st.integers(-8, 8), min_size=n * dim, max_size=n * dim))
        array = np.array(codes, np.float32) * np.float32(step)
    return torch.from_numpy(array.reshape(n, dim).copy())


def _errors(rows: Tensor, bits: int, method: Method) -> tuple[Tensor, Tensor, Tensor]:
    """|decoded - value| and the step, f64, and which rows have codes; zeros where one has none."""
    codes, scale, offset, exact, _ = quantize.quantize(rows, bits, method)
    decoded = quantize.dequantize(codes, scale, offset).double()
    errors = torch.where(exact[:, None], 0.0, (decoded - rows.double()).abs())
    return errors, torch.where(exact, 0.0, scale.double()), ~exact


def _unit(rows: Tensor, method: Method) -> Tensor:
    """f64 [n, 1]: the greater of a row's span and its largest magnitude, times one rounding.

    The span as the method sees it: that of `symmetric` is twice the largest magnitude.
    """
    values = rows.double()
    largest = values.abs().amax(dim=1)
    span = values.amax(dim=1) - values.amin(dim=1)
    span = 2 * largest if method.name == "symmetric" else span
    return torch.maximum(span, largest)[:, None] * ROUNDING


@settings(deadline=None)
@given(finite_rows(), st.sampled_from([ASYMMETRIC, SYMMETRIC]))
def test_half_a_step_bounds_the_error_and_shrinks_with_every_bit(
    rows: Tensor, method: Method
) -> None:
    """The step is span / (2^bits - 1), rounded; rounding keeps the order. So a row's errors lie
    within half of its own step and within half of that of each lesser width, of which it is the
    former that shrinks: the error itself may well grow with the width, see below."""
    errors_by_width = {bits: _errors(rows, bits, method) for bits in BITS}
    for bits, (errors, _, coded) in errors_by_width.items():
        for fewer in [width for width in BITS if width <= bits]:
            _, step, also = errors_by_width[fewer]
            both = coded & also
            assert (errors_by_width[bits][1][both] <= step[both]).all()
            bound = step[:, None] / 2 + 4 * _unit(rows, method)
            assert (errors <= bound)[both].all()
        # A range that is too small for few levels is so for many: such a row stays exact.
        assert all((coded <= errors_by_width[fewer][2]).all() for fewer in BITS if fewer < bits)


@settings(deadline=None)
@given(finite_rows())
def test_the_default_method_keeps_the_bound_of_each_lesser_width(rows: Tensor) -> None:
    """A search's squared error of a row is at most that of the plain parameters of its width, and
    that is within the plain bound of every lesser width. Between the searches of two widths nothing
    is promised: the one of fewer bits may have found a grid on which the row's values lie."""
    n = rows.shape[1]
    plain = {bits: _errors(rows, bits, ASYMMETRIC) for bits in BITS}
    for bits in BITS:
        errors, _, coded = _errors(rows, bits, default_method(bits))
        for fewer in [width for width in BITS if width <= bits]:
            bound = plain[fewer][1] / 2 + 4 * _unit(rows, ASYMMETRIC)[:, 0]
            both = coded & plain[fewer][2]
            root = errors.square().sum(dim=1).sqrt()  # in f64 no square vanishes or overflows
            assert (root <= bound * n**0.5 * (1 + 1e-6))[both].all()


@settings(deadline=None)
@given(finite_rows(), st.sampled_from([ASYMMETRIC, SYMMETRIC]))
def test_the_error_of_no_value_grows_from_2_to_4_to_8_bits(rows: Tensor, method: Method) -> None:
    """3 divides 15 and 15 divides 255, so the 2-bit grid between two ends lies on the 4-bit grid,
    and that on the 8-bit grid: the next point of the finer one is no further away.

    Only rounding can make it so. With u = 2^-24, S the span and M the largest magnitude, a point of
    a grid is off by 3uS (span, scale, product) + uM (sum); and a code is that of the next point, or
    of one that is further by 12uS: the place of a value in steps is a product of five rounded terms
    and a sum, 6u times at most 2^bits - 1 off, which misleads twice where it misleads. That is
    15uS + uM for the finer grid and 3uS + uM for the coarser, at most 20u times the greater."""
    errors_by_width = [_errors(rows, bits, method) for bits in (2, 4, 8)]
    for (coarse, _, coded), (fine, _, also) in itertools.pairwise(errors_by_width):
        both = coded & also
        assert (fine <= coarse + 20.01 * _unit(rows, method))[both].all()


def test_from_2_to_3_bits_an_error_can_grow() -> None:
    """The grids of 3 and of 7 steps share their ends alone: why no more than bounds is promised."""
    row = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for method in (ASYMMETRIC, default_method(2)):
        assert not _errors(row, 2, method)[0].any()
    assert (_errors(row, 3, ASYMMETRIC)[0][0, 1:3] > 0.1).all()
    assert (_errors(row, 3, default_method(3))[0].square().sum() > 0).all()
