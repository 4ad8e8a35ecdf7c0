"""SIGKILL of embedding servers while their rows are trained, at boundaries of requests.

`make test` kills at a fixed sample of boundaries; `make nightly` at all of them (`RUNS.md`).
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from recpoint import Checkpointer
from recpoint.embeddings.home.homes import local
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import ServerProcesses, servers
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer, TcpTransport
from recpoint.embeddings.server.transport import Transport
from recpoint.errors import ServerLost
from tests.agent_process import AgentProcess
from tests.fault.kill_points import FAULTS_EVERY
from tests.polling import until
from tests.served_training import INTERVAL, Trained
from tests.simulated_network import PassedOn
from tests.training_builder import Place

T = TypeVar("T")

TOTAL = 4 * INTERVAL


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def plain(batches: int) -> Trained:
    found = Trained()
    found.train(batches)
    return found


def killed(pid: int) -> None:
    """Kill a process, and wait until its sockets are closed."""
    process = psutil.Process(pid)
    process.kill()
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def waiting(checkpoints: Checkpointer) -> Callable[[int], None]:
    """Wait after each batch for the checkpoint that was due, so that lives are alike."""
    first = checkpoints.batches_done

    def is_done() -> bool:
        stats = checkpoints.stats
        due = checkpoints.batches_done // INTERVAL - first // INTERVAL
        return stats.committed + stats.failed + stats.cancelled + stats.skipped >= due

    def wait(_: int) -> None:
        until(is_done)

    return wait


def test_a_killed_server_shows_in_the_reader_and_a_restore_starts_it_again(place: Place) -> None:
    with servers(2) as home:
        served = Trained(home)
        pids = pids_of(home)
        with (
            pytest.raises(ServerLost) as caught,
            served.checkpointing(place) as checkpoints,
        ):
            served.train(12, checkpoints, after=waiting(checkpoints))
            assert checkpoints.stats.committed == 2
            killed(pids[1])
            served.train(1_000, checkpoints)
        assert f"embedding server 2 of 2 (pid {pids[1]}, 127.0.0.1:" in str(caught.value)
        assert "it has ended" in str(caught.value)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert "__next__" in frames and "forward" not in frames
        with pytest.raises(ServerLost):  # until a restore
            served.train(1)
        with served.checkpointing(place) as checkpoints:
            assert checkpoints.batches_done >= 2 * INTERVAL
            served.train(37 - checkpoints.batches_done, checkpoints)
        assert served.is_same_as(plain(37))
        assert pids_of(home)[0] == pids[0] and pids_of(home)[1] != pids[1]
        pids += pids_of(home)
        served.close()
    until(lambda: not any(map(psutil.pid_exists, pids)))


def pids_of(home: object) -> list[int]:
    assert isinstance(home, ServedHome)
    return [server.transport.hello().pid for server in home._servers]


def test_checkpoints_restore_into_other_homes_and_back(place: Place) -> None:
    """On one server, on three, in memory, in a model without a cache, and on two."""
    with ExitStack() as opened:

        def served_by(count: int) -> Trained:
            address = [
                opened.enter_context(TcpServer(EmbeddingServer(), b"t")).address
                for _ in range(count)
            ]
            home = opened.enter_context(ServedHome([TcpTransport(one, b"t") for one in address]))
            found = Trained(home, slots={"users": 12 + count, "items": 30})
            opened.callback(found.close)
            return found

        in_memory = Trained(opened.enter_context(local()))
        opened.callback(in_memory.close)
        done = 0
        for trained in (served_by(1), served_by(3), in_memory, Trained(), served_by(2)):
            with trained.checkpointing(place) as checkpoints:
                assert checkpoints.batches_done == done
                trained.train(7, checkpoints)
                done += 7
            assert trained.is_same_as(plain(done))


@pytest.mark.parametrize("when_busy", ["skip", "wait"])
def test_an_agent_that_is_killed_and_comes_back(
    when_busy: str, place: Place, tmp_path: Path
) -> None:
    """Training waits at most for an agent that lives. Later checkpoints have all rows."""
    log = tmp_path / "agent.log"
    settings = {"when_busy": when_busy, "busy_wait_seconds": 3_600.0}
    with servers(3, parity=Parity(data=2)) as home, ThreadPoolExecutor(1) as thread:
        served = Trained(home)
        with served.checkpointing(place, has_agent=False, **settings) as checkpoints:
            with AgentProcess(place.staging, log) as agent:
                served.train(12, checkpoints, after=waiting(checkpoints))
                assert checkpoints.stats.committed == 2
                os.kill(agent.process.pid, signal.SIGSTOP)  # it does nothing, and then dies
                training = thread.submit(served.train, 23, checkpoints)
                if when_busy == "wait":
                    until(lambda: checkpoints.stats.waited == 1)
                    assert not training.done() and checkpoints.batches_done == 20
                else:
                    training.result()
            training.result()
            stats = checkpoints.stats
            assert (stats.committed, stats.staged) == (2, 3) and stats.skipped > 0
            with AgentProcess(place.staging, log):
                until(checkpoints._parts.area.agent_is_running)
                checkpoints.close()
            assert checkpoints.stats.committed == 4
            assert checkpoints.stats.failed == 0
        assert served.is_same_as(plain(35))
        served.close()
    with servers(2) as home:
        restored = Trained(home)
        with restored.checkpointing(place) as checkpoints:
            assert checkpoints.batches_done == 35
        assert restored.is_same_as(plain(35))
        restored.close()


class Deadly(PassedOn):
    """Kills its server at one boundary of the requests of a life."""

    def __init__(self, server: Transport, life: Life) -> None:
        super().__init__(server)
        self._life = life

    def deliver(self, name: str, call: Callable[[], T]) -> T:
        self._life.cross(f"before {name}", self.server)
        answer = super().deliver(name, call)
        self._life.cross(f"after {name}", self.server)
        return answer


class Life:
    """One training on servers that are there already; it ends whatever is killed.

    Args:
        die: number of the boundary at which the server is killed, from 1 on; None: at none.
        at_servers: the servers stage their rows themselves.
    """

    def __init__(self, die: int | None = None, *, at_servers: bool = False) -> None:
        self._die = die
        self._at_servers = at_servers
        self._lock = threading.Lock()
        self.names: list[str] = []
        self.lost = 0

    def cross(self, name: str, server: Transport) -> None:
        with self._lock:
            self.names.append(name)
            dies = len(self.names) == self._die
        if dies:
            killed(server.hello().pid)

    def live(self, processes: ServerProcesses, place: Place) -> bool:
        """Train to the end, after each loss from the newest checkpoint; whether all is right."""
        home = ServedHome(
            [Deadly(transport, self) for transport in processes.transports()],
            revive=lambda number: Deadly(processes.start_again(number), self),
        )
        with home:
            trained = Trained(home)
            try:
                while True:
                    try:
                        with trained.checkpointing(
                            place, at_servers=self._at_servers
                        ) as checkpoints:
                            left = TOTAL - checkpoints.batches_done
                            trained.train(left, checkpoints, after=waiting(checkpoints))
                            assert checkpoints.batches_done == TOTAL
                        return trained.is_same_as(plain(TOTAL))
                    except ServerLost:
                        self.lost += 1
                        assert self.lost < 4
            finally:
                trained.close()


@pytest.mark.slow
@pytest.mark.parametrize("at_servers", [False, True])
def test_a_training_whose_servers_are_killed_ends_as_one_whose_are_not(
    at_servers: bool, tmp_path: Path
) -> None:
    processes = ServerProcesses(2, None, 60.0)
    try:
        begun = Place(str(tmp_path / "begun" / "run"), tmp_path / "begun" / "staging")
        first = Trained()
        with first.checkpointing(begun) as checkpoints:
            first.train(INTERVAL, checkpoints)

        def place(name: str) -> Place:
            shutil.copytree(tmp_path / "begun", tmp_path / name)
            return Place(str(tmp_path / name / "run"), tmp_path / name / "staging")

        whole = Life(at_servers=at_servers)
        assert whole.live(processes, place("whole"))
        reached = 0
        wanted = chosen(whole.names, STAGING_CALLS if at_servers else CALLS)
        for die in wanted:
            life = Life(die, at_servers=at_servers)
            assert life.live(processes, place(f"killed-{die}")), (die, whole.names[die - 1])
            reached += life.lost
        assert (
            reached >= len(wanted) // 2
        )  # the others came to fewer boundaries, or noticed nothing
    finally:
        processes.end()


#: Calls by which a home takes its servers.
BEGINNING = (" greet", " begin")
CALLS = ("before add_table", "before fetch", "after write_back", "before freeze")
#: "open_part" describes a checkpoint, "name_rows" names its rows, and "seal_part" ends it.
STAGING_CALLS = ("before name_rows", "after open_part", "before seal_part", "after seal_part")


def chosen(names: list[str], kinds: Sequence[str]) -> list[int]:
    """Return numbers of boundaries: the middle one of some kinds; or all since training began.

    Who builds a home is told of a server that is lost while it begins, and there is no home yet.
    """
    if FAULTS_EVERY:
        calls = [number for number, name in enumerate(names, 1) if not name.endswith(BEGINNING)]
        return calls[::FAULTS_EVERY]
    found = []
    for kind in kinds:
        its = [number for number, name in enumerate(names, 1) if name == kind]
        found.append(its[len(its) // 2])
    return found
