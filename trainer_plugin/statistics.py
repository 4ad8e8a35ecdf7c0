"""What happened to this trainer's checkpoints, in numbers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

__all__ = ["Statistics", "Stats"]

_KEPT_STALLS = 1_000


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A reading of the counters.

    Attributes:
        staged: checkpoints that survive this process, whatever becomes of them.
        committed: of those, how many are in the store.
        skipped: checkpoints that were due while earlier ones still waited; their rows are in the
            next one.
        failed: checkpoints that came to nothing, in the trainer or in the agent.
        stalls_ms: how long training waited for each, the last 1,000.
        lag_batches: batches that would be lost if the host died now.
        lag_seconds: age of the newest committed checkpoint, or of training when there is none.
        last_error: the newest error, None when there was none.
    """

    staged: int
    committed: int
    skipped: int
    failed: int
    stalls_ms: tuple[float, ...]
    lag_batches: int
    lag_seconds: float
    last_error: str | None


class Statistics:
    """The counters; changed by the training thread only."""

    def __init__(self) -> None:
        self.staged = self.committed = self.skipped = self.failed = 0
        self.last_error: str | None = None
        self._stalls_ms: deque[float] = deque(maxlen=_KEPT_STALLS)
        self._safe_batches = 0
        self._safe_seconds = time.monotonic()

    def start(self, batches_done: int) -> None:
        """Training starts with these batches done, all of them safe."""
        self._safe_batches, self._safe_seconds = batches_done, time.monotonic()

    def stalled(self, milliseconds: float) -> None:
        """Training waited for a snapshot."""
        self._stalls_ms.append(milliseconds)

    def safe(self, batches: int, cut_seconds: float) -> None:
        """A checkpoint cut at monotonic time `cut_seconds` is committed."""
        self.committed += 1
        if batches >= self._safe_batches:
            self._safe_batches, self._safe_seconds = batches, cut_seconds

    def read(self, batches_done: int) -> Stats:
        """The counters now."""
        return Stats(
            staged=self.staged,
            committed=self.committed,
            skipped=self.skipped,
            failed=self.failed,
            stalls_ms=tuple(self._stalls_ms),
            lag_batches=batches_done - self._safe_batches,
            lag_seconds=time.monotonic() - self._safe_seconds,
            last_error=self.last_error,
        )
