"""What happened to this trainer's checkpoints, in numbers."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median_low

from recpoint.catalog.overview.failure_causes import CAUSES, cause_of
from recpoint.catalog.overview.histogram import Histogram
from recpoint.format.history import ChosenPrecision
from recpoint.format.manifest import Kind
from recpoint.trainer_plugin.interval import Interval

__all__ = ["Statistics", "Stats"]

_KEPT_STALLS = 1_000

#: What a checkpoint costs now follows from so many of the last.
_RECENT = 8

#: One alone does not tell how long a commit takes: an agent is often started after its trainer.
_LEAST_PERSISTS = 2


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A reading of the counters.

    Attributes:
        staged: checkpoints that survive this process, whatever becomes of them.
        committed: of those, how many are in the store.
        skipped: checkpoints that were due while earlier ones still waited; their rows are in the
            next one.
        waited: times that training waited for room for a checkpoint that was due.
        cancelled: checkpoints that were dropped for a newer one; their rows are in that.
        failed: checkpoints that came to nothing in another way, in the trainer or in the agent.
        unmarked_rows: rows that a check found changed, and that nothing had marked; see
            `Options.verify_unmarked_rows`.
        stalls_ms: how long training waited for each, the last 1,000.
        lag_batches: batches that would be lost if the host died now.
        lag_seconds: age of the newest committed checkpoint, or of training when there is none.
        last_error: the newest error of those that failed, None when there was none.
        agent_error: why the agent of this host cannot store what is staged, as it said when a due
            checkpoint was last skipped, or training ended; it tries again, so nothing has failed.
            None: it said nothing, or has stored one since.
        precision: with `bits="auto"`: the width of the newest checkpoint, and why.
        interval: with `interval_seconds="auto"`: the interval now, and why.
    """

    staged: int
    committed: int
    skipped: int
    waited: int
    cancelled: int
    failed: int
    unmarked_rows: int
    stalls_ms: tuple[float, ...]
    lag_batches: int
    lag_seconds: float
    last_error: str | None
    agent_error: str | None
    precision: ChosenPrecision | None
    interval: Interval | None


class Statistics:
    """The counters; changed by the training thread only, read by any.

    Attributes:
        restores: restores that training has gone on from.
        unmarked_rows: as in `Stats`.
        failures: of those that failed, how many by cause; each cause is there from the start, so
            that who reads never meets a dictionary that grows.
        stored_bytes: bytes of chunks of committed checkpoints, by kind.
        stalls: seconds that training waited for each.
        last_commit_ms: when the newest was committed, on this host's clock; None: none was.
        interval_seconds: how long the last interval between checkpoints took; None: the first.
        started_batches: batches done when training started.
    """

    def __init__(self) -> None:
        self.staged = self.committed = self.skipped = self.failed = 0
        self.waited = self.cancelled = self.restores = self.started_batches = 0
        self.unmarked_rows = 0
        self.failures = dict.fromkeys(CAUSES, 0)
        self.stored_bytes: dict[Kind, int] = {"full": 0, "increment": 0}
        self.stalls = Histogram()
        self.last_commit_ms: int | None = None
        self.interval_seconds: float | None = None
        self._interval_began: float | None = None
        self.last_error: str | None = None
        self.agent_error: str | None = None
        self.precision: ChosenPrecision | None = None
        self.interval: Interval | None = None
        self._stalls_ms: deque[float] = deque(maxlen=_KEPT_STALLS)
        self._persists_seconds: deque[float] = deque(maxlen=_RECENT)
        self._safe_batches = 0
        self._safe_seconds = time.monotonic()

    def start(self, batches_done: int, *, restored: bool = False) -> None:
        """Training starts with these batches done, all of them safe."""
        self._safe_batches, self._safe_seconds = batches_done, time.monotonic()
        self.started_batches, self.restores = batches_done, int(restored)

    def interval_begins(self, now_seconds: float) -> None:
        """A checkpoint was due at this monotonic time, taken or skipped; or training begins."""
        if self._interval_began is not None:
            self.interval_seconds = now_seconds - self._interval_began
        self._interval_began = now_seconds

    def stalled(self, milliseconds: float) -> None:
        """Training waited for a snapshot."""
        self._stalls_ms.append(milliseconds)
        self.stalls.add(milliseconds / 1e3)

    def lost(self, error: BaseException) -> None:
        """A checkpoint came to nothing."""
        self.failed += 1
        self.failures[cause_of(error)] += 1
        self.last_error = _error_text(error)

    def safe(
        self,
        batches: int,
        cut_seconds: float,
        *,
        kind: Kind,
        stored_bytes: int,
        committed_ms: int,
        turn_seconds: float | None = None,
    ) -> None:
        """A checkpoint cut at monotonic time `cut_seconds` is committed.

        Args:
            batches: done at its cut.
            cut_seconds: see above.
            kind: of the checkpoint.
            stored_bytes: bytes of its chunks.
            committed_ms: when, on the clock of the agent's host.
            turn_seconds: the monotonic time from which the agent could work on it, where it had an
                earlier one to finish after the cut; None: the cut.
        """
        self.committed += 1
        self.agent_error = None
        self.stored_bytes[kind] += stored_bytes
        self.last_commit_ms = committed_ms
        began_seconds = cut_seconds if turn_seconds is None else turn_seconds
        self._persists_seconds.append(time.monotonic() - began_seconds)
        if batches >= self._safe_batches:
            self._safe_batches, self._safe_seconds = batches, cut_seconds

    @property
    def stall_seconds(self) -> float | None:
        """Mean of the last stalls; None before the first."""
        recent = list(self._stalls_ms)[-_RECENT:]
        return sum(recent) / len(recent) / 1_000 if recent else None

    @property
    def persist_seconds(self) -> float | None:
        """How long one of the last checkpoints took to be committed; None: too few were.

        The median, the lower of two: that one of them waited for an agent or a store that was away
        does not change it. Nor does a full among increments: what is due before that is stored is
        taken late, as `when_busy` says.
        """
        recent = list(self._persists_seconds)
        return median_low(recent) if len(recent) >= _LEAST_PERSISTS else None

    @property
    def safe_batches(self) -> int:
        """Batches that the newest committed checkpoint holds; those of the start without one."""
        return self._safe_batches

    @property
    def lag_seconds(self) -> float:
        """Age of the newest committed checkpoint, or of training when there is none."""
        return time.monotonic() - self._safe_seconds

    def read(self, batches_done: int) -> Stats:
        """The counters now."""
        return Stats(
            staged=self.staged,
            committed=self.committed,
            skipped=self.skipped,
            waited=self.waited,
            cancelled=self.cancelled,
            failed=self.failed,
            unmarked_rows=self.unmarked_rows,
            stalls_ms=tuple(self._stalls_ms),
            lag_batches=batches_done - self._safe_batches,
            lag_seconds=self.lag_seconds,
            last_error=self.last_error,
            agent_error=self.agent_error,
            precision=self.precision,
            interval=self.interval,
        )


def _error_text(error: BaseException) -> str:
    try:
        text = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])
    except Exception as broken:  # its class may be a user's, as that of a reader's error
        text = f"its text cannot be made ({type(broken).__name__})"
    return f"{type(error).__name__}: {text}"
