"""Messages between servers that keep parity: what is sent, what is kept, and what comes late."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from recpoint.embeddings.home import TableRows
from recpoint.embeddings.home_in_memory import MemoryHome
from recpoint.embeddings.parity.differences import Inbox, Outbox, Writes
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.peers import Differences, Members, OutOfStep, Peer, Sent
from recpoint.embeddings.parity.stripes import Parity, stripes_of
from recpoint.embeddings.remote.peer_wire import differences_request
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

    def differences(self, messages: Sequence[tuple[Sent, Differences]]) -> None:
        self.sent += [given for _, given in messages]

    def rows(
        self, table: str, slots: Tensor, *, recover: bool, is_condensed: bool = False
    ) -> Members:
        pytest.fail("nobody asks for rows here")

    def parity_rows(
        self,
        table: str,
        slots: Tensor,
        at: Mapping[int, tuple[int, int]],
        *,
        is_condensed: bool = False,
    ) -> Members:
        pytest.fail("nobody asks for rows here")

    def decoded(self, table: str, lost: int, slots: Tensor) -> Members:
        pytest.fail("nobody asks for rows here")

    def close(self) -> None:
        self.is_closed = True


def one_by_one(calls: Sequence[Callable[[], T]]) -> list[T]:
    return [call() for call in calls]


def member(peers: Mapping[int, tuple[int, Peer]]) -> StripeMember:
    home = MemoryHome()
    stripes = stripes_of(TABLE, rows=60, parity=Parity(data=2), hosts="abc")
    home.add_table(TABLE, rows=stripes.slots(0), record_bytes=RECORD_BYTES)
    made = StripeMember(0, 7, home, peers, together=one_by_one)
    made.is_open = True
    made.add_table(TABLE, stripes, RECORD_BYTES)
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
    assert here.difference_rows == 5
    here.flush()
    given = [one for peer in peers.values() for one in peer.sent]
    assert sum(len(one.slots) for one in given) == 5
    assert all(bool((one.rows[:, :-1] == 1).all()) and len(one.slots) for one in given)


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


def difference() -> Differences:
    rows = torch.ones(1, RECORD_BYTES + 1, dtype=torch.uint8)
    return Differences(table=TABLE, generation=0, slots=torch.tensor([0]), rows=rows)


def test_what_a_call_says_of_its_messages_is_bounded() -> None:
    outbox, writes = Outbox(7), Writes()
    for number in range(1, 257):
        shares = {receiver: (1 << 62, number) for receiver in range(250)}
        sent = Sent(
            source=0, incarnation=1, number=number, write=writes.begin(shares), shares=shares
        )
        rows = torch.zeros(1, 9, dtype=torch.uint8)
        outbox.add(sent, Differences(table="t" * 9, generation=0, slots=ids_of([0]), rows=rows))
    messages = outbox.oldest(writes)
    assert [sent.number for sent, _ in messages] == list(range(1, len(messages) + 1))
    text = differences_request(messages, 1)[1 + len(messages)]
    assert len(messages) > 1 and 0 < len(text) < 1 << 20


def test_small_messages_do_not_fill_memory() -> None:
    """Their rows have 6 bytes each. What is kept of them takes much more."""
    inbox, given, count = Inbox(1), difference(), 50_000
    for number in range(1, count + 1):
        inbox.add(message(number, settled=number - 1), given)
    kept = sum(inbox.kept(number) is not None for number in range(1, count + 1))
    assert 1_000 < kept < (64 << 20) // 1_500
    assert inbox.kept(count) is given


def test_a_late_call_about_a_lost_server_drops_no_successor() -> None:
    first, late, successor = Kept(), Kept(), Kept()
    here = member({1: (1, first), 2: (2, Kept())})
    here.receive([(message(1), difference())])
    with pytest.raises(OutOfStep, match="not lost"):
        here.take_back(1, 1, [1])
    report = here.lose(1, 1)
    assert report is not None and report.applied == 1 and first.is_closed
    here.take_back(1, 1, [1], are_all=False)
    assert here.lose(1, 1) is not None, "more may follow"
    here.take_back(1, 1, [])
    here.join(1, 1, late)
    assert late.is_closed
    with pytest.raises(OutOfStep, match="not joined"):
        here.receive([(message(2), difference())])
    here.join(1, 11, successor)
    here.receive([(message(1, incarnation=11), difference())])
    assert here.lose(1, 1) is None
    here.take_back(1, 1, [1])
    here.join(1, 1, Kept())
    here.receive([(message(2, incarnation=11), difference())])
    write(here, list(range(8)), 1)
    here.flush()
    assert successor.sent and not successor.is_closed and not first.sent
    # 1 was taken back, and the successor's two messages take each other away.
    assert not here.parity_rows(TABLE, torch.tensor([0]), {}).rows.any()
