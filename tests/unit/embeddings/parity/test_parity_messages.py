"""Messages between servers that keep parity: what is sent, what is kept, and what comes late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from recpoint.embeddings.home.contract import Home, TableRows
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.embeddings.parity.differences import Added, Inbox, Outbox, Writes
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import (
    Differences,
    Members,
    OutOfStep,
    Peer,
    Sent,
    TableShare,
    TableSlots,
)
from recpoint.embeddings.parity.stripes import Parity, stripes_of
from recpoint.embeddings.server.parity_messages import SendDifferences, SentNote
from recpoint.errors import HomeError
from recpoint.testing.homes import ids_of

T = TypeVar("T")

TABLE = "items"
RECORD_BYTES = 5


class Kept(Peer):
    """Keeps what is sent to another server.

    Attributes:
        sent: the differences.
        is_closed: whether `close` was called.
    """

    def __init__(self) -> None:
        self.sent: list[Differences] = []
        self.is_closed = False

    @property
    def is_unreached(self) -> bool:
        return False

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        self.sent += [given for _, given in messages]

    def rows(
        self, wanted: Sequence[TableSlots], *, recover: bool, is_condensed: bool = False
    ) -> Members:
        pytest.fail("nobody asks for rows here")

    def parity_rows(
        self,
        wanted: Sequence[TableSlots],
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        pytest.fail("nobody asks for rows here")

    def decoded(self, wanted: Sequence[TableSlots], lost: int) -> Members:
        pytest.fail("nobody asks for rows here")

    def close(self) -> None:
        self.is_closed = True


class FailingHome(MemoryHome):
    """Has no room for some tables at times.

    Attributes:
        full: these tables.
    """

    def __init__(self) -> None:
        super().__init__()
        self.full: set[str] = set()

    def _require_room(self, table: str) -> None:
        if table in self.full:
            raise HomeError("the disk", found="no room", expected="room", next_step="make room")

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        self._require_room(table)
        super().write_back(table, ids, records, batch=batch)

    def exclusive_or(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        self._require_room(table)
        super().exclusive_or(table, ids, records, batch=batch)


def one_by_one(calls: Sequence[Callable[[], T]]) -> list[T]:
    return [call() for call in calls]


def member(
    peers: Mapping[int, tuple[int, Peer]],
    home: Home | None = None,
    tables: Mapping[str, int] = MappingProxyType({TABLE: RECORD_BYTES}),
) -> StripeMember:
    """Server 1 of three, with 60 rows of each table, by their bytes."""
    home = home or MemoryHome()
    made = StripeMember(0, 7, home, peers, together=one_by_one)
    made.is_open = True
    for table, record_bytes in tables.items():
        stripes = stripes_of(table, rows=60, parity=Parity(data=2), hosts="abc")
        home.add_table(table, rows=stripes.slots(0), record_bytes=record_bytes)
        made.add_table(table, stripes, record_bytes)
    return made


def write(here: StripeMember, slots: list[int], value: int) -> None:
    records = torch.full((len(slots), RECORD_BYTES), value, dtype=torch.uint8)
    here.write([TableRows(TABLE, torch.tensor(slots, dtype=torch.int64), records)])


def test_rows_that_do_not_change_are_not_sent() -> None:
    """A call that is made again while a server is lost fills no queue."""
    peers = {1: Kept(), 2: Kept()}
    here = member({number: (number, peer) for number, peer in peers.items()})
    write(here, [0, 1, 2, 3], 1)
    for _ in range(100):
        write(here, [0, 1, 2, 3], 1)
    write(here, [0, 1, 2, 3, 4], 1)
    assert here.other_servers.difference_rows == 5
    here.other_servers.flush()
    given = [one for peer in peers.values() for one in peer.sent]
    assert sum(len(one.slots) for one in given) == 5
    assert all(bool((one.rows[:, :-1] == 1).all()) and len(one.slots) for one in given)


def test_tables_whose_rows_have_one_length_share_a_message() -> None:
    peers = {1: Kept(), 2: Kept()}
    tables = {"a": 5, "b": 5, "c": 9}
    here = member({number: (number, peer) for number, peer in peers.items()}, tables=tables)
    some = ids_of(range(6))
    here.write(
        [
            TableRows(table, some, torch.full((6, size), size, dtype=torch.uint8))
            for table, size in tables.items()
        ]
    )
    here.other_servers.flush()
    for peer in peers.values():
        assert [[one.table for one in given.tables] for given in peer.sent] == [["a", "b"], ["c"]]
        for given in peer.sent:
            assert sum(one.rows for one in given.tables) == len(given.slots) == len(given.rows)
    assert here.other_servers.difference_rows == 3 * 6


def test_differences_of_a_write_that_fails_in_the_middle_are_those_of_the_rows_stored() -> None:
    peers = {1: Kept(), 2: Kept()}
    home = FailingHome()
    linked = {number: (number, peer) for number, peer in peers.items()}
    here = member(linked, home, {"a": RECORD_BYTES, "b": RECORD_BYTES})
    rows = [
        TableRows(table, ids_of(range(6)), torch.ones(6, RECORD_BYTES, dtype=torch.uint8))
        for table in "ab"
    ]
    home.full = {"b"}
    with pytest.raises(HomeError, match="no room"):
        here.write(rows)
    here.other_servers.flush()
    sent = [given for peer in peers.values() for given in peer.sent]
    assert all(given.tables for given in sent)
    assert {one.table for given in sent for one in given.tables} == {"a"}
    assert sum(len(given.slots) for given in sent) == 6
    for peer in peers.values():
        peer.sent.clear()
    home.full = set()
    here.write(rows)  # as its trainer does
    here.other_servers.flush()
    again = [given for peer in peers.values() for given in peer.sent]
    assert {one.table for given in again for one in given.tables} == {"b"}


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_message_that_fails_in_the_middle_is_added_once(is_lost: bool) -> None:
    """It comes again, or its sender is lost and it is taken back."""
    home = FailingHome()
    here = member({1: (1, Kept()), 2: (2, Kept())}, home, {"a": 3, "b": 3})
    rows = torch.full((2, 4), 9, dtype=torch.uint8)
    shares = [TableShare("a", 0, 1), TableShare("b", 0, 1)]
    given = Differences(tables=shares, slots=torch.tensor([0, 0]), rows=rows)
    here.other_servers.receive([(message(1), given)])
    home.full = {"b\0parity"}
    for _ in range(3):
        with pytest.raises(HomeError, match="no room"):
            here.other_servers.receive([(message(2), given)])

    def parity(table: str, at: int | None = None) -> list[int]:
        moments = {} if at is None else {1: (1, at)}
        return here.parity_rows([TableSlots(table, torch.tensor([0]))], moments).rows[0].tolist()

    assert parity("a", 1) == parity("b", 1) == [9] * 4, "what message 2 has added is left out"
    if is_lost:
        home.full = {"a\0parity"}
        report = here.other_servers.lose(1, 1)
        assert report is not None and report.applied == 1
        for _ in range(2):
            with pytest.raises(HomeError, match="no room"):
                here.other_servers.take_back(1, 1, [1])
        home.full = {"b\0parity"}
        with pytest.raises(HomeError, match="no room"):
            here.other_servers.take_back(1, 1, [1])
        assert parity("a") == parity("b") == [9] * 4, "message 1 is left"
        home.full = set()
        here.other_servers.take_back(1, 1, [1])
    else:
        home.full = set()
        here.other_servers.receive([(message(2), given)])
    assert parity("a") == parity("b") == [0] * 4


@pytest.mark.parametrize(
    ("shares", "error", "match"),
    [
        ([TableShare(TABLE, 0, 2)], ValueError, "1 slots, expected 2"),
        ([TableShare(TABLE, 0, 1), TableShare(TABLE, 0, 0)], ValueError, "twice"),
        ([TableShare("other", 0, 1)], OutOfStep, "no table 'other'"),
    ],
)
def test_differences_that_fit_no_table_are_refused(
    shares: list[TableShare], error: type[Exception], match: str
) -> None:
    here = member({1: (1, Kept()), 2: (2, Kept())})
    with pytest.raises(error, match=match):
        here.other_servers.receive([(message(1), replace(difference(), tables=shares))])
    with pytest.raises(ValueError, match="5 bytes a row, expected 6"):
        here.other_servers.receive([(message(1), difference(RECORD_BYTES))])
    here.other_servers.receive([(message(1), difference())])
    slots = TableSlots(TABLE, torch.tensor([0]))
    assert here.parity_rows([slots], {}).rows.all()
    with pytest.raises(OutOfStep, match="message 2, which has not arrived"):
        here.parity_rows([slots], {1: (1, 2)})
    for wanted in ([], [slots, slots]):
        with pytest.raises(ValueError, match="expected different ones"):
            here.rows(wanted, recover=True)


def message(number: int, incarnation: int = 1, settled: int = 0) -> Sent:
    shares = {0: (7, number), 2: (2, number)}
    return Sent(
        source=1,
        incarnation=incarnation,
        number=number,
        write=number,
        shares=shares,
        settled=settled,
    )


def difference(row_bytes: int = RECORD_BYTES + 1) -> Differences:
    rows = torch.ones(1, row_bytes, dtype=torch.uint8)
    return Differences(tables=[TableShare(TABLE, 0, 1)], slots=torch.tensor([0]), rows=rows)


def test_what_a_call_says_of_its_messages_is_bounded() -> None:
    outbox, writes = Outbox(7), Writes()
    for number in range(1, 257):
        shares = {receiver: (1 << 62, number) for receiver in range(250)}
        sent = Sent(
            source=0, incarnation=1, number=number, write=writes.begin(shares), shares=shares
        )
        outbox.add(sent, difference())
    messages = outbox.oldest(writes)
    assert [sent.number for sent, _ in messages] == list(range(1, len(messages) + 1))
    notes = tuple(SentNote.of(*one) for one in messages)
    text = SendDifferences(incarnation=1, messages=notes).model_dump_json()
    assert len(messages) > 1 and 0 < len(text) < 1 << 20


def test_small_messages_do_not_fill_memory() -> None:
    """Their rows have 6 bytes each. What is kept of them takes much more."""
    inbox, given, count = Inbox(1), Added(difference()), 50_000
    for number in range(1, count + 1):
        inbox.add(message(number, settled=number - 1), given)
    kept = sum(inbox.kept(number) is not None for number in range(1, count + 1))
    assert 1_000 < kept < (64 << 20) // 1_500
    assert inbox.kept(count) is given


def test_a_message_that_is_missing_is_not_skipped() -> None:
    inbox = Inbox(1)
    assert inbox.is_new(message(1))
    with pytest.raises(OutOfStep, match="message 2 after message 0"):
        inbox.is_new(message(2))
    inbox.add(message(1), Added(difference()))
    assert not inbox.is_new(message(1)) and inbox.is_new(message(2))


def test_differences_of_before_a_table_was_cleared_change_no_parity_row() -> None:
    receiver = member({1: (1, Kept()), 2: (2, Kept())})
    receiver.clear(TABLE, 1)
    receiver.other_servers.receive([(message(1), difference())])
    assert not receiver.parity_rows([TableSlots(TABLE, torch.tensor([0]))], {1: (1, 1)}).rows.any()


def test_a_late_call_about_a_lost_server_drops_no_successor() -> None:
    first, late, successor = Kept(), Kept(), Kept()
    here = member({1: (1, first), 2: (2, Kept())})
    here.other_servers.receive([(message(1), difference())])
    with pytest.raises(OutOfStep, match="not lost"):
        here.other_servers.take_back(1, 1, [1])
    report = here.other_servers.lose(1, 1)
    assert report is not None and report.applied == 1 and first.is_closed
    here.other_servers.take_back(1, 1, [1], are_all=False)
    assert here.other_servers.lose(1, 1) is not None, "more may follow"
    here.other_servers.take_back(1, 1, [])
    here.other_servers.join(1, 1, late)
    assert late.is_closed
    with pytest.raises(OutOfStep, match="not joined"):
        here.other_servers.receive([(message(2), difference())])
    here.other_servers.join(1, 11, successor)
    here.other_servers.receive([(message(1, incarnation=11), difference())])
    assert here.other_servers.lose(1, 1) is None
    here.other_servers.take_back(1, 1, [1])
    here.other_servers.join(1, 1, Kept())
    here.other_servers.receive([(message(2, incarnation=11), difference())])
    write(here, list(range(8)), 1)
    here.other_servers.flush()
    assert successor.sent and not successor.is_closed and not first.sent
    # 1 was taken back, and the successor's two messages take each other away.
    assert not here.parity_rows([TableSlots(TABLE, torch.tensor([0]))], {}).rows.any()
