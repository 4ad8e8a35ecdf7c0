"""What a trainer expects of the rest of its job, and what follows: widths and the interval.

Kept by the training thread only. Each decision is logged when it changes, and shown in `stats`.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

from recpoint.format.history import MAX_COUNT, ChosenPrecision, History
from recpoint.trainer_plugin import interval, precision
from recpoint.trainer_plugin.failures import ExpectedFailures, Past, failure_rate
from recpoint.trainer_plugin.interval import Interval
from recpoint.trainer_plugin.statistics import Statistics

__all__ = ["Outlook"]

_log = logging.getLogger("recpoint")

#: An interval that differs by less than this share from the one told last is not told again.
_TOLD_SHARE = 0.2


class Outlook:
    """The outlook of one trainer, from its start on.

    Args:
        expected: what was said of the job's failures.
        past: what came before this trainer.
        rule: whether any table is under the rule of expected restores.
        statistics: measured costs come from it, and decisions are shown in it.
    """

    def __init__(
        self,
        expected: ExpectedFailures | None,
        past: Past,
        *,
        rule: bool,
        statistics: Statistics,
    ) -> None:
        self._expected = expected
        self._past = past
        self._rule = rule
        self._statistics = statistics
        self._started = time.monotonic()
        self._told_interval: float | None = None

    @property
    def trained_ms(self) -> int:
        """Training that the state holds; it only grows, whatever the clocks of hosts say."""
        here = int(1_000 * (time.monotonic() - self._started))
        return min(self._past.trained_ms + here, MAX_COUNT)  # the store says what came before

    def history(
        self,
        *,
        interval_seconds: float | Literal["auto"] | None = None,
        interval_batches: int | None = None,
    ) -> History:
        """What a checkpoint that is cut now has been through, its width decided.

        Args:
            interval_seconds: as it was set; what it comes to is when people expect the next one.
            interval_batches: the same where batches are counted.
        """
        trained_ms = self.trained_ms
        due_seconds = None if interval_seconds == "auto" else interval_seconds
        if interval_seconds == "auto" and self._statistics.stall_seconds is not None:
            due_seconds = self.interval_seconds()  # else the first one measures it
        return History(
            due_ms=None if due_seconds is None else min(round(1_000 * due_seconds), MAX_COUNT),
            due_batches=interval_batches,
            trained_ms=trained_ms,
            lossy_restores=self._past.lossy_restores,
            precision=self._decide(trained_ms) if self._rule else None,
        )

    def _decide(self, trained_ms: int) -> ChosenPrecision:
        decision = precision.decide(self._expected, self._past, trained_ms=trained_ms)
        told = self._statistics.precision
        if told is None or (told.bits, told.fallen_back) != (decision.bits, decision.fallen_back):
            level = logging.WARNING if decision.fallen_back else logging.INFO
            _log.log(level, 'bits="auto": %d bits: %s', decision.bits, decision.reason)
        self._statistics.precision = decision
        return decision

    def interval_seconds(self) -> float:
        """The interval that suits what has been measured so far."""
        rate = failure_rate(
            self._expected,
            self._past,
            trained_ms=self.trained_ms,
            assumed_hours=interval.ASSUMED_HOURS,
        )
        decision = interval.choose(
            rate,
            stall_seconds=self._statistics.stall_seconds,
            persist_seconds=self._statistics.persist_seconds,
        )
        self._tell(decision)
        self._statistics.interval = decision
        return decision.seconds

    def _tell(self, decision: Interval) -> None:
        told = self._told_interval
        if told is None or abs(decision.seconds - told) > _TOLD_SHARE * told:
            _log.info('interval_seconds="auto": %.3g s: %s', decision.seconds, decision.reason)
            self._told_interval = decision.seconds
