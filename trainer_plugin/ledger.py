"""Checkpoints on their way: what each holds, and what its outcome means for the next.

All methods are called from the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recpoint.format.records import CheckpointRef
from recpoint.trainer_plugin.policy import Link, Tip, breaks_chain
from recpoint.trainer_plugin.tracking import Dirty, Tracker

__all__ = ["Ledger", "Pending"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pending:
    """A checkpoint that was cut and has no outcome yet.

    Attributes:
        dirty: table name -> the rows it holds; they are dirty again if it comes to nothing.
        tip_before: the chain's tip when it was cut.
        slot: name of the slot it lies in.
        cut_seconds: monotonic time of the cut.
    """

    ref: CheckpointRef
    link: Link
    dirty: Mapping[str, Dirty]
    tip_before: Tip | None
    slot: str
    cut_seconds: float

    @property
    def base(self) -> CheckpointRef:
        """The full that its chain starts from."""
        return self.link.base or self.ref


class Ledger:
    """The chain of this trainer and the checkpoints that wait for their outcomes.

    Attributes:
        tip: what the next increment is taken after; None: the next is a full.
    """

    def __init__(self, trackers: Mapping[str, Tracker], tip: Tip | None) -> None:
        self._trackers = trackers
        self._pending: dict[CheckpointRef, Pending] = {}
        self.tip = tip

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def busy_slots(self) -> set[str]:
        """Names of the slots in use."""
        return {pending.slot for pending in self._pending.values()}

    def add(self, pending: Pending, tip: Tip) -> None:
        """A checkpoint was cut: later ones are taken after it, before its outcome is known."""
        self._pending[pending.ref] = pending
        self.tip = tip

    def committed(self, ref: CheckpointRef) -> Pending | None:
        """It is stored: its rows need no other checkpoint."""
        pending = self._pending.pop(ref, None)
        if pending is not None:
            for name, dirty in pending.dirty.items():
                self._trackers[name].release(dirty)
        return pending

    def lost(self, ref: CheckpointRef, error_type: str) -> Pending | None:
        """It will never be: its rows are dirty again, and nothing may be taken after it."""
        pending = self._pending.pop(ref, None)
        if pending is None:
            return None
        for name, dirty in pending.dirty.items():
            self._trackers[name].merge_back(dirty)
        if self.tip is None or self.tip.base != pending.base:
            return pending  # training is on another chain already
        newest = self.tip.ref == ref
        # Others that were cut after it cannot be committed, so there is nothing to go back to.
        self.tip = pending.tip_before if newest and not breaks_chain(error_type) else None
        return pending
