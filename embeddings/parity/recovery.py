"""Leads the living servers from the loss of a server to the start of its successor.

One process of a training, the leader, does this. First all living servers stop listening to the
lost one, and say what they have received from it (`lose`). Then messages of writes that were not
acknowledged are taken back. Now all parity rows of a stripe agree on the rows of the lost server,
and a successor may join and recover them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from recpoint.embeddings.parity.differences import Unsettled, taken_back

__all__ = ["Led", "Recovery"]


class Led(Protocol):
    """The calls that the leader makes to a living server. Each may be repeated."""

    def lose(self, server: int) -> Unsettled | None:
        """See `StripeMember.lose`."""

    def take_back(self, server: int, numbers: Sequence[int]) -> None:
        """See `StripeMember.take_back`."""


class Recovery:
    """Remembers which messages of lost servers are to be taken back, until that is done."""

    def __init__(self) -> None:
        self._back: dict[int, Mapping[int, Sequence[int]]] = {}

    def forget(self, lost: int, living: Mapping[int, Led]) -> None:
        """Have all living servers forget a lost one.

        If it fails, because another server is lost meanwhile, it is called again without that one.

        Args:
            lost: number of the lost server. Its process has ended, or cannot write any more.
            living: all other servers that live, by number.
        """
        reports = [server.lose(lost) for server in living.values()]
        if lost not in self._back:
            # What is taken back is settled once, while no server has forgotten anything yet.
            self._back[lost] = taken_back(report for report in reports if report is not None)
        for number, server in living.items():
            server.take_back(lost, self._back[lost].get(number, []))
        del self._back[lost]

    def begin_anew(self) -> None:
        """Forget everything: all servers begin without rows."""
        self._back.clear()
