"""Keeps the checkpoints that wait for an outcome, and counts the outcomes of all checkpoints.

Checkpoints that wait for an outcome: what each holds, and what its outcome means for the next. All
methods are called from the training thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

from recpoint.counting import CAUSES, Histogram, cause_of
from recpoint.embeddings.cache.progress import CacheStats
from recpoint.embeddings.tables.keyed import KeyCounts
from recpoint.embeddings.tables.marks import Dirty, Tracker
from recpoint.format.history import ChosenPrecision
from recpoint.format.manifest import Kind
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.loss_setting import LossFigures
from recpoint.trainer_plugin.policy import BaseHistory, ChainLink, Tip, breaks_chain
from recpoint.trainer_plugin.schedule.schedule import Interval

__all__ = ["CopiedRows", "Ledger", "Pending", "Statistics", "Stats"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A checkpoint that was cut and has no outcome yet.

    Attributes:
        ref: the checkpoint.
        link: its place in the chain.
        dirty: `Table.key` -> the rows that it holds; they become dirty again if it fails.
        tip_before: tip of the chain when it was cut.
        tip_after: the checkpoint after which the next increment is taken, if this one is stored.
            Equal to `tip_before` for an increment on which no later increment is based.
        slot: name of the slot that holds it.
        cut_seconds: monotonic time of the cut.
        bits: for each table, bits of each value.
    """

    ref: CheckpointRef
    link: ChainLink
    dirty: Mapping[str, Dirty]
    tip_before: Tip | None
    tip_after: Tip
    slot: str
    cut_seconds: float
    bits: tuple[int, ...]

    @property
    def base(self) -> CheckpointRef:
        """The full at the start of its chain."""
        return self.link.base or self.ref


