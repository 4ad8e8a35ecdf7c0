"""SIGKILL of servers and trainers on a Ray cluster: tables end as those of one quiet process."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.protected_home import protected_home
from recpoint.embeddings.server.ray_head import WatchedTransport
from recpoint.embeddings.server.transport import Greeting, Transport
from recpoint.errors import NothingToRestore
from tests.cached_training import as_bits
from tests.fault.kill_points import FAULTS_EVERY
from tests.fault.test_servers_killed import killed, plain, waiting
from tests.polling import until
from tests.ray_cluster import MISSING, ray_cluster
from tests.served_training import INTERVAL, Trained
from tests.several_trainers import Case, Found, alone, on_ranks, train_on_ranks
from tests.simulated_network import PassedOn
from tests.training_builder import Place

T = TypeVar("T")

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.nightly("ray"),
    pytest.mark.xdist_group("ray"),  # one cluster after another
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a cluster of one node."""
    with ray_cluster() as cluster:
        yield cluster.address


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def same(found: Found, expected: Found) -> bool:
    return found.rows.differences(expected.rows) == [] and torch.equal(
        as_bits(found.dense), as_bits(expected.dense)
    )


def generations(place: Place) -> list[int]:
    return list(Run.open(open_store(place.run)).generation_numbers())


def test_ranks_share_servers_and_parity_makes_up_for_a_killed_one(
    address: str, tmp_path: Path
) -> None:
    case = Case(ray=address, servers=3, lr_factor=0.95, batches=24, parity=(2, 1), kills=(8,))
    cases = [case]
    if FAULTS_EVERY:
        cases.append(replace(case, parity=(0, 0), kills=()))
    for found, one in zip(on_ranks(cases, 2, tmp_path / "ranks"), cases, strict=True):
        assert same(found, alone(one, 2)), one
        assert len(found.losses) == one.batches, "no batch is trained again"


def test_ranks_go_back_without_parity(address: str, place: Place, tmp_path: Path) -> None:
    case = Case(
        run=place.run,
        staging=str(place.staging),
        ray=address,
        servers=3,
        batches=20,
        interval=3,
        kills=(8,),
        at_servers=True,
        pause_seconds=0.2,  # so that a checkpoint is there before the kill
    )
    with place.agent():
        (found,) = on_ranks([case], 2, tmp_path / "ranks")
    assert same(found, alone(case, 2))
    assert len(found.losses) > case.batches, "some batches were trained again"
    assert generations(place) == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2] if FAULTS_EVERY else [1])
def test_the_successor_of_a_killed_trainer_goes_on(
    address: str, ranks: int, place: Place, tmp_path: Path
) -> None:
    """Its servers outlive it. The next training of the run replaces them."""
    case = Case(
        run=place.run,
        staging=str(place.staging),
        ray=address,
        servers=2,
        batches=18,
        interval=4,
        at_servers=True,
        pause_seconds=0.1,  # so that a checkpoint is there before the kill
    )
    with place.agent():
        codes, logs = train_on_ranks([replace(case, dies=11)], ranks, tmp_path / "first")
        assert codes[-1] == -signal.SIGKILL
        if ranks == 2:
            assert codes[0] > 0 and "RankLost: " in logs[0]
        (found,) = on_ranks([case], ranks, tmp_path / "second")
    assert same(found, alone(case, ranks))
    assert 0 < len(found.losses) < 18, "it has gone on from a checkpoint"


def steps(place: Place) -> list[int]:
    """Steps of the checkpoints that are committed."""
    try:
        run = Run.open(open_store(place.run))
    except NothingToRestore:
        return []
    return [name.step for name in run.manifest_names()]


