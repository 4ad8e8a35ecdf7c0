"""How long to leave alone what has failed."""

from __future__ import annotations

from typing import Final

__all__ = ["growing_pause"]

#: Doubled so often, every first pause is longer than the longest. Without a bound the number leaves
#: the range of a float after a thousand failures, which are days of an outage.
_MOST_DOUBLINGS: Final = 20


def growing_pause(failed_before: int, *, first: float, longest: float) -> float:
    """Seconds until the next try: doubled with each failure in a row.

    Args:
        failed_before: how many failures in a row there were before this one.
        first: seconds after the first failure.
        longest: seconds, at most.
    """
    return min(first * 2.0 ** min(failed_before, _MOST_DOUBLINGS), longest)
