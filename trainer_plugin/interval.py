"""How long to wait from one checkpoint to the next, from what one costs and a failure costs. Pure.

Young's first-order optimum (CACM 1974; Daly, FGCS 2006, adds terms that vanish where a checkpoint
takes far less than the time between failures, as a stall does).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recpoint.trainer_plugin.failures import Rate

__all__ = ["ASSUMED_HOURS", "FIRST_SECONDS", "MAX_SECONDS", "MIN_SECONDS", "Interval", "choose"]

#: Until a checkpoint has been measured: soon, so that one is.
FIRST_SECONDS = 60.0

#: Nobody gains from checkpoints closer than this, or should lose more than an hour to a failure.
MIN_SECONDS = 10.0
MAX_SECONDS = 3_600.0

#: Before a job has a past, one failure in a day.
ASSUMED_HOURS = 24.0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Seconds from one checkpoint to the next, and why."""

    seconds: float
    reason: str


def choose(rate: Rate, *, stall_seconds: float | None, persist_seconds: float | None) -> Interval:
    """sqrt(2 · stall / failure rate), or as long as a checkpoint takes to be committed, where that
    is longer, since two do not overlap; within `MIN_SECONDS` and `MAX_SECONDS`.

    A store that takes longer than `MAX_SECONDS` still gets a checkpoint as soon as it has stored
    the one before: what is due meanwhile is taken late.

    Args:
        rate: failures of the job.
        stall_seconds: how long training waits for a checkpoint; None: not measured yet.
        persist_seconds: how long the agent takes to commit one; None: not measured yet.
    """
    why = f"{rate.per_hour:.3g} failures an hour ({rate.source})"
    if stall_seconds is None:
        seconds, why = FIRST_SECONDS, "no checkpoint has been measured yet"
    else:
        per_second = rate.per_hour / 3_600
        optimum = math.sqrt(2 * stall_seconds / per_second) if per_second > 0 else math.inf
        seconds = min(max(optimum, MIN_SECONDS), MAX_SECONDS)
        why = f"a stall of {1e3 * stall_seconds:.3g} ms, {why}"
        if seconds != optimum:
            why += f": {optimum:.3g} s is outside {MIN_SECONDS:g} to {MAX_SECONDS:g} s"
    if persist_seconds is not None and persist_seconds > seconds:
        seconds = min(persist_seconds, MAX_SECONDS)
        why += f"; a checkpoint takes {persist_seconds:.3g} s to be committed"
        if seconds != persist_seconds:
            why += f", more than the longest interval of {MAX_SECONDS:g} s"
    return Interval(seconds=seconds, reason=why)
