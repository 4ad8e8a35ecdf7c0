"""Answers the messages of parity: those of the training's leader, and those of other servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import Differences, Members, TableSlots
from recpoint.embeddings.server.parity_messages import (
    AskKnown,
    DecodeRows,
    GetParityRows,
    GetRows,
    GiveUp,
    JoinServer,
    KnownRows,
    ListTables,
    LoseServer,
    LossReport,
    MembersNote,
    OpenServer,
    SendDifferences,
    TableForms,
    TakeBack,
    UnsettledNote,
)
from recpoint.embeddings.server.protection import Protection
from recpoint.embeddings.server.transport import Done, Message, Reply, SlotRows

__all__ = ["TO_LEADER", "TO_SERVERS"]

#: Tables that one answer names.
_TABLES_AN_ANSWER: Final = 64
_DONE: Final = Done()


def _join(protection: Protection, message: JoinServer) -> Reply[Done]:
    peer = message.peer
    protection.join(peer.server, peer.incarnation, peer.host, peer.port)
    return Reply(_DONE)


def _open(protection: Protection, message: OpenServer) -> Reply[Done]:
    protection.open()
    return Reply(_DONE)


def _lose(protection: Protection, message: LoseServer) -> Reply[LossReport]:
    member = protection.member
    unsettled = member.other_servers.lose(message.server, message.of_incarnation)
    if unsettled is None:
        return Reply(LossReport(unsettled=None, are_all=True))
    part = unsettled.part(message.start)
    are_all = message.start + len(part.writes) >= len(unsettled.writes)
    return Reply(LossReport(unsettled=UnsettledNote.of(part), are_all=are_all))


def _take_back(protection: Protection, message: TakeBack) -> Reply[Done]:
    protection.member.other_servers.take_back(
        message.server, message.of_incarnation, message.numbers, are_all=message.are_all
    )
    return Reply(_DONE)


def _give_up(protection: Protection, message: GiveUp) -> Reply[Done]:
    protection.has_given_up = True
    return Reply(_DONE)


def _list_tables(protection: Protection, message: ListTables) -> Reply[TableForms]:
    all_tables = sorted(protection.member.tables.items())
    page = all_tables[message.start : message.start + _TABLES_AN_ANSWER]
    are_all = message.start + len(page) >= len(all_tables)
    return Reply(TableForms(tables=tuple((name, *form) for name, form in page), are_all=are_all))


def _known(protection: Protection, message: AskKnown) -> Reply[KnownRows]:
    rows = protection.member.known
    return Reply(
        KnownRows(known_rows=rows.known, all_rows=rows.all, has_given_up=protection.has_given_up)
    )


def _receive_differences(
    member: StripeMember, message: SendDifferences, rows: Sequence[SlotRows]
) -> Reply[Done]:
    sent = []
    for note, (slots, records) in zip(message.messages, rows, strict=True):
        assert records is not None
        differences = Differences(tables=note.table_shares, slots=slots, rows=records)
        sent.append((note.sent, differences))
    member.other_servers.receive(sent)
    return Reply(_DONE)


def _rows(member: StripeMember, message: GetRows, rows: Sequence[SlotRows]) -> Reply[MembersNote]:
    return _members(
        message,
        member.rows(
            _slots_of(message.tables, rows),
            recover=message.recover,
            is_condensed=message.is_condensed,
        ),
    )


def _parity_rows(
    member: StripeMember, message: GetParityRows, rows: Sequence[SlotRows]
) -> Reply[MembersNote]:
    return _members(
        message,
        member.parity_rows(
            _slots_of(message.tables, rows), message.at, is_condensed=message.is_condensed
        ),
    )


def _decoded(
    member: StripeMember, message: DecodeRows, rows: Sequence[SlotRows]
) -> Reply[MembersNote]:
    return _members(message, member.recovery.decoded(_slots_of(message.tables, rows), message.lost))


def _slots_of(names: Sequence[str], rows: Sequence[SlotRows]) -> list[TableSlots]:
    return [TableSlots(name, part.slots) for name, part in zip(names, rows, strict=True)]


def _members(message: GetRows | GetParityRows | DecodeRows, members: Members) -> Reply[MembersNote]:
    if members.rows.shape[1] != message.each_bytes:
        raise ValueError(f"rows of {message.each_bytes} bytes, expected {members.rows.shape[1]}")
    note = MembersNote.of(members.moment, members.generations)
    return Reply(note, [members.is_known, members.rows])


#: For each message of the leader, apart from `Protect`, what a server's `Protection` answers.
TO_LEADER: Final[Mapping[type[Message[Any]], Callable[[Protection, Any], Reply[Any]]]] = {
    JoinServer: _join,
    OpenServer: _open,
    LoseServer: _lose,
    TakeBack: _take_back,
    GiveUp: _give_up,
    ListTables: _list_tables,
    AskKnown: _known,
}
#: For each message of other servers what a server's `StripeMember` answers.
TO_SERVERS: Final[
    Mapping[type[Message[Any]], Callable[[StripeMember, Any, Sequence[SlotRows]], Reply[Any]]]
] = {
    SendDifferences: _receive_differences,
    GetRows: _rows,
    GetParityRows: _parity_rows,
    DecodeRows: _decoded,
}
