"""The bounds of a ratio hold at every moment, whoever looks at them and stops when he likes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recpoint.trainer_plugin.loss.ratio_interval import MISS, PairSums, most_errors

Draw = Callable[[np.random.Generator, int], np.ndarray]


def _normal(chance: np.random.Generator, count: int) -> np.ndarray:
    return chance.standard_normal(count)


def _skewed(chance: np.random.Generator, count: int) -> np.ndarray:
    """Draw damages as they are: a mean of squares over the 64 samples of a small batch."""
    squares: np.ndarray = chance.chisquare(1, (count, 64)).mean(axis=1)
    return (squares - 1) * math.sqrt(32)


def misses(draw: Draw, *, ratio: float, streams: int, pairs: int, seed: int) -> float:
    """Return the share of streams of which any interval misses the ratio."""
    chance = np.random.default_rng(seed)
    missed = 0
    for _ in range(streams):
        y = 0.5 + 0.05 * chance.standard_normal(pairs)
        x = ratio * y + 1e-5 * draw(chance, pairs)
        sums = PairSums()
        for pair in zip(x.tolist(), y.tolist(), strict=True):
            sums.add(*pair)
            bounds = sums.bounds()
            if not bounds.low <= ratio <= bounds.high:
                missed += 1
                break
    return missed / streams


def _most(streams: int) -> float:
    """Return the share that five standard deviations of chance would explain."""
    return MISS + 5 * math.sqrt(MISS * (1 - MISS) / streams)


@pytest.mark.parametrize("ratio", (0.0, 2e-5, -3e-4))
def test_no_interval_of_a_stream_misses_the_ratio(ratio: float) -> None:
    assert misses(_normal, ratio=ratio, streams=60, pairs=120, seed=3) <= _most(60)


@pytest.mark.nightly("bounds")
@pytest.mark.parametrize("draw", (_normal, _skewed))
@pytest.mark.parametrize("ratio", (0.0, 1e-4))
def test_bounds_hold_over_thousands_of_looks(draw: Draw, ratio: float) -> None:
    assert misses(draw, ratio=ratio, streams=1_500, pairs=600, seed=11) <= _most(1_500)


def test_an_ordinary_interval_would_miss_far_more_often() -> None:
    chance = np.random.default_rng(5)
    values = chance.standard_normal((200, 400)).cumsum(axis=1)
    counts = np.arange(1, 401)
    missed = (np.abs(values) > 1.96 * np.sqrt(counts))[:, 10:].any(axis=1).mean()
    assert missed > 4 * MISS  # so the test above can fail


@given(scale=st.floats(1e-8, 1e8), seed=st.integers(0, 1 << 30), pairs=st.integers(8, 60))
def test_bounds_follow_the_unit_of_the_values(scale: float, seed: int, pairs: int) -> None:
    chance = np.random.default_rng(seed)
    plain, scaled = PairSums(), PairSums()
    for x, y in zip(chance.normal(1e-5, 1e-5, pairs), chance.normal(0.5, 0.05, pairs), strict=True):
        plain.add(float(x), float(y))
        scaled.add(float(x) * scale, float(y) * scale)
    for bound, scaled_bound in zip(plain.bounds(), scaled.bounds(), strict=True):
        assert scaled_bound == pytest.approx(bound, rel=1e-6, abs=1e-12)


@given(st.integers(0, 5_000))
def test_more_pairs_allow_no_larger_share_of_the_deviation(pairs: int) -> None:
    def share(n: int) -> float:
        errors = most_errors(n)
        return math.inf if math.isinf(errors) else errors / math.sqrt(n)

    assert share(pairs + 1) <= share(pairs)


def test_bounds_are_known_after_a_few_pairs_and_close_in() -> None:
    sums = PairSums()
    chance = np.random.default_rng(7)
    widths = {}
    assert sums.ratio is None and math.isinf(sums.bounds().high)
    for number in range(1, 2_001):
        sums.add(float(chance.normal(5e-5, 2e-5)), 0.5)
        low, high = sums.bounds()
        widths[number] = high - low
        if not math.isinf(high):
            assert sums.ratio is not None and low <= sums.ratio <= high
    assert math.isinf(widths[4]) and not math.isinf(widths[10])
    # A law of the iterated logarithm: some three standard errors, which are 4e-5 / sqrt(n).
    assert widths[2_000] < 2 * 4.0 * 4e-5 / math.sqrt(2_000)


def test_a_mean_that_may_be_zero_bounds_nothing() -> None:
    sums = PairSums()
    for sign in (1.0, -1.0) * 20:
        sums.add(0.1, sign)
    assert (sums.bounds().low, sums.bounds().high) == (-math.inf, math.inf)


def test_equal_pairs_give_the_ratio_itself() -> None:
    sums = PairSums()
    for _ in range(20):
        sums.add(0.25, 0.5)
    assert sums.bounds() == (0.5, 0.5)
