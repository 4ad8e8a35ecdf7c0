"""Schedules checkpoints: chooses the interval, and the batch at which the next one is due.

How long to wait from one checkpoint to the next, from the costs of a checkpoint and of a failure.
This is Young's first-order optimum (CACM 1974). Daly (FGCS 2006) adds terms that vanish if a
checkpoint takes far less than the time between failures, as a stall does.

When the next checkpoint is due, as a number of batches that can be granted to the reader. Clock
readings are arguments, so that schedules can be tested without a clock.
"""

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


#: The interval until a checkpoint has been measured; short, so that one is measured soon.
FIRST_SECONDS = 60.0

#: Closer checkpoints gain nothing, and a failure should not cost more than an hour.
MIN_SECONDS = 10.0
MAX_SECONDS = 3_600.0

#: Before a job has a past, one failure a day is assumed.
ASSUMED_HOURS = 24.0


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The interval from one checkpoint to the next.

    Attributes:
        seconds: its length.
        reason: why it was chosen, for logs and messages.
    """

    seconds: float
    reason: str


def choose(rate: Rate, *, stall_seconds: float | None, persist_seconds: float | None) -> Interval:
    """Choose the interval: sqrt(2 · stall / failure rate), from `MIN_SECONDS` to `MAX_SECONDS`.

    If a checkpoint takes longer than that to be committed, the interval is that time, at most
    `MAX_SECONDS`, because two commits do not overlap. If a commit takes longer than `MAX_SECONDS`,
    the next checkpoint is still taken as soon as the one before is stored: it is due meanwhile, and
    taken late.

    Args:
        rate: failure rate of the job.
        stall_seconds: how long training stands still for a checkpoint; None: not measured yet.
        persist_seconds: how long the agent takes to commit one; None: not measured yet.
    """
    reason = f"{rate.per_hour:.3g} failures an hour ({rate.source})"
    if stall_seconds is None:
        seconds, reason = FIRST_SECONDS, "no checkpoint has been measured yet"
    else:
        per_second = rate.per_hour / 3_600
        optimum = math.sqrt(2 * stall_seconds / per_second) if per_second > 0 else math.inf
        seconds = min(max(optimum, MIN_SECONDS), MAX_SECONDS)
        reason = f"a stall of {1e3 * stall_seconds:.3g} ms, {reason}"
        if seconds != optimum:
            reason += f": {optimum:.3g} s is outside {MIN_SECONDS:g} to {MAX_SECONDS:g} s"
    if persist_seconds is not None and persist_seconds > seconds:
        seconds = min(persist_seconds, MAX_SECONDS)
        reason += f"; a checkpoint takes {persist_seconds:.3g} s to be committed"
        if seconds != persist_seconds:
            reason += f", more than the longest interval of {MAX_SECONDS:g} s"
    return Interval(seconds=seconds, reason=reason)


#: An interval is divided into this many parts if it is not granted at once.
_PARTS = 8

_FIRST_GRANT = 1
#: A batch is taken to be no shorter than this.
_LEAST_SECONDS = 1e-6
#: A grant is at most this many times the batches measured so far, because too little is known of
#: their time.
_GROWTH = 2


class Schedule(Protocol):
    """Grants batches; a decision is made when a grant is used up, or at `due_seconds`."""

    @property
    def due_seconds(self) -> float:
        """End of the interval, on the clock of the calls, for callers that can decide at any batch.

        Infinite if only batches are counted.
        """

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """Begin an interval after a checkpoint was taken, or at the start of training.

        Args:
            now_seconds: reading of a clock that only grows.
            in_parts: grant at most an eighth of the interval at once.

        Returns:
            Number of batches until the next decision.
        """

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """Grant more batches after `batches` were trained since the last call.

        Returns:
            Number of batches until the next decision; 0: take a checkpoint now.
        """

    def batches_left(self, now_seconds: float, *, batches: int) -> int | None:
        """Return after how many batches a checkpoint is due; None: not known yet.

        Args:
            now_seconds: reading of the clock.
            batches: batches that were trained since the last call of another method.
        """


class BatchInterval:
    """Schedules a checkpoint every `batches` batches, exactly."""

    def __init__(self, batches: int) -> None:
        self._batches = self._batches_to_come = self._part = batches

    @property
    def due_seconds(self) -> float:
        """Infinity, because only batches are counted."""
        return math.inf

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """Grant all batches of the interval at once, or the first part of them."""
        self._batches_to_come = self._batches
        self._part = -(-self._batches // _PARTS) if in_parts else self._batches
        return self._part

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """Grant the next part; 0 if a checkpoint is due."""
        self._batches_to_come -= batches
        return max(0, min(self._part, self._batches_to_come))

    def batches_left(self, now_seconds: float, *, batches: int) -> int:
        """Return what is left of the interval, exactly."""
        return self._batches_to_come - batches


class SecondsInterval:
    """Schedules a checkpoint every `seconds` seconds, rounded to the nearest batch.

    The time of a batch is measured with each grant. The first grant of a process is one batch,
    because nothing is known yet. Each later grant is as many batches as fit into the rest of the
    interval, but no more than

    - an eighth of the interval, rounded up. If batches become slower, the checkpoint is late by at
      most the time of one grant;
    - twice the batches measured so far in this process. The first batches come out of a reader's
      backlog, so their time says little.

    An interval of steady batches therefore has about nine decisions. The first interval of a
    process has some more, because grants grow threefold. There is never more than one for a batch.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._batch_seconds: float | None = None
        self._measured = 0  # number of batches measured so far
        self._started = 0.0
        self._granted_at = 0.0

    @property
    def due_seconds(self) -> float:
        """End of the interval."""
        return self._started + self._seconds

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """Begin an interval now, and make its first grant, which is always a part of it."""
        self._started = self._granted_at = now_seconds
        return self._grant(now_seconds) or 1

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """Measure the grant that was used up, and grant what still fits into the interval."""
        measured = max(0.0, now_seconds - self._granted_at) / batches
        known_seconds = self._batch_seconds
        # Average with the old figure, so that one slow grant does not shorten the next for long.
        self._batch_seconds = measured if known_seconds is None else (measured + known_seconds) / 2
        self._measured += batches
        self._granted_at = now_seconds
        return self._grant(now_seconds)

    def batches_left(self, now_seconds: float, *, batches: int) -> int | None:
        """Return how many batches fit into the rest of the interval, at their measured time."""
        if self._batch_seconds is None:
            return None
        batches_to_come = (self.due_seconds - now_seconds) / max(
            self._batch_seconds, _LEAST_SECONDS
        )
        return max(1, round(batches_to_come))

    def _grant(self, now_seconds: float) -> int:
        seconds_left = self.due_seconds - now_seconds
        if seconds_left <= 0:
            return 0
        if self._batch_seconds is None:
            return _FIRST_GRANT
        most = _GROWTH * self._measured
        part = min(seconds_left, self._seconds / _PARTS)
        if self._batch_seconds * most <= part:
            return most
        return min(
            most, math.ceil(part / self._batch_seconds), round(seconds_left / self._batch_seconds)
        )


class AutoInterval(SecondsInterval):
    """Schedules a checkpoint every `seconds()` seconds; calls `seconds` again at each decision.

    A longer interval takes effect within the present interval. A shorter one takes effect at the
    end of the grant that the reader already has.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__(0.0)  # `restart` sets the interval before it is used
        self._ask = seconds

    def restart(self, now_seconds: float, *, in_parts: bool = False) -> int:
        """Begin an interval now, and make its first grant."""
        self._seconds = self._ask()
        return super().restart(now_seconds, in_parts=in_parts)

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """Grant what still fits into the interval as it is now."""
        self._seconds = self._ask()
        return super().extend(now_seconds, batches=batches)
