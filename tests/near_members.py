"""Members of stripes that call each other in one process, without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from recpoint.embeddings.home.memory import MemoryHome
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import Differences, Members, Peer, Sent, TableSlots
from recpoint.embeddings.parity.stripes import Parity, stripes_of

__all__ = ["Near", "near_members", "replaced"]

T = TypeVar("T")

#: Two rows of a stripe and their parity row are on three servers.
_PARITY = Parity(data=2)
_HOSTS = "abc"


class Near(Peer):
    """Calls a member of the same process."""

    def __init__(self, members: dict[int, StripeMember], number: int) -> None:
        self._members = members
        self._number = number

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        self._members[self._number].other_servers.receive(messages)

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        member = self._members[self._number]
        return member.rows(wanted, recover=recover, is_condensed=is_condensed)

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        member = self._members[self._number]
        return member.parity_rows(wanted, at, is_condensed=is_condensed)

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        return self._members[self._number].recovery.decoded(wanted, lost)

    @property
    def is_unreached(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


def _one_by_one(calls: Sequence[Callable[[], T]]) -> list[T]:
    return [call() for call in calls]


def near_members(tables: Mapping[str, int], rows: int) -> dict[int, StripeMember]:
    """Return three members that keep parity of tables, given by their bytes of a row.

    Args:
        tables: name -> bytes of a row.
        rows: of each table.
    """
    members: dict[int, StripeMember] = {}
    for number in range(len(_HOSTS)):
        _begin(members, number, number + 1, tables, rows, is_lost=False)
    return members


def replaced(
    members: dict[int, StripeMember], lost: int, tables: Mapping[str, int], rows: int
) -> StripeMember:
    """Return the successor of a member, which has lost all rows; see `near_members`."""
    survivors = [member for number, member in members.items() if number != lost]
    for member in survivors:
        member.other_servers.lose(lost, lost + 1)
        member.other_servers.take_back(lost, lost + 1, [])
        member.other_servers.join(lost, lost + 11, Near(members, lost))
    return _begin(members, lost, lost + 11, tables, rows, is_lost=True)


def _begin(
    members: dict[int, StripeMember],
    number: int,
    incarnation: int,
    tables: Mapping[str, int],
    rows: int,
    *,
    is_lost: bool,
) -> StripeMember:
    home = MemoryHome()
    neighbours = {
        number_there: (number_there + 1, Near(members, number_there))
        for number_there in range(len(_HOSTS))
        if number_there != number
    }
    member = members[number] = StripeMember(
        number, incarnation, home, neighbours, together=_one_by_one
    )
    member.is_open = True
    for table, record_bytes in tables.items():
        stripes = stripes_of(table, rows=rows, parity=_PARITY, hosts=_HOSTS)
        home.add_table(table, rows=stripes.slots(number), record_bytes=record_bytes)
        member.add_table(table, stripes, record_bytes, is_lost=is_lost)
    return member