@pytest.mark.parametrize("parity", [(2, 1), (0, 0)] if FAULTS_EVERY else [(2, 1)])
def test_a_cluster_whose_head_is_killed_ends_training_with_what_to_do(
    address: str,
    parity: tuple[int, int],
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training goes on for a while, then ends before Ray ends its process; another one goes on."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")  # of which 5 are training's
    case = Case(
        run=place.run,
        staging=str(place.staging),
        servers=3,
        parity=parity,
        interval=5,
        pause_seconds=0.1,
    )
    with place.agent(), ThreadPoolExecutor(1) as thread:
        with ray_cluster() as cluster:
            lost = cluster.address
            # With rewinds, which cannot help.
            endless = replace(case, ray=lost, batches=10_000, kills=(9_999,), kills_at_once=2)
            training = thread.submit(train_on_ranks, [endless], 1, tmp_path / "first")
            until(lambda: steps(place) or training.done())
            assert not training.done(), training.result()
            killed_at = time.monotonic()
            os.kill(cluster.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
            before = max(steps(place))
            codes, logs = training.result()
            assert time.monotonic() - killed_at < 20
        assert codes == [1]
        assert f"ClusterLost: the head of the Ray cluster at {lost}: found no answer" in logs[0]
        assert logs[0].endswith(
            "Next: start a Ray cluster, and start training again: it goes on from its newest "
            "checkpoint\n"
        )
        assert "does not answer; training goes on for 5 s" in logs[0]
        assert "Training goes back" not in logs[0]
        newest = max(steps(place))
        assert newest > before, "it went on"
        case = replace(case, ray=address, batches=newest + 5, pause_seconds=0.0)
        (found,) = on_ranks([case], 1, tmp_path / "second")
    assert len(found.losses) == 5
    assert same(found, alone(case, 1))


class Deadly(PassedOn):
    """Tells a life of each call, right before it and right after it."""

    def __init__(self, server: Transport, number: int, life: Life) -> None:
        super().__init__(server)
        self.listens_at = server.listens_at
        self._number = number
        self._life = life

    def deliver(self, name: str, call: Callable[[], T]) -> T:
        self._life.cross(f"before {name}", self._number)
        answer = super().deliver(name, call)
        self._life.cross(f"after {name}", self._number)
        return answer


class Life:
    """A training whose rows are on three servers with parity, which are killed one after another.

    Args:
        servers: on the cluster.
        place: of its run.
        kinds: of boundaries. At the next boundary of any of them, the server that is called is
            killed, and the next one counts once that server is recovered.
        die: number of the boundary at which a server is killed instead; 0: at none.

    Attributes:
        names: of all boundaries.
        killed: how many servers were killed.
    """

    def __init__(
        self, servers: ServersOnRay, place: Place, *, kinds: Sequence[str] = (), die: int = 0
    ) -> None:
        self._servers = servers
        self._place = place
        self.left = list(kinds)
        self._die = die
        self._lock = threading.Lock()
        self._home: ServedHome | None = None
        self._dead: Greeting | None = None  # whose successor is not whole yet
        self.names: list[str] = []
        self.killed = 0

    def cross(self, name: str, number: int) -> None:
        with self._lock:
            if self._home is None:  # it begins, and has nothing to lose
                return
            self.names.append(name)
            if name in self.left and self._dead is None:
                self.left.remove(name)
            elif len(self.names) != self._die:
                return
            self._dead = self._home.greetings[number]
            self.killed += 1
            killed(self._dead.pid)

    def _is_whole(self) -> bool:
        assert self._home is not None
        with self._lock:
            if self._dead in self._home.greetings or self._home.being_recovered:
                return False
            self._dead = None
            return True

    def live(self) -> bool:
        """Train until all kinds are done; whether all is right, and nothing was trained again."""

        def connected(number: int) -> Transport:
            return Deadly(self._servers.transport(number), number, self)

        with protected_home(
            [connected(number) for number in range(3)], parity=Parity(data=2), revive=connected
        ) as home:
            self._home = home
            trained = Trained(home)
            with trained.checkpointing(self._place) as checkpoints:
                wait = waiting(checkpoints)

                def after(batch: int) -> None:
                    until(self._is_whole)
                    wait(batch)

                done = 0
                while done < _FEWEST or (self.left and done < _MOST):
                    trained.train(INTERVAL, checkpoints, after=after)
                    done += INTERVAL
                assert checkpoints.batches_done == done
            is_right = trained.is_same_as(plain(done))
            trained.close()
        return is_right and generations(self._place) == [1]


class ServersOnRay:
    """Three embedding servers that lives take over from each other."""

    def __init__(self, cluster: Any, names: Sequence[str], token: bytes) -> None:
        self._cluster = cluster
        self._names = names
        self._token = token

    def transport(self, number: int) -> Transport:
        made = self._cluster.transport(number, self._names, token=self._token, timeout_seconds=60.0)
        return WatchedTransport(made, self._cluster.head)


@pytest.fixture
def servers_on_ray(address: str) -> Iterator[ServersOnRay]:
    from recpoint.embeddings.server.ray_cluster import RayCluster, run_digest

    cluster, token = RayCluster(address), secrets.token_bytes(32)
    try:
        names = cluster.start(
            run_digest("/runs/killed-at-boundaries"),
            per_node=3,
            memory_bytes=None,
            is_detached=True,
            token=token,
            timeout_seconds=300,
        )
        yield ServersOnRay(cluster, names, token)
    finally:
        cluster.end()
        cluster.leave()


#: Each call of a training that is not disturbed.
_CALLS = ("add_table", "fetch", "write_back", "freeze", "check", "release", "greet")
_FEWEST, _MOST = 4 * INTERVAL, 400 * INTERVAL  # batches of a life


def test_a_server_killed_at_any_boundary_is_recovered(
    servers_on_ray: ServersOnRay, tmp_path: Path
) -> None:
    """In `make test` before and after a call of each kind; in `make nightly` at all of them."""

    def life(name: str, **deaths: Any) -> Life:
        place = Place(str(tmp_path / name / "run"), tmp_path / name / "staging")
        return Life(servers_on_ray, place, **deaths)

    # Tables are added before the first batch, and there only one server can be killed in a life.
    added = "after add_table"
    kinds = [f"{when} {call}" for call in _CALLS for when in ("before", "after")]
    kinds.remove(added)
    for name, chosen in (("most", kinds), ("added", [added])):
        sample = life(name, kinds=chosen)
        assert sample.live()
        assert sample.left == [] and sample.killed == len(chosen)
    if not FAULTS_EVERY:
        return
    whole = life("whole")
    assert whole.live()
    reached = 0
    wanted = range(1, len(whole.names) + 1, FAULTS_EVERY)
    for die in wanted:
        one = life(f"killed-{die}", die=die)
        assert one.live(), (die, whole.names[die - 1])
        reached += one.killed
    assert reached >= len(wanted) // 2  # the others came to fewer boundaries
