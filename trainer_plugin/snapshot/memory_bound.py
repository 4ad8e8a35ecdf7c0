"""Measures the most memory that slots take in the staging area, and follows its growth."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.optim import Optimizer

from recpoint.interrupts import came_from_handler
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot.area_room import HostShare, host_share
from recpoint.trainer_plugin.snapshot.cut import Cutter
from recpoint.trainer_plugin.snapshot.staging import StagingArea

__all__ = ["MemoryBound"]


_log = logging.getLogger("recpoint")

#: Growth by less than 1/100 is not logged: it happens when numbers in the state tree get longer.
_NEWS = 100

#: No number of entries: they are counted again.
_UNKNOWN = -1


class MemoryBound:
    """Knows the most bytes that slots take, for this rank and for its host.

    Most optimizers create their state in their first step, and nothing says in advance how large it
    will be, so the first bound of a run does not include it. The entries of optimizer state are
    therefore counted after each step. If there are more, the bound is measured again, outside any
    stall.

    Args:
        ranks: the ranks of the job.
        area: the staging area that holds the slots.
        cutter: knows the size of a full.
        optimizers: the optimizers, whose state grows.
        jobs: the most slots of this rank.

    Attributes:
        own_bytes: the most bytes that the slots of this rank take.
        host: the same for all ranks whose staging areas share a file system, as far as known: ranks
            report their growth only when a checkpoint is due.
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
        # Only optimizers with a plain `state` dict: others may compute it on each access, slowly.
        self._optimizers = tuple(
            optimizer for optimizer in optimizers if isinstance(_state(optimizer), dict)
        )
        self._jobs = jobs
        self._entries = 0
        self._told_bytes = 0
        self._base_bytes = 0
        self.own_bytes = 0
        self.host = HostShare((ranks.rank,), 0)

    def measure(self) -> None:
        """Measure the bound of this rank for the present state.

        Raises:
            SettingsError: part of the state cannot be stored; the message names its path.
        """
        self.own_bytes = self._measured()

    def agree(self) -> HostShare:
        """Add up the bounds of the ranks of this host. Collective."""
        self.host = host_share(self._ranks, self._area.root, self.own_bytes)
        self._told_bytes = self.host.bound_bytes
        return self.host

    def begin(self, run_url: str, *, generation: int, batches_done: int) -> None:
        """Measure and log the bound as a generation begins. Collective.

        What ranks that are gone have left in the staging area is removed.

        Args:
            run_url: URL of the run.
            generation: the generation.
            batches_done: batches so far.
        """
        self.measure()
        share = self.agree()
        self._area.clear_other_ranks(share.ranks, generation)
        _log.info(
            "generation %d of %s: %d batches done; staged checkpoints take at most %d bytes of %s"
            "; those of all %d rank(s) of this host at most %d bytes",
            generation,
            run_url,
            batches_done,
            self.own_bytes,
            self._area.root,
            len(share.ranks),
            share.bound_bytes,
        )

    def has_grown(self) -> bool:
        """Whether state was created or a table grew, so that `follow` is due; asked each step."""
        try:
            return self._count() != self._entries
        except Exception as error:
            if came_from_handler(error):
                raise
            return True  # a user's state that cannot be read; `follow` logs the error

    def note_larger_table(self) -> None:
        """Take note that a table has more rows now, so that `follow` is due."""
        self._entries = _UNKNOWN

    def follow(self) -> bool:
        """Measure again if optimizers have created state, or a table has grown. Never raises.

        Returns:
            Whether it was measured again.
        """
        try:
            if self._count() != self._entries:
                self._grow(self._measured())
                return True
        except Exception as error:
            # A user's state_dict or a driver failed. The cut meets the same error and counts it.
            _log.warning(
                "the most bytes that staged checkpoints take is no longer known, because the state "
                "could not be measured: %s",
                error,
            )
        return False

    def cut(self, slot_bytes: int) -> None:
        """Raise the bound if a checkpoint took more of its slot: some state grows unannounced."""
        self._grow(self._jobs * slot_bytes + self._base_bytes)

    def note_bounds(self, bounds: Sequence[int]) -> None:
        """Take over the bounds that all ranks of the job reported, in bytes, in rank order."""
        if self._ranks.several:
            total = sum(bounds[rank] for rank in self.host.ranks)
            self.host = self.host._replace(bound_bytes=total)
            self._log_bound()

    def _measured(self) -> int:
        # Counted first: if the measuring fails, it is not repeated after each step.
        self._entries = self._count()
        self._base_bytes = self._cutter.base_bytes()
        return self._jobs * self._cutter.size_bytes() + self._base_bytes

    def _count(self) -> int:
        """Return the number of state entries; cheap enough to be called after each step."""
        return sum([len(_state(optimizer)) for optimizer in self._optimizers])

    def _grow(self, measured: int) -> None:
        if measured > self.own_bytes:
            more = measured - self.own_bytes
            self.own_bytes = measured  # never lowered, because slots do not shrink
            self.host = self.host._replace(bound_bytes=self.host.bound_bytes + more)
            if not self._ranks.several:
                self._log_bound()

    def _log_bound(self) -> None:
        if self.host.bound_bytes - self._told_bytes <= self._told_bytes // _NEWS:
            return
        self._told_bytes = self.host.bound_bytes
        _log.info(
            "staged checkpoints take at most %d bytes of %s with the present optimizer state; those"
            " of all %d rank(s) of this host at most %d bytes",
            self.own_bytes,
            self._area.root,
            len(self.host.ranks),
            self.host.bound_bytes,
        )
        shortage = self._area.room.shortage(self.host)
        if shortage is not None:
            _log.warning("%s", shortage)  # not warnings.warn: a filter may turn it into an error


def _state(optimizer: Optimizer) -> dict[object, object]:
    state: dict[object, object] = vars(optimizer).get("state", {})
    return state
