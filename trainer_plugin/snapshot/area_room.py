"""Compares the room of a staging area with what the slots of a host's ranks may take there."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.contract import Clocks
from recpoint.errors import SettingsError
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.snapshot.host_memory import HostMemory, host_memory, is_in_memory

__all__ = ["AreaRoom", "HostShare", "SmallStagingArea", "host_share", "share_of"]


class HostShare(NamedTuple):
    """The ranks whose staging areas lie on one file system of one host, and what they take.

    Attributes:
        ranks: these ranks, ascending.
        bound_bytes: the most bytes that their slots take together.
    """

    ranks: tuple[int, ...]
    bound_bytes: int


def host_share(ranks: Ranks, root: Path, bound_bytes: int) -> HostShare:
    """Return the share of this rank's host. Collective: one exchange.

    Args:
        ranks: the ranks of the job.
        root: this rank's staging area; it need not exist yet.
        bound_bytes: the most bytes that the slots of this rank take.
    """
    return share_of(ranks.rank, ranks.exchange("the memory of hosts", [*_place(root), bound_bytes]))


def share_of(rank: int, answers: Sequence[Sequence[int]]) -> HostShare:
    """Return the share of the ranks that have the same host and file system as `rank`.

    Args:
        rank: one of these ranks.
        answers: for each rank: its host, its file system, and the most bytes that it takes.
    """
    place = answers[rank][:2]
    together = {rank: answer[2] for rank, answer in enumerate(answers) if answer[:2] == place}
    return HostShare(tuple(together), sum(together.values()))


def _place(root: Path) -> tuple[int, int]:
    """Return numbers of this host's boot and of the file system; containers may have their own."""
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    host = Clocks.read().boot or socket.gethostname()
    digest = hashlib.sha256(host.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True), os.stat(existing).st_dev


class SmallStagingArea(RuntimeWarning):
    """Warns of a staging area that is too small for the checkpoints that may be staged there."""


class _FreeRoom(NamedTuple):
    """The room of a staging area.

    Attributes:
        size_bytes: size of its file system; 0: a tmpfs without a limit.
        unused_bytes: what the file system has free.
        memory: the memory that holds the files; None: they are on a disk, or it is unknown.
    """

    size_bytes: int
    unused_bytes: int
    memory: HostMemory | None

    @property
    def most_bytes(self) -> float:
        """The bytes that files could take there if nothing else took any."""
        size = self.size_bytes or math.inf
        return size if self.memory is None else min(size, self.memory.size_bytes)

    @property
    def free_bytes(self) -> int:
        """The bytes that files can take there now."""
        if self.memory is None:
            return self.unused_bytes
        if self.size_bytes == 0:
            return self.memory.free_bytes
        return min(self.unused_bytes, self.memory.free_bytes)


class AreaRoom:
    """The room for the slots of a run in its staging area.

    Args:
        root: directory of the staging area, which need not exist yet.
        staged_run: the run's part of it.
        rank: rank of this process.
    """

    def __init__(self, root: Path, staged_run: StagedRun, rank: int) -> None:
        self._root = root
        self._staged_run = staged_run
        self._rank = rank

    def free_bytes(self, *, all_ranks: bool = False) -> int | None:
        """Return the bytes that slots may take: free room plus present slots; None: unknown.

        Free room is that of the file system, and if that is in memory, at most the free memory.

        Args:
            all_ranks: count the slots of all ranks of this run here; otherwise only this rank's.
        """
        room = self._read()
        if room is None:
            return None
        try:
            whose = "r*-*.bin" if all_ranks else f"r{self._rank:05d}-*.bin"
            slots = self._staged_run.slots_directory.glob(whose)
            return room.free_bytes + sum(path.stat().st_size for path in slots)
        except OSError:
            return None  # `StagingArea.create` reports what is wrong with the area

    def _read(self) -> _FreeRoom | None:
        """Return the room of the staging area, which need not exist yet. None: unknown."""
        place = self._staged_run.path
        try:
            while not place.exists() and place != place.parent:
                place = place.parent
            system = os.statvfs(place)
        except OSError:
            return None  # `StagingArea.create` reports what is wrong with the area
        memory = host_memory() if is_in_memory(place) else None
        unit = system.f_frsize
        return _FreeRoom(system.f_blocks * unit, system.f_bavail * unit, memory)

    def refuse_if_small(self, share: HostShare, *, jobs: int) -> None:
        """Refuse a file system, or memory, that is too small for even the first snapshots.

        Only the whole size counts, because what fills it now may be removed.

        Args:
            share: share of the ranks on this file system.
            jobs: number of staged jobs for which the share of each rank has room.

        Raises:
            SettingsError: it is too small.
        """
        room = self._read()
        needed_bytes = share.bound_bytes // jobs
        if room is None or needed_bytes <= room.most_bytes:
            return
        several = f"s of {len(share.ranks)} ranks" if len(share.ranks) > 1 else ""
        raise SettingsError(
            f"staging area {self._root}",
            found=f"a file system of {room.size_bytes} bytes"
            + ("" if room.memory is None else f" in memory of {room.memory.size_bytes} bytes"),
            expected=f"at least {needed_bytes} bytes, which the first snapshot{several} may take",
            next_step="set staging= or RECPOINT_STAGING to a directory of a larger file system, "
            "also for the agent; in a container enlarge /dev/shm, as docker run --shm-size does",
        )

    def warn_if_small(self, share: HostShare) -> None:
        """Warn of a `shortage` before training starts, while it is easy to correct."""
        shortage = self.shortage(share)
        if shortage is not None:
            warnings.warn(shortage, SmallStagingArea, stacklevel=3)

    def shortage(self, share: HostShare) -> str | None:
        """Return a message if the slots of this host may not fit; only its first rank gets one."""
        free, room = self.free_bytes(all_ranks=True), self._read()
        if free is None or room is None or free >= share.bound_bytes:
            return None
        if self._rank != share.ranks[0]:
            return None
        several = f" of {len(share.ranks)} ranks" if len(share.ranks) > 1 else ""
        needed = f"staged checkpoints{several} may take {share.bound_bytes} bytes"
        memory = room.memory
        if memory is not None and room.free_bytes < room.unused_bytes:
            return (
                f"staging area {self._root} is in memory: its file system has {room.unused_bytes} "
                f"free bytes, but only {memory.free_bytes} bytes of memory are free, and {needed}; "
                "the system may kill a process for want of memory. Next: set staging= or "
                "RECPOINT_STAGING to a directory on a disk, or free memory: recpoint info names "
                "slots that were left behind"
            )
        return (
            f"staging area {self._root}: {free} bytes are free, and {needed}; checkpoints that do "
            "not fit are skipped. Next: set staging= or RECPOINT_STAGING to a larger directory"
        )
