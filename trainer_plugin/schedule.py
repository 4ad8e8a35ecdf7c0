"""When the next checkpoint is due, as a number of batches the reader can be told.

Pure: the clock's readings are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["AutoInterval", "BatchInterval", "Schedule", "SecondsInterval"]

_FIRST_GRANT = 1
_MAX_GRANT = 10**9


class Schedule(Protocol):
    """Grants batches; a decision is made only when a grant is used up."""

    def restart(self, now_seconds: float) -> int:
        """A checkpoint was taken (or training starts): batches until the next decision."""

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """`batches` were trained since the last call: more batches, or 0: checkpoint now."""


class BatchInterval:
    """A checkpoint every `batches` batches, exactly."""

    def __init__(self, batches: int) -> None:
        self._batches = batches

    def restart(self, now_seconds: float) -> int:
        """All batches of the interval at once."""
        return self._batches

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """The grant was the whole interval: a checkpoint is due."""
        return 0


class SecondsInterval:
    """A checkpoint every `seconds` seconds, rounded to the nearest batch.

    How long a batch takes is measured, grant by grant, from the batches themselves. The first
    grant of a process is one batch, since nothing is known; afterwards a grant is as many batches
    as fit into what is left of the interval.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._batch_seconds: float | None = None
        self._started = 0.0
        self._granted_at = 0.0

    def restart(self, now_seconds: float) -> int:
        """The first grant of an interval that starts now."""
        self._started = self._granted_at = now_seconds
        return self._grant(now_seconds) or 1

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """Measure the grant that was used up; what still fits into the interval."""
        measured = max(0.0, now_seconds - self._granted_at) / batches
        known = self._batch_seconds
        # Half of the old figure is kept: one slow grant must not shorten the next ones for long.
        self._batch_seconds = measured if known is None else (measured + known) / 2
        self._granted_at = now_seconds
        return self._grant(now_seconds)

    def _grant(self, now_seconds: float) -> int:
        left = self._started + self._seconds - now_seconds
        if self._batch_seconds is None:
            return _FIRST_GRANT if left > 0 else 0
        if left <= 0:
            return 0
        if self._batch_seconds * _MAX_GRANT <= left:
            return _MAX_GRANT
        return round(left / self._batch_seconds)


class AutoInterval(SecondsInterval):
    """A checkpoint whenever `seconds()` have passed, asked again at each decision.

    A longer interval takes effect within the current one; a shorter one at the end of the grant
    that the reader already has.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        super().__init__(0.0)  # asked for before it counts
        self._ask = seconds

    def restart(self, now_seconds: float) -> int:
        """The first grant of an interval that starts now."""
        self._seconds = self._ask()
        return super().restart(now_seconds)

    def extend(self, now_seconds: float, *, batches: int) -> int:
        """What still fits into the interval as it is seen now."""
        self._seconds = self._ask()
        return super().extend(now_seconds, batches=batches)
