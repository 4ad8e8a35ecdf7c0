"""Counts failures by class and durations in buckets, so that figures of many hosts can be added.

The classes of failures are few and fixed, so that they can be the values of a metric's label; the
message has the details.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, NamedTuple

from recpoint import errors

__all__ = [
    "CAUSES",
    "Histogram",
    "HistogramReading",
    "SECONDS",
    "cause_of",
    "cause_of_name",
]


#: Most specific class first.
_BY_CLASS: Final[tuple[tuple[type[BaseException], str], ...]] = (
    (errors.StoreUnavailable, "store_unavailable"),
    (errors.StoreThrottled, "store_throttled"),
    (errors.StoreAccessDenied, "store_denied"),
    (errors.StoreFull, "store_full"),
    (errors.StoreError, "store"),
    (errors.NothingToRestore, "run_missing"),
    (errors.StagingFull, "staging_full"),
    (errors.StagingError, "staging"),
    (errors.RecordTooLarge, "too_large"),
    (errors.FormatError, "damaged"),
    (errors.ChainError, "chain_broken"),
    (errors.CommitError, "superseded"),
    (errors.CheckpointCancelled, "cancelled"),
    (MemoryError, "memory"),
    (OSError, "host"),
)
_OTHER: Final = "other"

#: All classes.
CAUSES: Final = (*(cause for _, cause in _BY_CLASS), _OTHER)


def cause_of(error: BaseException) -> str:
    """Return the class of an error."""
    return _cause(type(error))


def cause_of_name(error_type: str) -> str:
    """Return the class of an error from its recpoint exception class's name, as in outcomes."""
    found = getattr(errors, error_type, None) if error_type in errors.__all__ else None
    return _cause(found) if isinstance(found, type) else _OTHER


def _cause(kind: type[BaseException]) -> str:
    return next((cause for base, cause in _BY_CLASS if issubclass(kind, base)), _OTHER)


#: Bucket bounds in seconds, from a copy of a few rows to an object store on a bad day. Three for
#: each factor of ten tell 0.2 s from 0.5 s; nobody needs finer ones.
SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class HistogramReading(NamedTuple):
    """A histogram at one moment.

    Attributes:
        bounds: upper bounds of the buckets, inclusive, ascending, without infinity.
        counts: number of values in each bucket alone; the last is the number above all bounds.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values; one thread at a time adds, any thread reads, and neither waits.

    A reading during an `add` may miss the value in the sum. That is harmless, because a monitoring
    system reads again.
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
        """Return the counts so far."""
        return HistogramReading(self._bounds, tuple(self._counts), self._total)
