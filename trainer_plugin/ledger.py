"""Checkpoints on their way: what each holds, and what its outcome means for the next.

All methods are called from the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recpoint.embeddings.marks import Dirty, Tracker
from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.base_history import BaseHistory
from recpoint.trainer_plugin.policy import Link, Tip, breaks_chain

__all__ = ["Ledger", "Pending"]


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
