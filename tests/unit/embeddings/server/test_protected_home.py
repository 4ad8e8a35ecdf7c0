"""A home of server processes with parity: servers are killed, and no row is lost."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import servers
from recpoint.embeddings.server.protected_home import protected_home
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer, TcpTransport
from recpoint.embeddings.server.tcp_peer import reach_with
from recpoint.errors import ServerLost, SettingsError
from recpoint.testing.homes import HomeSuite, fetched, ids_of, records_of
from tests.fault.kill_points import FAULTS_EVERY
from tests.polling import until

RECORD_BYTES = 20
ROWS = 997


class TestProtectedHome(HomeSuite):
    @pytest.fixture(params=[(3, 2, 1), (4, 1, 2)], ids=["2+1", "1+2"])
    def home(self, request: pytest.FixtureRequest) -> Iterator[Home]:
        count, data, parity = request.param
        token = b"of this test"
        with ExitStack() as stack:
            all_servers = [EmbeddingServer(reach=reach_with(token)) for _ in range(count)]
            for server in all_servers:
                stack.callback(server.end)
            listening = [stack.enter_context(TcpServer(one, token)) for one in all_servers]
            transports = [TcpTransport(one.address, token) for one in listening]
            form = Parity(data=data, parity=parity)
            yield stack.enter_context(protected_home(transports, parity=form))


def protected(count: int, data: int, parity: int) -> ServedHome:
    home = servers(count=count, parity=Parity(data=data, parity=parity), timeout_seconds=60.0)
    assert isinstance(home, ServedHome)
    home.add_table("items", rows=ROWS, record_bytes=RECORD_BYTES)
    return home


def test_the_log_says_what_parity_takes_before_training(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "recpoint"), protected(4, 2, 2) as home:
        home.add_table("users", rows=1_000_000, record_bytes=99)
    said = [record.getMessage() for record in caplog.records]
    assert any(
        "4 embedding servers" in one and "100 % of the memory" in one and "192 MiB" in one
        for one in said
    )
    assert any("'users'" in one and "99.0 MB" in one and "100.0 MB" in one for one in said)


def kill(home: ServedHome, number: int) -> None:
    os.kill(home.greetings[number].pid, signal.SIGKILL)


def wait_until_recovered(home: ServedHome) -> None:
    deadline = time.monotonic() + 60.0
    time.sleep(1.0)
    while home.being_recovered:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("count,data,parity", [(3, 2, 1), (5, 4, 1), (4, 2, 2)])
def test_rows_outlive_servers(count: int, data: int, parity: int) -> None:
    written = list(range(0, ROWS, 3))
    with protected(count, data, parity) as home:
        home.write_back("items", ids_of(written), records_of(written, RECORD_BYTES), batch=1)
        for number in range(2):
            lost = [number] if parity == 1 else [number, number + 1]
            for one in lost:
                kill(home, one)
            again = written[number::7]
            changed = records_of(again, RECORD_BYTES, version=number + 1)
            home.write_back("items", ids_of(again), changed, batch=number + 2)
            out = torch.zeros(ROWS, RECORD_BYTES, dtype=torch.uint8)
            has = home.fetch("items", ids_of(range(ROWS)), out)
            assert has.nonzero().view(-1).tolist() == written
            expected = records_of(written, RECORD_BYTES)
            for version in range(number + 1):
                rows = written[version::7]
                places = ids_of([written.index(row) for row in rows])
                expected[places] = records_of(rows, RECORD_BYTES, version=version + 1)
            assert torch.equal(out[has], expected)
            wait_until_recovered(home)


def test_more_servers_than_parity_makes_up_for_are_named_and_a_clear_begins_anew() -> None:
    with protected(3, 2, 1) as home:
        rows = list(range(100))
        home.write_back("items", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        kill(home, 0)
        kill(home, 2)
        out = torch.zeros(100, RECORD_BYTES, dtype=torch.uint8)
        with pytest.raises(ServerLost, match="at most 1 at a time"):
            home.fetch("items", ids_of(rows), out)
        home.clear("items")
        assert not home.fetch("items", ids_of(rows), out).any()
        home.write_back("items", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        kill(home, 1)
        assert home.fetch("items", ids_of(rows), out).all()
        assert torch.equal(out, records_of(rows, RECORD_BYTES))


def test_writes_go_on_while_a_server_is_recovered() -> None:
    """Threads write while servers are killed one after another; each row has its last record."""
    with protected(5, 4, 1) as home:
        done: dict[int, int] = {}
        failed: list[BaseException] = []
        is_over = threading.Event()

        def write(thread: int) -> None:
            version = 0
            rows = list(range(thread, ROWS, 2))
            try:
                while not is_over.is_set():
                    version += 1
                    records = records_of(rows, RECORD_BYTES, version=version)
                    home.write_back("items", ids_of(rows), records, batch=0)
                    done[thread] = version
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=write, args=(one,)) for one in range(2)]
        for one in threads:
            one.start()
        for number in (1, 4):
            time.sleep(0.3)
            kill(home, number)
            wait_until_recovered(home)
        is_over.set()
        for one in threads:
            one.join()
        assert not failed
        for thread in range(2):
            rows = list(range(thread, ROWS, 2))
            found = fetched(partial(home.fetch, "items"), rows, RECORD_BYTES)
            expected = records_of(rows, RECORD_BYTES, version=done[thread])
            assert [found[row] for row in rows] == [bytes(one.tolist()) for one in expected]


def test_rows_are_frozen_while_a_server_is_recovered() -> None:
    """What is frozen is what was there then, whether it was lost, known or never written."""
    rows = list(range(0, ROWS, 2))
    with protected(3, 2, 1) as home:
        home.write_back("items", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        before = home.freeze("items", range(ROWS))
        kill(home, 0)
        while not home.being_recovered:
            time.sleep(0.01)
        with home.freeze("items", range(ROWS)) as frozen:
            changed = list(range(0, ROWS, 3))
            records = records_of(changed, RECORD_BYTES, version=1)
            home.write_back("items", ids_of(changed), records, batch=2)
            found = fetched(frozen.fetch, range(ROWS), RECORD_BYTES)
            assert sorted(found) == rows
            expected = records_of(rows, RECORD_BYTES)
            assert [found[row] for row in rows] == [bytes(one.tolist()) for one in expected]
        out = torch.zeros(ROWS, RECORD_BYTES, dtype=torch.uint8)
        with pytest.raises(ServerLost):  # its rows have ended with their server
            before.fetch(ids_of(range(ROWS)), out)
        before.release()


def test_a_table_that_was_cleared_outlives_one_loss_after_another() -> None:
    """A successor knows how often the table was cleared: else it would ignore all differences."""
    rows = list(range(0, ROWS, 3))
    with protected(3, 2, 1) as home:
        home.clear("items")
        home.write_back("items", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        for version, number in enumerate((1, 1, 2), 1):
            kill(home, number)
            home.fetch("items", ids_of(rows), torch.zeros(len(rows), RECORD_BYTES).byte())
            wait_until_recovered(home)
            records = records_of(rows, RECORD_BYTES, version=version)
            home.write_back("items", ids_of(rows), records, batch=version + 1)
            home.add_table(f"later {version}", rows=50, record_bytes=RECORD_BYTES)
            few = ids_of(range(50))
            home.write_back(f"later {version}", few, records[:50].contiguous(), batch=1)
        kill(home, 1)
        out = torch.zeros(len(rows), RECORD_BYTES, dtype=torch.uint8)
        assert home.fetch("items", ids_of(rows), out).all()
        assert torch.equal(out, records)
        assert home.fetch("later 1", few, out[:50]).all()
        assert torch.equal(out[:50], records_of(rows, RECORD_BYTES, version=1)[:50])


def second_trainer(home: ServedHome, seconds: float) -> ServedHome:
    """Make the home of a rank that does not lead, in this process."""

    def transport(number: int) -> TcpTransport:
        there = home.transport(number)
        assert isinstance(there, TcpTransport)
        return TcpTransport(there.address, there._token, timeout_seconds=seconds)

    return protected_home(
        [transport(number) for number in range(home.servers)],
        parity=Parity(data=2, parity=2),
        hosts=home.hosts,
        owner=home.owner,
        trainer=1,
        trainers=2,
        revive=transport,
        timeout_seconds=seconds,
    )


@pytest.mark.parametrize("second", [signal.SIGKILL, *([signal.SIGSTOP] if FAULTS_EVERY else [])])
def test_servers_that_hang_are_replaced_too(second: signal.Signals, tmp_path: Path) -> None:
    """Two at a time, or one hangs and one is killed. Their rows are in files.

    A rank that does not lead waits until both are found, one after another.
    """
    rows = list(range(0, ROWS, 2))
    form = Parity(data=2, parity=2)
    with ExitStack() as stack:
        home = servers(4, parity=form, directory=tmp_path / "rows", timeout_seconds=2.0)
        stack.enter_context(home)
        assert isinstance(home, ServedHome)
        other = stack.enter_context(second_trainer(home, 2.0))
        for one in (home, other):
            one.add_table("items", rows=ROWS, record_bytes=RECORD_BYTES)
        home.write_back("items", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        lost = [home.greetings[number].pid for number in (1, 2)]
        for pid, kind in zip(lost, (signal.SIGSTOP, second), strict=True):
            os.kill(pid, kind)
        expected = records_of(rows, RECORD_BYTES)
        for one in (other, home):
            found = fetched(partial(one.fetch, "items"), rows, RECORD_BYTES)
            assert [found[row] for row in rows] == [bytes(one.tolist()) for one in expected]
        assert not {home.greetings[number].pid for number in (1, 2)} & set(lost)


def test_servers_do_not_need_the_process_that_forked_them() -> None:
    """It is killed, and nothing is lost. Another one forks the successor of a lost server."""
    rows = list(range(100))
    with protected(3, 2, 1) as home:
        home.write_back("items", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        first = [one.pid for one in home.greetings]
        forker = psutil.Process(first[0]).parent()
        assert forker is not None and forker.ppid() == os.getpid()
        forker.kill()
        until(lambda: forker.status() == psutil.STATUS_ZOMBIE)
        assert len(fetched(partial(home.fetch, "items"), rows, RECORD_BYTES)) == len(rows)
        assert [one.pid for one in home.greetings] == first
        kill(home, 1)
        found = fetched(partial(home.fetch, "items"), rows, RECORD_BYTES)
        assert len(found) == len(rows)
        assert psutil.Process(home.greetings[1].pid).ppid() not in (forker.pid, os.getpid())


def test_servers_of_a_home_that_is_forgotten_end() -> None:
    home = protected(3, 2, 1)
    kill(home, 0)
    home.fetch("items", ids_of([1]), torch.zeros(1, RECORD_BYTES, dtype=torch.uint8))
    pids = [one.pid for one in home.greetings]
    del home
    until(lambda: gc.collect() >= 0 and not any(map(psutil.pid_exists, pids)))
    until(lambda: not any(one.name == "recpoint-watch" for one in threading.enumerate()))


def test_too_few_servers_are_refused_before_any_starts() -> None:
    with pytest.raises(SettingsError, match="at least 5"):
        servers(count=4, parity=Parity(data=4))
