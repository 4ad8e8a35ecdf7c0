"""What the ranks of one host take together of the staging area that they share."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog.stores.elapsed import Clocks
from recpoint.trainer_plugin.ranks import Ranks

__all__ = ["HostShare", "host_share", "share_of"]


class HostShare(NamedTuple):
    """The slots of the ranks whose staging areas are on one file system of one host.

    Attributes:
        ranks: which they are, ascending.
        bound_bytes: most that their slots take together.
    """

    ranks: tuple[int, ...]
    bound_bytes: int


def host_share(ranks: Ranks, root: Path, bound_bytes: int) -> HostShare:
    """What this rank's host has to hold. Collective: one exchange.

    Args:
        ranks: of the job.
        root: this rank's staging area, or where it will be.
        bound_bytes: most that the slots of this rank take.
    """
    return share_of(ranks.rank, ranks.exchange("the memory of hosts", [*_place(root), bound_bytes]))


def share_of(rank: int, told: Sequence[Sequence[int]]) -> HostShare:
    """Which ranks are at the place of `rank`, and what they take.

    Args:
        rank: one of them.
        told: of each rank its host, its file system, and the bytes that it takes at most.
    """
    place = told[rank][:2]
    together = {other: one[2] for other, one in enumerate(told) if one[:2] == place}
    return HostShare(tuple(together), sum(together.values()))


def _place(root: Path) -> tuple[int, int]:
    """This host since it was started, and the file system: containers may each have their own."""
    there = root
    while not there.exists() and there != there.parent:
        there = there.parent
    host = Clocks.read().boot or socket.gethostname()
    digest = hashlib.sha256(host.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True), os.stat(there).st_dev
