"""Keeps the checkpoints that are on their way, and counts what became of all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from recpoint.catalog.overview.overview import CAUSES, Histogram, cause_of
from recpoint.embeddings.marks import Dirty, Tracker
from recpoint.format.history import ChosenPrecision
from recpoint.format.manifest import Kind
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.policy import BaseHistory, Link, Tip, breaks_chain
from recpoint.trainer_plugin.schedule.schedule import Interval

__all__ = ["Ledger", "Pending", "Statistics", "Stats"]


# Checkpoints on their way: what each holds, and what its outcome means for the next.
#
# All methods are called from the training thread.


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A checkpoint that was cut and has no outcome yet.

    Attributes:
        dirty: `Table.key` -> the rows it holds; they are dirty again if it comes to nothing.
        tip_before: the chain's tip when it was cut.
        tip_after: what the next increment is taken after, if this one is stored; the same for an
            increment that no later one stands on.
        slot: name of the slot it lies in.
        cut_seconds: monotonic time of the cut.
        bits: of a value of each table.
    """

    ref: CheckpointRef
    link: Link
    dirty: Mapping[str, Dirty]
    tip_before: Tip | None
    tip_after: Tip
    slot: str
    cut_seconds: float
    bits: tuple[int, ...]

    @property
    def base(self) -> CheckpointRef:
        """The full that its chain starts from."""
        return self.link.base or self.ref


class Ledger:
    """The chain of this trainer and the checkpoints that wait for their outcomes.

    Attributes:
        tip: what the next increment is taken after; None: the next is a full.
        newest_step: of the checkpoint cut last, unless that came to nothing; None: there is none.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], tip: Tip | None, base_history: BaseHistory | None
    ) -> None:
        self._trackers = trackers
        self._pending: dict[CheckpointRef, Pending] = {}
        self._lost: set[CheckpointRef] = set()
        self._untold: list[CheckpointRef] = []  # lost ones
        self._histories = {} if base_history is None else {base_history.base: base_history}
        self.tip = tip
        self.newest_step: int | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def pending(self) -> tuple[CheckpointRef, ...]:
        """Those without an outcome, oldest first."""
        return tuple(self._pending)

    @property
    def busy_slots(self) -> set[str]:
        """Names of the slots in use."""
        return {pending.slot for pending in self._pending.values()}

    @property
    def base_history(self) -> BaseHistory | None:
        """What stands on the base of the tip; None without a tip."""
        return None if self.tip is None else self._histories.get(self.tip.base)

    def add(self, pending: Pending) -> None:
        """A checkpoint was cut: later ones are taken after it, before its outcome is known."""
        self._pending[pending.ref] = pending
        if pending.link.kind == "full":
            self._histories[pending.ref] = BaseHistory(pending.ref)
        else:
            self._histories[pending.base].cut(pending.ref)
        self.tip = pending.tip_after
        self.newest_step = pending.ref.step

    def committed(
        self, ref: CheckpointRef, *, stored_bytes: int, links_to_read: int
    ) -> Pending | None:
        """It is stored: its rows need no other checkpoint.

        Args:
            ref: the checkpoint.
            stored_bytes: bytes of its chunks.
            links_to_read: manifests that a restore of it reads.
        """
        pending = self._pending.pop(ref, None)
        if pending is not None:
            for name, dirty in pending.dirty.items():
                self._trackers[name].release(dirty)
            history = self._histories.get(pending.base)
            if history is not None:
                history.stored(ref, stored_bytes, links_to_read=links_to_read)
            self._forget_others()
        return pending

    def lost(self, ref: CheckpointRef, error_type: str) -> Pending | None:
        """It will never be: its rows are dirty again, and nothing may be taken after it."""
        pending = self._pending.pop(ref, None)
        if pending is None:
            return None
        for name, dirty in pending.dirty.items():
            self._trackers[name].merge_back(dirty)
        self._lost.add(ref)
        self._untold.append(ref)
        if self.newest_step == ref.step:
            self.newest_step = None
        history = self._histories.get(pending.base)
        if history is not None:
            history.lost(ref)
        if self.tip is not None and self.tip.base == pending.base:
            self.tip = self._tip_without(pending, self.tip, error_type)
        # else training is on another chain already
        self._forget_others()
        return pending

    def take_lost(self, most: int) -> tuple[CheckpointRef, ...]:
        """The first that came to nothing and were not taken yet; other ranks drop theirs."""
        found, self._untold = tuple(self._untold[:most]), self._untold[most:]
        return found

    def _tip_without(self, pending: Pending, tip: Tip, error_type: str) -> Tip | None:
        """What comes after `tip` of the same chain, now that `pending` came to nothing."""
        if breaks_chain(error_type):
            return None
        if tip.ref == pending.ref:
            back = pending.tip_before
            gone = back is None or back.ref in self._lost or back.base in self._lost
            return None if gone else back
        if pending.tip_after == pending.tip_before:
            return tip  # nothing stands on it
        return None  # what was cut after it cannot be committed, so there is nothing to go back to

    def _forget_others(self) -> None:
        """Let go of what no tip can come back to."""
        tips = [self.tip, *(pending.tip_before for pending in self._pending.values())]
        kept = {tip.base for tip in tips if tip is not None}
        kept.update(pending.base for pending in self._pending.values())
        self._histories = {base: h for base, h in self._histories.items() if base in kept}
        if not self._pending:
            self._lost.clear()


# What happened to this trainer's checkpoints, in numbers.


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
