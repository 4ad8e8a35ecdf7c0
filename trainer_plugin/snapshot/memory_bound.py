"""What slots take at most in the staging area: measured at the start, and followed from then on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer

from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.staging import HostShare, StagingArea, host_share

__all__ = ["MemoryBound"]


_log = logging.getLogger("recpoint")

#: Growth by less than one part in so many is no news: numbers in the state tree get more digits.
_NEWS = 100


class MemoryBound:
    """The most that slots take, of this rank and of its host.

    Most optimizers make their state when they first step, and nothing says in advance how much it
    will be: the first bound of a run is without it. So what is there is counted after each step,
    and when it has become more, the bound is measured again, outside any stall.

    Args:
        ranks: of the job.
        area: where the slots are.
        cutter: knows what a full takes.
        optimizers: whose state grows.
        jobs: most slots of this rank.

    Attributes:
        own_bytes: most that the slots of this rank take.
        host: the same of all ranks whose staging areas share a file system, as far as it is known:
            what they have grown by since the start they say where a checkpoint is due.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        area: StagingArea,
        cutter: Cutter,
        optimizers: Sequence[Optimizer],
        jobs: int,
    ) -> None:
        self._ranks = ranks
        self._area = area
        self._cutter = cutter
        # Those that keep it as torch does; one that makes it up when asked would be slow to ask.
        self._optimizers = tuple(one for one in optimizers if isinstance(_state(one), dict))
        self._jobs = jobs
        self._entries = 0
        self._told_bytes = 0
        self.own_bytes = 0
        self.host = HostShare((ranks.rank,), 0)

    def measure(self) -> None:
        """Of the state as it is now.

        Raises:
            SettingsError: something in the state cannot be stored; its path is named.
        """
        self.own_bytes = self._measured()

    def agree(self) -> HostShare:
        """With the other ranks of this host. Collective."""
        self.host = host_share(self._ranks, self._area.root, self.own_bytes)
        self._told_bytes = self.host.bound_bytes
        return self.host

    def has_grown(self) -> bool:
        """After each step: whether optimizers have made state, so that `follow` is due."""
        try:
            return self._count() != self._entries
        except Exception as error:
            if came_from_handler(error):
                raise
            return True  # a user's state that cannot be asked; `follow` says so

    def follow(self) -> None:
        """Measure again if optimizers have made state. Never raises."""
        try:
            if self._count() != self._entries:
                self._grow(self._measured())
        except Exception as error:
            # A user's state_dict, a driver: the cut meets it too, and it is counted there.
            _log.warning("what staged checkpoints take at most is not known any more: %s", error)

    def cut(self, slot_bytes: int) -> None:
        """A checkpoint has taken so much of its slot: with state that nobody announces."""
        self._grow(self._jobs * slot_bytes)

    def note_bounds(self, bounds: Sequence[int]) -> None:
        """What the ranks of the job say that theirs is, in their order."""
        if self._ranks.several:
            total = sum(bounds[rank] for rank in self.host.ranks)
            self.host = self.host._replace(bound_bytes=total)
            self._log_bound()

    def _measured(self) -> int:
        # First: what cannot be measured is not tried again after each step.
        self._entries = self._count()
        return self._jobs * self._cutter.size_bytes()

    def _count(self) -> int:
        """Entries of all states: a few lengths, so that it can be asked after each step."""
        return sum([len(_state(one)) for one in self._optimizers])

    def _grow(self, measured: int) -> None:
        if measured > self.own_bytes:
            more = measured - self.own_bytes
            self.own_bytes = measured  # never less: slots do not shrink
            self.host = self.host._replace(bound_bytes=self.host.bound_bytes + more)
            if not self._ranks.several:
                self._log_bound()

    def _log_bound(self) -> None:
        if self.host.bound_bytes - self._told_bytes <= self._told_bytes // _NEWS:
            return
        self._told_bytes = self.host.bound_bytes
        _log.info(
            "staged checkpoints take at most %d bytes of %s with the state that is there now; those"
            " of all %d rank(s) of this host %d bytes",
            self.own_bytes,
            self._area.root,
            len(self.host.ranks),
            self.host.bound_bytes,
        )
        shortage = self._area.shortage(self.host)
        if shortage is not None:
            _log.warning("%s", shortage)  # a warning that is an error would end training


def _state(optimizer: Optimizer) -> dict[object, object]:
    state: dict[object, object] = vars(optimizer).get("state", {})
    return state
