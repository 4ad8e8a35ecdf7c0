"""How often something took how long, in buckets: what a monitoring system can add up over hosts."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple

__all__ = ["SECONDS", "Histogram", "HistogramReading"]

#: From a copy of a few rows to an object store on a bad day: ten buckets a factor of a thousand
#: would be finer than anybody reads, three a factor of ten tell 0.2 s from 0.5 s.
SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class HistogramReading(NamedTuple):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds of the buckets, inclusive, ascending, without infinity.
        counts: values of each bucket alone, and last those above all bounds.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values; one thread at a time adds, any thread reads, and neither waits.

    A reading made while a value is added may miss it in the sum: a monitoring system reads again.
    """

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        """Count `value`."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def read(self) -> HistogramReading:
        """What has been counted."""
        return HistogramReading(self._bounds, tuple(self._counts), self._total)
