"""Schedules checkpoints: the interval, and the batch at which the next one is due."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from recpoint.trainer_plugin.settings import Rate

__all__ = [
    "ASSUMED_HOURS",
    "AutoInterval",
    "BatchInterval",
    "FIRST_SECONDS",
    "Interval",
    "MAX_SECONDS",
    "MIN_SECONDS",
    "Schedule",
    "SecondsInterval",
    "choose",
]


# How long to wait from one checkpoint to the next, from what one costs and a failure costs. Pure.
#
# Young's first-order optimum (CACM 1974; Daly, FGCS 2006, adds terms that vanish where a checkpoint
# takes far less than the time between failures, as a stall does).


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


# When the next checkpoint is due, as a number of batches the reader can be told.
#
# Pure: the clock's readings are arguments.


#: Into so many parts an interval is divided where it is not granted at once.
_PARTS = 8

_FIRST_GRANT = 1
#: A grant is at most so many times the batches that were measured: what is known of their time.
_GROWTH = 2


class Schedule(Protocol):
    """Grants batches; a decision is made when a grant is used up, or at `due_seconds`."""

    @property
    def due_seconds(self) -> float:
        """When the interval is over, on the clock of the calls, for whoever can decide at any
        batch; infinite where batches alone decide.
        """

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """A checkpoint was taken (or training starts): batches until the next decision.

        Args:
            now_seconds: of a clock that only grows.
            in_parts: grant no more than an eighth of the interval at once.
        """

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """`batches` were trained since the last call: more batches, or 0: checkpoint now."""


class BatchInterval:
    """A checkpoint every `batches` batches, exactly."""

    def __init__(self, batches: int) -> None:
        self._batches = self._left = self._part = batches

    @property
    def due_seconds(self) -> float:
        """Never: batches are counted."""
        return math.inf

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """All batches of the interval at once, or the first part of them."""
        self._left = self._batches
        self._part = -(-self._batches // _PARTS) if in_parts else self._batches
        return self._part

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """The next part, until a checkpoint is due."""
        self._left -= batches
        return max(0, min(self._part, self._left))


class SecondsInterval:
    """A checkpoint every `seconds` seconds, rounded to the nearest batch.

    How long a batch takes is measured, grant by grant, from the batches themselves. The first
    grant of a process is one batch, since nothing is known; afterwards a grant is as many batches
    as fit into what is left of the interval, but no more than

    - an eighth of the interval, rounded up: when batches become slower, the checkpoint is late by
      what they need for one grant;
    - twice the batches measured so far in this process: the first ones, out of a reader's backlog,
      say little.

    So an interval of steady batches has about nine decisions, and the first of a process some
    more, since grants grow threefold; never more than one a batch.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._batch_seconds: float | None = None
        self._measured = 0  # batches
        self._started = 0.0
        self._granted_at = 0.0

    @property
    def due_seconds(self) -> float:
        """When the interval is over."""
        return self._started + self._seconds

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """The first grant of an interval that starts now; a part in any case."""
        self._started = self._granted_at = now_seconds
        return self._grant(now_seconds) or 1

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """Measure the grant that was used up; what still fits into the interval."""
        measured = max(0.0, now_seconds - self._granted_at) / batches
        known = self._batch_seconds
        # Half of the old figure is kept: one slow grant must not shorten the next ones for long.
        self._batch_seconds = measured if known is None else (measured + known) / 2
        self._measured += batches
        self._granted_at = now_seconds
        return self._grant(now_seconds)

    def _grant(self, now_seconds: float) -> int:
        left = self.due_seconds - now_seconds
        if left <= 0:
            return 0
        if self._batch_seconds is None:
            return _FIRST_GRANT
        most = _GROWTH * self._measured
        part = min(left, self._seconds / _PARTS)
        if self._batch_seconds * most <= part:
            return most
        return min(most, math.ceil(part / self._batch_seconds), round(left / self._batch_seconds))


class AutoInterval(SecondsInterval):
    """A checkpoint whenever `seconds()` have passed, asked again at each decision.

    A longer interval takes effect within the current one; a shorter one at the end of the grant
    that the reader already has.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__(0.0)  # asked for before it counts
        self._ask = seconds

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """The first grant of an interval that starts now."""
        self._seconds = self._ask()
        return super().restart(now_seconds, in_parts=in_parts)

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """What still fits into the interval as it is seen now."""
        self._seconds = self._ask()
        return super().extend(now_seconds, batches=batches)
