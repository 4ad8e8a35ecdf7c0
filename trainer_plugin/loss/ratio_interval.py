"""Bounds the ratio of two means from pairs that come one by one; the bounds hold at every moment.

Who looks at an ordinary confidence interval again and again, and stops when it says what was hoped
for, is wrong far more often than it says. A confidence sequence is right at all moments at once:
with probability `1 - MISS`, none of the intervals of one sequence misses the truth. So one may look
after each pair, and stop for any reason.

**The test.** Let z_1, z_2, … be independent normal values with mean µ and variance σ², both
unknown. With T the t-statistic of the first n values, ν = n - 1, and µ/σ normal with mean 0 and
variance g under the alternative, the Bayes factor against µ = 0 (σ with its invariant prior) is

    e_n = (1 + n·g)^(-1/2) · [ (1 + T²/ν) / (1 + T²/(ν·(1 + n·g))) ]^(n/2)

It depends on the scale-free part of the values only, and under µ = 0 it is a martingale that starts
at 1. By Ville's inequality, the chance that it ever reaches 1/MISS is at most MISS. Solved for T²,
e_n < 1/MISS bounds |mean| by a multiple of the standard error: `most_errors`. (T. L. Lai 1976, "On
confidence sequences"; Wang and Ramdas 2025, "Anytime-valid t-tests and confidence sequences for
Gaussian means with unknown variance".)

**The ratio.** A ratio r of the means of x and y is the one for which z = x - r·y has mean 0. The
interval is the set of all r that the test of z does not reject (as Fieller's interval is for one
moment), which is where a quadratic function is not positive.

**What is assumed**: the pairs are independent, with one distribution for as long as the sequence
goes on, and x - r·y is normal. A pair is a mean over the samples of a batch, so the last is nearly
so. `tests/property/test_loss_bounds.py` measures how often the bounds miss for other distributions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

__all__ = ["MISS", "RatioBounds", "PairSums", "most_errors"]

#: The chance that a sequence ever misses the ratio.
MISS: Final = 0.05
#: Variance of mean/deviation under the alternative. The bounds are tightest, in comparison with
#: those of other variances, after some 8/0.25 = 32 pairs.
_SPREAD: Final = 0.25


class RatioBounds(NamedTuple):
    """Bounds of a ratio; infinite if nothing is known.

    Attributes:
        low, high: the bounds, low <= high.
    """

    low: float
    high: float


_UNKNOWN: Final = RatioBounds(-math.inf, math.inf)


def most_errors(pairs: int) -> float:
    """Return by how many standard errors the mean of n values may differ from 0, at any n.

    Args:
        pairs: n.

    Returns:
        Infinity for small n: no difference would be too large.
    """
    if pairs < 2:
        return math.inf
    growth = 1.0 + pairs * _SPREAD
    # e_n = 1/MISS, raised to 2/n: the quotient in brackets.
    quotient = (math.sqrt(growth) / MISS) ** (2.0 / pairs)
    if quotient >= growth:
        return math.inf
    return math.sqrt((pairs - 1) * (quotient - 1.0) / (1.0 - quotient / growth))


@dataclass(kw_only=True)
class PairSums:
    """Sums of pairs (x, y), of which bounds of mean(x) / mean(y) are computed.

    Attributes:
        pairs: number of pairs.
        x, y: sums of the values.
        xx, xy, yy: sums of their products.
    """

    pairs: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0

    def add(self, x: float, y: float) -> None:
        """Add a pair of finite values."""
        self.pairs += 1
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y
        self.yy += y * y

    def merge(self, sums: PairSums) -> None:
        """Add all pairs of other sums."""
        self.pairs += sums.pairs
        self.x += sums.x
        self.y += sums.y
        self.xx += sums.xx
        self.xy += sums.xy
        self.yy += sums.yy

    @property
    def ratio(self) -> float | None:
        """The ratio of the means; None: there is none."""
        return self.x / self.y if self.pairs and self.y else None

    def bounds(self) -> RatioBounds:
        """Return bounds of the ratio of the true means; they may be looked at after each pair."""
        errors = most_errors(self.pairs)
        if math.isinf(errors):
            return _UNKNOWN
        n = self.pairs
        mean_x, mean_y = self.x / n, self.y / n
        # Variances of the means. Rounding must not make one negative.
        var_x = max(self.xx / n - mean_x * mean_x, 0.0) / (n - 1)
        var_y = max(self.yy / n - mean_y * mean_y, 0.0) / (n - 1)
        cov = (self.xy / n - mean_x * mean_y) / (n - 1)
        squared = errors * errors
        # (mean_x - r·mean_y)² <= squared · (var_x - 2·r·cov + r²·var_y), as a·r² - 2·b·r + c <= 0.
        a = mean_y * mean_y - squared * var_y
        b = mean_x * mean_y - squared * cov
        c = mean_x * mean_x - squared * var_x
        if a <= 0.0:
            return _UNKNOWN  # the mean of y may be 0
        root = math.sqrt(max(b * b - a * c, 0.0))
        return RatioBounds((b - root) / a, (b + root) / a)
