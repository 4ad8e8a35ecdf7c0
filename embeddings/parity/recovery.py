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

    def lose(self, server: int, incarnation: int) -> Unsettled | None:
        """See `StripeMember.lose`."""

    def take_back(self, server: int, incarnation: int, numbers: Sequence[int]) -> None:
        """See `StripeMember.take_back`."""


class Recovery:
    """Remembers which messages of lost servers are to be taken back, until that is done."""

    def __init__(self) -> None:
        #: Number and incarnation of a lost server -> for each receiver the numbers of messages.
        self._back: dict[tuple[int, int], Mapping[int, Sequence[int]]] = {}

    def forget(self, lost: int, incarnation: int, living: Mapping[int, Led]) -> None:
        """Have all living servers forget a lost one.

        If it fails, because another server is lost meanwhile, it is called again without that one.

        Args:
            lost: number of the lost server. Its process has ended, or cannot write any more.
            incarnation: of the lost server.
            living: all other servers that live, by number.
        """
        key = lost, incarnation
        reports = [server.lose(lost, incarnation) for server in living.values()]
        if key not in self._back:
            # What is taken back is settled once, while no server has forgotten anything yet.
            self._back[key] = taken_back(report for report in reports if report is not None)
        for number, server in living.items():
            server.take_back(lost, incarnation, self._back[key].get(number, []))
        del self._back[key]

    def begin_anew(self) -> None:
        """Forget everything: all servers begin without rows."""
        self._back.clear()
