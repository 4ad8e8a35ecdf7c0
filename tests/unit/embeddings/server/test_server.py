"""An embedding server does each call once, and refuses those that are not meant for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from recpoint.embeddings.home.contract import TableRows
from recpoint.embeddings.server.messages import AskSizes, Begin, ClearTable, Freeze, Release
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.transport import MOST_REQUEST_BYTES
from recpoint.errors import HomeError, ServerLost
from recpoint.testing.homes import fetched, ids_of, records_of
from tests.server_calls import add_table, fetch_rows, write_rows


class Client:
    """Calls a server that has a table "t" of 10 rows of 8 bytes."""

    def __init__(self, server: EmbeddingServer) -> None:
        self.server = server
        self.incarnation = server.hello().incarnation
        self.add_table()

    def add_table(self, table: str = "t", *, rows: int = 10, record_bytes: int = 8) -> None:
        add_table(self.server, self.incarnation, table=table, rows=rows, record_bytes=record_bytes)

    def begin(self, owner: int, begun_round: int = 0) -> int:
        message = Begin(incarnation=self.incarnation, owner=owner, round=begun_round)
        return self.server.call(message).answer.incarnation

    def release(self, number: int) -> None:
        self.server.call(Release(incarnation=self.incarnation, number=number))

    def clear(self, batch: int) -> None:
        self.server.call(
            ClearTable(incarnation=self.incarnation, table="t", trainer=0, batch=batch)
        )

    def write(self, row: int, version: int, *, batch: int, trainer: int = 0) -> None:
        write_rows(
            self.server,
            [TableRows("t", ids_of([row]), records_of([row], 8, version=version))],
            incarnation=self.incarnation,
            trainer=trainer,
            batch=batch,
        )

    def freeze(self, batch: int, open_from: int | None = None, trainer: int = 0) -> int:
        message = Freeze(
            incarnation=self.incarnation,
            table="t",
            start=0,
            stop=10,
            trainer=trainer,
            batch=batch,
            open_from=batch if open_from is None else open_from,
        )
        return self.server.call(message).answer.number

    def rows(self, frozen: int | None = None) -> dict[int, int]:
        """Row -> version."""

        def fetch(slots: Tensor, out: Tensor) -> Tensor:
            wanted = [TableRows("t", slots, out)]
            return fetch_rows(self.server, wanted, incarnation=self.incarnation, frozen=frozen)[0]

        found = fetched(fetch, range(10), 8)
        known = {
            (row, bytes(records_of([row], 8, version=version)[0].tolist())): version
            for row in range(10)
            for version in range(10)
        }
        return {row: known[row, record] for row, record in found.items()}


@pytest.fixture
def client() -> Client:
    return Client(EmbeddingServer(name="server 7"))


def test_a_write_that_comes_again_is_not_done_again(client: Client) -> None:
    client.write(1, 1, batch=1)
    client.write(1, 2, batch=2)
    client.write(1, 1, batch=1)
    client.write(1, 3, batch=2)
    assert client.rows() == {1: 2}
    client.write(1, 4, batch=1, trainer=5)  # each trainer has its own numbers
    client.write(1, 3, batch=2)
    assert client.rows() == {1: 4}


def test_a_beginning_of_an_earlier_round_that_comes_late_forgets_nothing(client: Client) -> None:
    begun = client.begin(5, 2)
    client.incarnation = begun
    client.add_table()
    client.write(1, 1, batch=1)
    for late in (1, 2):
        assert client.begin(5, late) == begun
    assert client.rows() == {1: 1}
    assert client.begin(5, 3) != begun
    with pytest.raises(ServerLost, match="started again"):
        client.rows()


def test_a_beginning_that_fails_is_made_again(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    client = Client(EmbeddingServer(directory=place / "rows"))
    place.rename(tmp_path / "away")
    place.touch()
    with pytest.raises((HomeError, OSError)):
        client.begin(5)
    with pytest.raises(ServerLost, match="started again"):
        client.rows()
    place.unlink()
    client.incarnation = client.server.hello().incarnation
    begun = client.begin(5)
    assert begun != client.incarnation
    client.incarnation = begun
    client.add_table()
    client.write(1, 1, batch=1)
    assert client.rows() == {1: 1} and client.begin(5) == begun
    client.server.end()


def test_a_write_that_was_refused_may_come_again(client: Client) -> None:
    with pytest.raises(ValueError, match="ids: 10"):
        client.write(10, 0, batch=1)
    client.write(1, 1, batch=1)
    assert client.rows() == {1: 1}


def test_what_comes_late_undoes_no_clear(client: Client) -> None:
    client.write(1, 1, batch=1)
    client.clear(3)
    client.write(2, 2, batch=2)
    assert client.rows() == {}
    client.write(3, 3, batch=4)
    client.clear(3)
    assert client.rows() == {3: 3}


def test_a_freeze_that_comes_again_is_the_same(client: Client) -> None:
    client.write(1, 1, batch=1)
    number = client.freeze(2)
    client.write(1, 2, batch=3)
    assert client.freeze(2) == number
    assert client.rows(number) == {1: 1}
    for _ in range(2):
        client.release(number)
    with pytest.raises(HomeError, match="server 7: frozen rows.*release"):
        client.rows(number)
    with pytest.raises(HomeError, match="release"):  # late, after its release
        client.freeze(2)
    assert client.freeze(4) != number


def test_a_freeze_whose_answer_was_lost_is_released_by_the_next(client: Client) -> None:
    lost, other = client.freeze(1), client.freeze(9, trainer=1)
    kept = client.freeze(2, open_from=2)
    client.freeze(3, open_from=2)
    with pytest.raises(HomeError, match="release"):
        client.rows(lost)
    assert client.rows(kept) == client.rows(other) == {}
    client.clear(4)
    for number in (kept, other):
        with pytest.raises(HomeError, match="clear"):
            client.rows(number)


def test_numbers_are_of_one_table(client: Client) -> None:
    client.add_table("u")
    number = client.freeze(1)
    out = torch.zeros(1, 8, dtype=torch.uint8)
    with pytest.raises(HomeError, match="'u'"):
        fetch_rows(
            client.server,
            [TableRows("u", ids_of([0]), out)],
            incarnation=client.incarnation,
            frozen=number,
        )


def test_a_training_that_begins_gets_an_empty_server(client: Client) -> None:
    client.write(1, 1, batch=1)
    client.freeze(2)
    before = client.incarnation
    found = {client.begin(5) for _ in range(3)}  # later ones do nothing
    assert len(found) == 1 and before not in found
    assert client.server.hello().owner == 5
    for call in (
        lambda: client.write(1, 1, batch=3),
        lambda: client.rows(),
        lambda: client.freeze(4),
        lambda: client.clear(5),
        lambda: client.server.call(AskSizes(incarnation=client.incarnation)),
        lambda: client.begin(4),
        lambda: client.release(1),
    ):
        with pytest.raises(ServerLost, match="server 7: .*another training.*restore"):
            call()
    again = Client(client.server)
    assert again.incarnation in found and again.rows() == {}
    again.write(1, 2, batch=1)
    assert again.rows() == {1: 2}


def test_a_server_that_has_ended_is_lost(client: Client) -> None:
    client.server.close()
    assert client.rows() == {}
    client.server.end()
    client.server.end()
    for call in (client.rows, client.server.hello, lambda: client.begin(3)):
        with pytest.raises(ServerLost, match="server 7: .*end"):
            call()


def test_no_two_starts_have_one_incarnation(tmp_path: Path) -> None:
    servers = [EmbeddingServer(), EmbeddingServer(directory=tmp_path / "rows")]
    assert len({server.hello().incarnation for server in servers}) == 2
    for server in servers:
        assert 1 <= server.hello().incarnation < 1 << 63
        server.end()
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["home.lock"]


def test_what_a_call_may_take_is_bounded(client: Client) -> None:
    for number in range(64):
        client.freeze(number, open_from=0)
    with pytest.raises(HomeError, match="64 readers"):
        client.freeze(64, open_from=0)
    client.add_table("wide", rows=40, record_bytes=1 << 20)
    out = torch.empty(MOST_REQUEST_BYTES >> 20, 1 << 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"at most {MOST_REQUEST_BYTES}"):
        fetch_rows(
            client.server,
            [TableRows("wide", ids_of(range(len(out))), out)],
            incarnation=client.incarnation,
        )
    for number in range(4_096 - 2):
        client.add_table(f"table {number}", rows=1, record_bytes=1)
    with pytest.raises(HomeError, match="4096 tables"):
        client.add_table("one more", rows=1, record_bytes=1)
    client.add_table()
    client.server.end()


def test_a_table_that_comes_twice_in_a_call_is_refused(client: Client) -> None:
    rows = [TableRows("t", ids_of([row]), records_of([row], 8)) for row in (1, 2)]
    with pytest.raises(ValueError, match="comes twice"):
        write_rows(client.server, rows, incarnation=client.incarnation, trainer=0, batch=1)
    assert client.rows() == {}