class Ledger:
    """Keeps the chain of this trainer and the checkpoints that wait for their outcomes.

    Args:
        trackers: `Table.key` -> tracker of the table.
        tip: tip of the chain at the start; None: there is no chain to extend.
        base_history: the checkpoints on the tip's base.

    Attributes:
        tip: the checkpoint after which the next increment is taken; None: the next is a full.
        newest_step: step of the checkpoint that was cut last, unless it failed; None: there is
            none.
    """

    def __init__(
        self, trackers: Mapping[str, Tracker], tip: Tip | None, base_history: BaseHistory | None
    ) -> None:
        self._trackers = trackers
        self._pending: dict[CheckpointRef, Pending] = {}
        self._lost: set[CheckpointRef] = set()
        self._untold: list[CheckpointRef] = []  # lost checkpoints not reported to other ranks yet
        self._histories = {} if base_history is None else {base_history.base: base_history}
        self.tip = tip
        self.newest_step: int | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def pending(self) -> tuple[CheckpointRef, ...]:
        """The checkpoints without an outcome, oldest first."""
        return tuple(self._pending)

    @property
    def busy_slots(self) -> set[str]:
        """Return the names of the slots in use."""
        return {pending.slot for pending in self._pending.values()}

    @property
    def base_history(self) -> BaseHistory | None:
        """The checkpoints on the base of the tip; None without a tip."""
        return None if self.tip is None else self._histories.get(self.tip.base)

    def add(self, pending: Pending) -> None:
        """Add a checkpoint that was cut; later ones are taken after it before its outcome."""
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
        """Record that a checkpoint is stored, so that no other one needs to hold its rows.

        Args:
            ref: the checkpoint.
            stored_bytes: bytes of its chunks.
            links_to_read: number of manifests that a restore of it reads.

        Returns:
            The checkpoint as it was pending; None if it was not.
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
        """Record that a checkpoint failed: its rows become dirty, and none may be taken after it.

        Args:
            ref: the checkpoint.
            error_type: name of the error's class.

        Returns:
            The checkpoint as it was pending; None if it was not.
        """
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
        # Otherwise training is already on another chain.
        self._forget_others()
        return pending

    def take_lost(self, most: int) -> tuple[CheckpointRef, ...]:
        """Return up to `most` failed checkpoints that no call has returned, for other ranks."""
        untold, self._untold = tuple(self._untold[:most]), self._untold[most:]
        return untold

    def _tip_without(self, pending: Pending, tip: Tip, error_type: str) -> Tip | None:
        """Return the tip of a chain that replaces `tip` after `pending` of the chain failed."""
        if breaks_chain(error_type):
            return None
        if tip.ref == pending.ref:
            previous = pending.tip_before
            is_gone = previous is None or previous.ref in self._lost or previous.base in self._lost
            return None if is_gone else previous
        if pending.tip_after == pending.tip_before:
            return tip  # no later increment is based on it
        return None  # increments cut after it cannot be committed, so no tip is left

    def _forget_others(self) -> None:
        """Drop the histories to which no tip can return."""
        tips = [self.tip, *(pending.tip_before for pending in self._pending.values())]
        kept_bases = {tip.base for tip in tips if tip is not None}
        kept_bases.update(pending.base for pending in self._pending.values())
        self._histories = {base: h for base, h in self._histories.items() if base in kept_bases}
        if not self._pending:
            self._lost.clear()


_KEPT_STALLS = 1_000

#: Number of the last checkpoints from which the present cost of a checkpoint is computed.
_RECENT = 8

#: One commit does not show how long commits take: an agent is often started after its trainer.
_LEAST_PERSISTS = 2


@dataclass(frozen=True, kw_only=True)
class CopiedRows:
    """How many rows a checkpoint copied before its stall, and in it.

    A row that changed after it was copied was copied once more, and counts twice.

    Attributes:
        rows_before, bytes_before: rows copied while training went on, with their row states.
        rows_in_stall, bytes_in_stall: rows copied while training waited, with their row states; 0
            if the checkpoint failed.
        why_plain: why no row was copied before the stall; None: rows were.
    """

    rows_before: int
    bytes_before: int
    rows_in_stall: int
    bytes_in_stall: int
    why_plain: str | None


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Holds counts and timings of a trainer's checkpoints at one moment.

    Attributes:
        staged: checkpoints that were staged, and so survive this process, whatever their outcome.
        committed: staged checkpoints that are in the store.
        skipped: checkpoints that were due while earlier ones still waited; their rows are in the
            next checkpoint.
        waited: how often training waited for room for a checkpoint that was due.
        cancelled: checkpoints that were dropped for a newer one, which holds their rows.
        failed: checkpoints that failed in another way, in the trainer or in the agent.
        unmarked_rows: rows that a check found changed although nothing had marked them; see
            `Options.verify_unmarked_rows`.
        stalls_ms: how long training stood still for each of the last 1,000 checkpoints, in
            milliseconds.
        lag_batches: batches that would be lost if the host died now.
        lag_seconds: age of the newest committed checkpoint, or of training if there is none.
        last_error: error of the checkpoint that failed last; None: none has failed.
        agent_error: why the agent of this host cannot store staged checkpoints, as read when a due
            checkpoint was last skipped or when training ended. The agent tries again, so nothing
            has failed. None: the agent reported no error, or has stored a checkpoint since.
        precision: with `bits="auto"`: the width of the newest checkpoint, and why it was chosen.
        interval: with `interval_seconds="auto"`: the present interval, and why it was chosen.
        copied: the rows of the newest checkpoint that were copied before its stall and in it; None:
            no checkpoint yet, or rows cannot be copied before, or `Options.copy_fulls_ahead` is 0
            and there is no `Lookahead`.
        cache: what the cache of the model's tables has done; None: no table is in a cache.
        loss: with `bits=Loss(...)`: what rounding costs in loss, and the price of a bit.
        keyed: what the keys of each keyed table did so far, by its name; empty without such tables.
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
    copied: CopiedRows | None
    cache: CacheStats | None
    loss: LossFigures | None = None
    keyed: Mapping[str, KeyCounts] = field(default_factory=dict)


class Statistics:
    """Counts what happens to checkpoints. Only the training thread writes; any thread reads.

    Attributes:
        restores: number of restores that training went on from.
        unmarked_rows: as in `Stats`.
        failures: failed checkpoints by cause. Each cause is a key from the start, so that a thread
            that reads never sees the dictionary grow.
        stored_bytes: bytes of chunks of committed checkpoints, by kind.
        stalls: how long training stood still for each checkpoint, in seconds.
        copied: as in `Stats`.
        copied_rows, copied_bytes: sums of `copied` over all checkpoints, by "before" and
            "in_stall".
        last_commit_ms: when the newest checkpoint was committed, in milliseconds since the epoch;
            None: none was.
        interval_seconds: length of the last interval between checkpoints; None: the first interval
            has not ended.
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
        self.copied: CopiedRows | None = None
        self.copied_rows = {"before": 0, "in_stall": 0}
        self.copied_bytes = {"before": 0, "in_stall": 0}
        self._stalls_ms: deque[float] = deque(maxlen=_KEPT_STALLS)
        self._persists_seconds: deque[float] = deque(maxlen=_RECENT)
        self._safe_batches = 0
        self._safe_seconds = time.monotonic()

    def start(self, batches_done: int, *, restored: bool = False) -> None:
        """Record that training starts with `batches_done` batches, all of them safe."""
        self._safe_batches, self._safe_seconds = batches_done, time.monotonic()
        self.started_batches, self.restores = batches_done, int(restored)

    def interval_begins(self, now_seconds: float) -> None:
        """Record that an interval begins at this monotonic time: a due checkpoint, or the start."""
        if self._interval_began is not None:
            self.interval_seconds = now_seconds - self._interval_began
        self._interval_began = now_seconds

    def stalled(self, milliseconds: float) -> None:
        """Record how long training stood still for a snapshot."""
        self._stalls_ms.append(milliseconds)
        self.stalls.add(milliseconds / 1e3)

    def add_copied(self, copied: CopiedRows) -> None:
        """Record the rows that a checkpoint copied before its stall and in it."""
        self.copied = copied
        self.copied_rows["before"] += copied.rows_before
        self.copied_rows["in_stall"] += copied.rows_in_stall
        self.copied_bytes["before"] += copied.bytes_before
        self.copied_bytes["in_stall"] += copied.bytes_in_stall

    def lost(self, error: BaseException) -> None:
        """Record that a checkpoint failed with this error."""
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
        """Record that a checkpoint is committed.

        Args:
            batches: batches done at its cut.
            cut_seconds: monotonic time of its cut.
            kind: full or increment.
            stored_bytes: bytes of its chunks.
            committed_ms: time of the commit on the clock of the agent's host, in milliseconds since
                the epoch.
            turn_seconds: monotonic time from which the agent could work on it. It is later than the
                cut if the agent first had to finish an earlier checkpoint. None: `cut_seconds`.
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
        """Mean of the last 8 stalls; None before the first."""
        recent = list(self._stalls_ms)[-_RECENT:]
        return sum(recent) / len(recent) / 1_000 if recent else None

    @property
    def persist_seconds(self) -> float | None:
        """Median time in which the last 8 checkpoints were committed; None: too few were.

        If the number is even, it is the lower median. One checkpoint that waited for an absent
        agent or store does not change it. A full among increments does not change it either; a
        checkpoint that is due before the full is stored is taken late, as `when_busy` says.
        """
        recent = list(self._persists_seconds)
        return median_low(recent) if len(recent) >= _LEAST_PERSISTS else None

    @property
    def safe_batches(self) -> int:
        """Batches of the newest committed checkpoint; without one, batches done at the start."""
        return self._safe_batches

    @property
    def lag_seconds(self) -> float:
        """Age of the newest committed checkpoint, or of training if there is none."""
        return time.monotonic() - self._safe_seconds

    def read(
        self,
        batches_done: int,
        cache: CacheStats | None = None,
        loss: LossFigures | None = None,
        keyed: Mapping[str, KeyCounts] | None = None,
    ) -> Stats:
        """Return the counters as they are now, with those of a cache, a loss and keyed tables."""
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
            copied=self.copied,
            cache=cache,
            loss=loss,
            keyed=keyed or {},
        )


def _error_text(error: BaseException) -> str:
    try:
        text = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])
    except Exception as broken:  # the class may be a user's, for instance of a reader's error
        text = f"its message cannot be read ({type(broken).__name__})"
    return f"{type(error).__name__}: {text}"
