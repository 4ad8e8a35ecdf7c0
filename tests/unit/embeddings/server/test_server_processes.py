"""Processes of embedding servers: how they start and end, and what ranks share."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from recpoint.embeddings import servers
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.server import processes
from recpoint.embeddings.server.home import ServedHome
from recpoint.errors import HomeError, ServerLost, SettingsError
from recpoint.testing.homes import fetched, ids_of, records_of
from tests.fault.kill_points import FAULTS_EVERY
from tests.forked import ForkedProcess
from tests.polling import stop_process, until
from tests.server_lives import parent, rank, stopped


def pids(home: Home) -> list[int]:
    assert isinstance(home, ServedHome)
    return [server.transport.hello().pid for server in home._servers]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def write_all(home: Home) -> None:
    home.write_back("t", ids_of(range(10)), records_of(range(10), 8), batch=1)


def test_processes_of_this_machine_keep_rows(tmp_path: Path) -> None:
    """In files; they tell the token to nobody, listen here only, and end with the home."""
    with servers(2, directory=tmp_path / "rows", timeout_seconds=3.0) as home:
        home.add_table("t", rows=10, record_bytes=8)
        write_all(home)
        assert len(fetched(partial(home.fetch, "t"), range(10), 8)) == 10
        assert home.size_bytes()["index"] > 0
        found = [psutil.Process(pid) for pid in pids(home)]
        assert len(set(found)) == 2 and os.getpid() not in pids(home)
        for process in found:
            settings = ["-m", "recpoint.embeddings.server.process", str(os.getpid())]
            assert process.cmdline()[1:] == settings  # without the token
            listening = [
                one.laddr.ip
                for one in process.net_connections()
                if one.status == psutil.CONN_LISTEN
            ]
            assert listening == ["127.0.0.1"]
            assert process.num_threads() < 20
        directories = sorted((tmp_path / "rows").iterdir())
        assert [path.name for path in directories] == ["server-1", "server-2"]
        assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o700
        with pytest.raises(HomeError, match="embedding server 1 of 1.*no other home uses"):
            servers(1, directory=tmp_path / "rows")
        stops_and_is_replaced(home, found[1].pid)
        found += [psutil.Process(pid) for pid in pids(home)]
    assert all(is_gone(process.pid) for process in found)
    assert [path.name for path in directories[0].iterdir()] == ["home.lock"]


def stops_and_is_replaced(home: Home, pid: int) -> None:
    stop_process(pid)
    with pytest.raises(ServerLost, match=rf"embedding server 2 of 2 \(pid {pid}, .*in 3 s"):
        write_all(home)
    home.clear("t")
    assert is_gone(pid) and pid not in pids(home)
    assert fetched(partial(home.fetch, "t"), range(10), 8) == {}
    write_all(home)
    assert len(fetched(partial(home.fetch, "t"), range(10), 8)) == 10


def test_servers_end_with_their_parent(tmp_path: Path) -> None:
    """After SIGKILL, while a child of the parent keeps all its pipes open.

    One server was stopped, and cannot end by itself: it would keep its memory, and the lock of its
    directory.
    """
    killed = ForkedProcess(target=parent, args=(str(tmp_path),), daemon=True)
    killed.start()
    until((tmp_path / "pids").exists)
    server, stopped, child = map(int, (tmp_path / "pids").read_text().split())
    stop_process(stopped)
    try:
        killed.kill()
        killed.join()
        until(lambda: is_gone(server))
        until(lambda: is_gone(stopped))
        assert not is_gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
        if not is_gone(stopped):
            os.kill(stopped, signal.SIGKILL)


@pytest.mark.parametrize("parity", [False, True] if FAULTS_EVERY else [])
def test_a_trainer_that_was_stopped_goes_on_with_its_servers(parity: bool, tmp_path: Path) -> None:
    """At any moment of its calls, for longer than a call may take."""
    trainer = ForkedProcess(target=stopped, args=(str(tmp_path), parity, 30.0), daemon=True)
    trainer.start()
    until((tmp_path / "begun").exists)
    assert trainer.pid is not None
    moments = Random(7)
    while trainer.is_alive():
        time.sleep(moments.random())
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(trainer.pid, signal.SIGSTOP)
            time.sleep(2.6)  # this is the fault
            os.kill(trainer.pid, signal.SIGCONT)
    trainer.join()
    assert trainer.exitcode == 0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"count": 0}, "count.*'?0'?.*1 to 64"),
        ({"count": 65}, "1 to 64"),
        ({"count": True}, "True"),
        ({"count": 1, "timeout_seconds": 0}, "timeout_seconds.*more than 0"),
        ({"count": 1, "timeout_seconds": float("nan")}, "nan"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(SettingsError, match=match):
        servers(**settings)


def test_a_process_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_forkers", {})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(HomeError, match="embedding server 1 of 2: found an end with exit status 1"):
        servers(2)


def test_ranks_share_the_servers_that_rank_0_starts(tmp_path: Path) -> None:
    """Also after one of them was killed; see `server_lives` for what they check."""
    ranks = [
        ForkedProcess(target=rank, args=(number, str(tmp_path)), daemon=True) for number in range(2)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(120)
        assert one.exitcode == 0
