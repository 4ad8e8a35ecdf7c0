"""A successor recovers rows of many tables in one call, and first those that are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from recpoint.embeddings.home.contract import TableRows
from recpoint.embeddings.parity import recover as recover_module
from recpoint.embeddings.parity.member import StripeMember
from recpoint.embeddings.parity.own_tables import OwnTable, RowsOfTables, first_batch
from recpoint.embeddings.parity.peers import Members, TableSlots
from recpoint.embeddings.parity.stripes import Parity, stripes_of
from recpoint.testing.homes import ids_of, records_of
from tests.near_members import Near, near_members, replaced

TABLES = {"a": 5, "b": 5, "c": 5, "d": 9}
ROWS = 60


def slots_of(table: str, server: int) -> range:
    stripes = stripes_of(table, rows=ROWS, parity=Parity(data=2), hosts="abc")
    return stripes.slots_of(server, range(ROWS))


def written(members: dict[int, StripeMember]) -> None:
    for number, member in members.items():
        member.write(
            [
                TableRows(
                    table,
                    ids_of(slots_of(table, number)),
                    records_of(slots_of(table, number), record_bytes, version=number),
                )
                for table, record_bytes in TABLES.items()
            ]
        )
        member.other_servers.flush()


def records_at(member: StripeMember, table: str) -> list[list[int]]:
    found = member.rows([TableSlots(table, ids_of(slots_of(table, 0)))], recover=False)
    assert found.is_known.all()
    rows: list[list[int]] = found.rows[:, :-1].tolist()
    return rows


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """For each call of `Peer.decoded` the tables that it names."""
    found: list[list[str]] = []
    decoded = Near.decoded

    def noted(self: Near, wanted: Sequence[TableSlots], lost: int) -> Members:
        found.append([one.table for one in wanted])
        return decoded(self, wanted, lost)

    monkeypatch.setattr(Near, "decoded", noted)
    return found


def test_lost_rows_of_many_tables_are_decoded_in_one_call(decodings: list[list[str]]) -> None:
    members = near_members(TABLES, ROWS)
    written(members)
    successor = replaced(members, 0, TABLES, ROWS)
    successor.recovery.recover([TableSlots(table, ids_of(slots_of(table, 0))) for table in TABLES])
    # One call to each of the two others for each length of rows.
    assert sorted(decodings) == [["a", "b", "c"], ["a", "b", "c"], ["d"], ["d"]]
    for table, record_bytes in TABLES.items():
        expected = records_of(slots_of(table, 0), record_bytes, version=0)
        assert records_at(successor, table) == expected.tolist()
    successor.recovery.recover([TableSlots(table, ids_of(slots_of(table, 0))) for table in TABLES])
    assert len(decodings) == 4, "all are known"


def test_the_background_recovers_small_tables_together(decodings: list[list[str]]) -> None:
    members = near_members(TABLES, ROWS)
    written(members)
    successor = replaced(members, 0, TABLES, ROWS)
    rounds = 0
    while successor.recovery.recover_next():
        rounds += 1
    assert rounds == 4, "rows of two lengths, then parity rows"
    assert len(decodings) == 4
    known = successor.known
    assert known.known == known.all
    for table in TABLES:
        slots = torch.arange(
            stripes_of(table, rows=ROWS, parity=Parity(data=2), hosts="abc").parity_slots(0)
        )
        assert (successor.check(table, slots) == 1).all()


class Held:
    """Holds the first call of `Peer.decoded` until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()
        decoded = Near.decoded

        def held(near: Near, wanted: Sequence[TableSlots], lost: int) -> Members:
            if not self.has_begun.is_set():
                self.has_begun.set()
                assert self.may_go_on.wait(60.0)
            return decoded(near, wanted, lost)

        monkeypatch.setattr(Near, "decoded", held)


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_read_of_rows_that_are_known_waits_for_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = near_members({"a": 5}, ROWS)
    successor = replaced(members, 0, {"a": 5}, ROWS)
    successor.recovery.recover([TableSlots("a", ids_of([0, 1]))])
    held = Held(monkeypatch)
    background = in_thread(successor.recovery.recover_next)
    assert held.has_begun.wait(60.0)
    read = in_thread(lambda: successor.recovery.recover([TableSlots("a", ids_of([0, 1]))]))
    read.join(60.0)
    assert not read.is_alive() and background.is_alive()
    held.may_go_on.set()
    background.join(60.0)
    assert not background.is_alive()


def test_the_background_lets_a_read_of_lost_rows_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recover_module, "_GIVE_WAY_SECONDS", 60.0)
    batches: list[threading.Thread] = []  # the thread that has looked for one

    def noted(missing: Iterable[tuple[OwnTable, Tensor]]) -> RowsOfTables:
        batches.append(threading.current_thread())
        return first_batch(missing)

    monkeypatch.setattr(recover_module, "first_batch", noted)
    members = near_members({"a": 5}, ROWS)
    successor = replaced(members, 0, {"a": 5}, ROWS)
    held = Held(monkeypatch)
    read = in_thread(lambda: successor.recovery.recover([TableSlots("a", ids_of([3]))]))
    assert held.has_begun.wait(60.0)
    background = in_thread(successor.recovery.recover_next)
    background.join(0.2)
    assert background.is_alive() and background not in batches
    held.may_go_on.set()
    read.join(60.0)
    background.join(30.0)
    assert not read.is_alive() and not background.is_alive() and background in batches
