"""Embedding servers on a Ray cluster: calls, deaths, names, several jobs and several ranks."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Adagrad

import recpoint.embeddings
from recpoint.catalog.store.run_url import parse_run_url
from recpoint.embeddings.home.contract import Home, TableRows
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.messages import Begin
from recpoint.errors import HomeError, ServerLost, SettingsError
from recpoint.installation import install_command
from recpoint.testing.homes import HomeSuite, fetched, ids_of, records_of
from tests.cached_training import (
    Batches,
    cached_model,
    lookahead,
    plain_model,
    rows_of_cache,
    rows_of_plain,
    train,
)
from tests.polling import stop_process, until
from tests.ray_cluster import (
    MISSING,
    NODE_MEMORY_BYTES,
    RECORD_BYTES,
    add_node,
    driver,
    greetings,
    is_running,
    ray_cluster,
    said,
)
from tests.server_calls import add_table, fetch_rows, write_rows

needs_ray = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
pytestmark = [
    pytest.mark.nightly("ray"),
    pytest.mark.xdist_group("ray"),  # one cluster for all of them
]

#: Records of more than 100 KB go through the object store, others travel in the call.
MANY = 4_000
TOKEN = b"a token of these tests"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def started(cluster: Any) -> Iterator[tuple[Any, list[str]]]:
    """Two servers, which tests take over from each other; and the connection of this process."""
    from recpoint.embeddings.server.ray_cluster import RayCluster, run_digest

    connection = RayCluster(cluster.address)
    try:
        names = connection.start(
            run_digest("/runs/shared"),
            per_node=2,
            memory_bytes=None,
            is_detached=True,
            token=TOKEN,
            timeout_seconds=300,
        )
        yield connection, names
    finally:
        connection.end()
        connection.leave()


def _transports(
    started: tuple[Any, list[str]], token: bytes | None, *, timeout_seconds: float = 60
) -> list[Any]:
    connection, names = started
    return [
        connection.transport(number, names, token=token, timeout_seconds=timeout_seconds)
        for number in range(len(names))
    ]


def _home(started: tuple[Any, list[str]], token: bytes | None = TOKEN) -> ServedHome:
    return ServedHome(_transports(started, token))


@pytest.fixture(params=["tcp", "ray"])
def home(started: tuple[Any, list[str]], request: pytest.FixtureRequest) -> Iterator[Home]:
    """A home that has taken the two servers over: they are empty."""
    with _home(started, TOKEN if request.param == "tcp" else None) as home:
        yield home


@needs_ray
class TestHomeOnRay(HomeSuite):
    """The contract of homes, by actor calls."""

    @pytest.fixture
    def home(self, started: tuple[Any, list[str]]) -> Iterator[Home]:
        with _home(started, None) as home:
            yield home


def _transport(started: tuple[Any, list[str]], *, timeout_seconds: float = 60) -> Any:
    return _transports(started, None, timeout_seconds=timeout_seconds)[0]


def _begun(transport: Any) -> int:
    """Have a server begin with an empty table; return its incarnation."""
    incarnation = transport.hello().incarnation
    owner = 1 + secrets.randbelow(1 << 62)
    begun: int = transport.call(Begin(incarnation=incarnation, owner=owner)).answer.incarnation
    add_table(transport, begun, rows=MANY, record_bytes=RECORD_BYTES)
    return begun


@needs_ray
@pytest.mark.parametrize("rows", [1, 10, MANY])
def test_what_is_read_is_the_callers_own(started: tuple[Any, list[str]], rows: int) -> None:
    """Arrays of the object store are read-only, and go when they are dropped."""
    transport = _transport(started)
    incarnation = _begun(transport)
    given = records_of(range(rows), RECORD_BYTES)
    written = {"incarnation": incarnation, "trainer": 0, "batch": 1}
    write_rows(
        transport, [TableRows("t", ids_of(range(0, rows, 2)), given[::2].contiguous())], **written
    )
    for expected in ([row % 2 == 0 for row in range(rows)], [True] * rows):
        out = torch.full((rows, RECORD_BYTES), 7, dtype=torch.uint8, device="cpu")
        has = fetch_rows(
            transport, [TableRows("t", ids_of(range(rows)), out)], incarnation=incarnation
        )[0]
        assert has.tolist() == expected
        assert torch.equal(out[has], given[has]) and (out[~has] == 7).all()
        out.fill_(1)
        has.fill_(False)  # both are writable
        # A part of each record's memory: not contiguous, and read without harm.
        wide = torch.cat([given, given], dim=1)
        later = written | {"batch": 2}
        write_rows(
            transport, [TableRows("t", ids_of(range(rows)), wide[:, :RECORD_BYTES])], **later
        )


@needs_ray
@pytest.mark.parametrize("rows", [10, MANY])
def test_a_write_that_comes_again_is_done_once(started: tuple[Any, list[str]], rows: int) -> None:
    transport = _transport(started)
    incarnation = _begun(transport)
    ids = ids_of(range(rows))
    versions = [records_of(range(rows), RECORD_BYTES, version=number) for number in range(3)]
    for batch in (1, 2, 1, 2, 1):
        write_rows(
            transport,
            [TableRows("t", ids, versions[batch])],
            incarnation=incarnation,
            trainer=0,
            batch=batch,
        )
    out = torch.empty(rows, RECORD_BYTES, dtype=torch.uint8, device="cpu")
    assert fetch_rows(transport, [TableRows("t", ids, out)], incarnation=incarnation)[0].all()
    assert torch.equal(out, versions[2])
    # Another trainer has numbers of its own.
    write_rows(
        transport, [TableRows("t", ids, versions[1])], incarnation=incarnation, trainer=1, batch=1
    )
    fetch_rows(transport, [TableRows("t", ids, out)], incarnation=incarnation)
    assert torch.equal(out, versions[1])


@needs_ray
def test_errors_of_a_server_come_as_they_are(started: tuple[Any, list[str]]) -> None:
    transport = _transport(started)
    incarnation = _begun(transport)
    out = torch.empty(1, RECORD_BYTES, dtype=torch.uint8, device="cpu")
    with pytest.raises(HomeError, match="no such table") as raised:
        fetch_rows(transport, [TableRows("other", ids_of([0]), out)], incarnation=incarnation)
    assert type(raised.value) is HomeError
    with pytest.raises(ValueError, match="ids: 4000"):
        fetch_rows(transport, [TableRows("t", ids_of([MANY]), out)], incarnation=incarnation)
    with pytest.raises(ServerLost, match="embedding server 1 of 2 .*started again since"):
        fetch_rows(transport, [TableRows("t", ids_of([0]), out)], incarnation=incarnation - 1)
    transport.close()
    with pytest.raises(ServerLost, match="has left the Ray cluster"):
        transport.hello()


@needs_ray
def test_a_server_that_hangs_is_named_in_time(started: tuple[Any, list[str]]) -> None:
    """Calls end in time, those that wait for room as well; what is repeated is done once."""
    from recpoint.embeddings.server.ray_transport import MOST_CALLS_WAITING

    patient, hasty = _transport(started), _transport(started, timeout_seconds=2)
    incarnation = _begun(patient)
    ids, pid = ids_of(range(10)), patient.hello().pid
    first, second = (records_of(range(10), RECORD_BYTES, version=one) for one in (1, 2))

    def write(transport: Any, records: torch.Tensor, batch: int) -> None:
        write_rows(
            transport,
            [TableRows("t", ids, records)],
            incarnation=incarnation,
            trainer=0,
            batch=batch,
        )

    stop_process(pid)
    try:
        with pytest.raises(ServerLost, match="embedding server 1 of 2 .*: found no answer for 2 s"):
            write(hasty, first, 1)
        with ThreadPoolExecutor(MOST_CALLS_WAITING) as threads:
            waiting = [threads.submit(_error, hasty.hello) for _ in range(MOST_CALLS_WAITING)]
            until(lambda: hasty._room._value == 0)
            hasty._timeout_seconds = 0.1
            assert f"found {MOST_CALLS_WAITING} calls without an answer" in str(_error(hasty.hello))
            assert all(type(one.result()) is ServerLost for one in waiting)
            # Calls that were given up still wait in Ray, which refuses to queue ever more.
            until(lambda: "found 32 calls that have no answer" in str(_error(hasty.hello)))
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: _error(patient.hello) is None)  # all have been answered
    write(patient, second, 2)
    write(patient, first, 1)  # whether it was done before or not
    out = torch.empty(10, RECORD_BYTES, dtype=torch.uint8, device="cpu")
    fetch_rows(patient, [TableRows("t", ids, out)], incarnation=incarnation)
    assert torch.equal(out, second)


def _error(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except ServerLost as error:
        return error
    return None


@needs_ray
def test_calls_beside_each_other(home: Home) -> None:
    """More threads than a server has, and more than it takes calls at once."""
    home.add_table("t", rows=40 * 100, record_bytes=RECORD_BYTES)

    def use(number: int) -> None:
        rows = range(number * 100, number * 100 + 100)
        for _ in range(3):
            home.write_back("t", ids_of(rows), records_of(rows, RECORD_BYTES), batch=0)
            assert len(fetched(partial(home.fetch, "t"), rows, RECORD_BYTES)) == 100

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(use, range(40)))


@needs_ray
def test_a_server_that_was_started_again_is_not_read(started: tuple[Any, list[str]]) -> None:
    """By actor calls: Ray passes them on to the actor that it has started again, which refuses."""
    transport = _transport(started)
    incarnation = _begun(transport)
    ids, records = ids_of(range(10)), records_of(range(10), RECORD_BYTES)
    before = transport.hello()

    def write(of: int) -> None:
        write_rows(transport, [TableRows("t", ids, records)], incarnation=of, trainer=0, batch=1)

    def read(of: int) -> torch.Tensor:
        out = torch.empty_like(records)
        found = fetch_rows(transport, [TableRows("t", ids, out)], incarnation=of)[0]
        return found

    write(incarnation)
    os.kill(before.pid, signal.SIGKILL)
    with pytest.raises(ServerLost, match=r"embedding server 1 of 2 \(Ray actor [0-9a-f]{16}-0\)"):
        until(lambda: read(incarnation) is None)
    after = transport.hello()  # waits for it
    assert after.incarnation != before.incarnation and after.pid != before.pid
    for call in (read, write):
        with pytest.raises(ServerLost, match="embedding server 1 of 2 .*started again since"):
            call(incarnation)
    assert not read(_begun(transport)).any()


@needs_ray
def test_lost_servers_are_empty_and_are_used_again(
    cluster: Any, started: tuple[Any, list[str]]
) -> None:
    """A killed process, then a lost node: the calls fail, never find rows, and `clear` revives."""
    from recpoint.embeddings.server.ray_cluster import run_digest

    other = _home(started)  # of another run, which goes on
    other.add_table("t", rows=100, record_bytes=RECORD_BYTES)
    other.write_back("t", ids_of(range(100)), records_of(range(100), RECORD_BYTES), batch=0)
    node = add_node(cluster)
    home = recpoint.embeddings.ray(run="/runs/lost", memory_bytes=64 << 20)
    names = [f"{run_digest(parse_run_url('/runs/lost').url)}-{number}" for number in range(2)]
    actors = _transports((started[0], names), None)
    rows = range(100)

    def write() -> None:
        home.write_back("t", ids_of(rows), records_of(rows, RECORD_BYTES), batch=0)

    def read() -> dict[int, bytes]:
        return fetched(partial(home.fetch, "t"), rows, RECORD_BYTES)

    def lose(number: int, begin: Callable[[], None]) -> None:
        before = actors[number].hello()
        begin()
        title = re.escape(f"embedding server {number + 1} of 2 (Ray actor {names[number]})")
        assert re.match(title, str(until(lambda: _error(read))))
        until(lambda: _error(actors[number].hello) is None)
        assert actors[number].hello().incarnation != before.incarnation
        for call in (read, write):
            with pytest.raises(ServerLost, match=title):
                call()
        home.clear("t")
        assert read() == {}
        write()
        assert read() == complete

    try:
        assert _free("CPU") == 2  # servers take none
        assert _free("memory") == 2 * (NODE_MEMORY_BYTES - (64 << 20))  # the other run's: not said
        home.add_table("t", rows=100, record_bytes=RECORD_BYTES)
        write()
        complete = read()
        assert len(complete) == 100
        there = _nodes_of(actors).index(node.node_id)
        victim = actors[there].hello().pid
        lose(there, lambda: os.kill(victim, signal.SIGKILL))
        assert _nodes_of(actors)[there] == node.node_id  # the node lives, and its memory is kept
        lose(there, lambda: cluster.remove_node(node, allow_graceful=False))
        assert len({*_nodes_of(actors)}) == 1
        pids = [one.hello().pid for one in actors]
        assert len(fetched(partial(other.fetch, "t"), rows, RECORD_BYTES)) == 100
    finally:
        home.close()
        other.close()
    until(lambda: not any(map(is_running, pids)))


def _nodes_of(actors: Sequence[Any]) -> list[str]:
    """Return the node of each server: its id is in the command of its raylet."""
    found = []
    for actor in actors:
        stat = Path(f"/proc/{actor.hello().pid}/stat").read_text()
        raylet = int(stat.rpartition(")")[2].split()[1])
        words = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
        found += [word.partition("=")[2] for word in words if word.startswith("--node_id=")]
    assert len(found) == len(actors)
    return found


def _free(resource: str) -> float:
    import ray

    return float(ray.available_resources()[resource])


@needs_ray
def test_a_killed_trainers_servers_are_replaced(
    cluster: Any, started: tuple[Any, list[str]]
) -> None:
    """By the next training of the run, and no other servers are touched."""
    import ray

    from recpoint.embeddings.server.ray_cluster import run_digest

    run = "/runs/killed"
    # The same name in another namespace: of somebody else's.
    foreign = ray.remote(num_cpus=0)(_Foreign).options(
        name=f"{run_digest(run)}-0", namespace="other"
    )
    actor = foreign.remote()
    shared = [one.hello() for one in _transports(started, None)]
    with driver("waits", cluster.address, run, "-") as process:
        try:
            seen = said(process)
        finally:
            process.kill()
    detached, attached = seen["pids"]
    assert seen["rows"] == [list(range(10))] * 2
    assert len({*detached, *attached, *(one.pid for one in shared)}) == 4
    until(lambda: not any(map(is_running, attached)))
    assert all(map(is_running, detached))

    with recpoint.embeddings.ray(run=run) as home:
        until(lambda: not any(map(is_running, detached)))
        home.add_table("t", rows=100, record_bytes=RECORD_BYTES)
        assert fetched(partial(home.fetch, "t"), range(100), RECORD_BYTES) == {}
        # A training of the same run that begins while this one still lives ends its servers, too.
        with recpoint.embeddings.ray(run=run) as newer:
            newer.add_table("t", rows=100, record_bytes=RECORD_BYTES)
            assert until(lambda: _error(partial(fetched, partial(home.fetch, "t"), [0], 64)))
            home.close()  # ends no servers but its own
            assert fetched(partial(newer.fetch, "t"), range(100), RECORD_BYTES) == {}
            pids = [one.pid for one in greetings(newer)]
            assert all(map(is_running, pids))
            assert not {*pids} & {*detached}
    until(lambda: not any(map(is_running, pids)))
    assert ray.get(actor.pid.remote(), timeout=60) == ray.get(actor.pid.remote(), timeout=60)
    assert [one.hello() for one in _transports(started, None)] == shared


class _Foreign:
    def pid(self) -> int:
        return os.getpid()


@needs_ray
def test_ranks_share_servers(cluster: Any) -> None:
    """Each rank is a Ray job of its own; rank 0 starts the servers, both write and read."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        driver(
            "ends",
            cluster.address,
            "/runs/ranks",
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        )
        for rank in range(2)
    ]
    first, second = (said(one) for one in ranks)
    assert first["rows"] == second["rows"] == [[*range(10), *range(50, 60)]]
    assert first["pids"] == second["pids"]
    # The handler of SIGTERM is still the script's.
    assert first["terminations"] == second["terminations"] == 1
    for one in ranks:
        assert said(one) == {"is_connected": False}
        assert one.wait(60) == 0
        assert one.stdout is not None
        one.stdout.close()
    until(lambda: not any(map(is_running, first["pids"][0])))


@needs_ray
def test_a_cluster_of_its_own() -> None:
    """It ends with the home. Its object store is small, as staging is in /dev/shm as well."""
    with driver("ends", "-", "/runs/own") as process:
        seen = said(process)
        assert seen["store_bytes"] == 256 << 20
        assert seen["rows"] == [list(range(10))]
        assert said(process) == {"is_connected": False}
    assert process.returncode == 0
    until(lambda: not any(map(is_running, seen["pids"][0])))


@needs_ray
@pytest.mark.parametrize("sparse", [False, True])
def test_cached_training_gives_the_bits_of_plain_training(home: Home, sparse: bool) -> None:
    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return Adagrad(model.parameters(), lr=0.1)

    plain = plain_model(sparse=sparse)
    by = optimizer(plain)
    losses = train(plain, by, Batches(), batches=60)
    model, cache = cached_model({"users": 30, "items": 60}, home, sparse=sparse)
    assert train(model, optimizer(model), lookahead(Batches(), model, 10), batches=60) == losses
    assert rows_of_cache(cache).differences(rows_of_plain(plain, by)) == []


@needs_ray
def test_settings_that_cannot_work(started: tuple[Any, list[str]]) -> None:
    threads = threading.active_count()
    for settings, expected in (
        ({"per_node": 0}, "per_node: found 0"),
        ({"timeout_seconds": -1.0}, "timeout_seconds: found -1.0"),
        ({"memory_bytes": 1 << 30, "per_node": 2}, "memory_bytes: found .* 2 servers on node"),
        ({"address": "127.0.0.1:9"}, "address: .* connected to"),
        ({"run": "s3://key:secret@bucket/run"}, "credential"),
    ):
        with pytest.raises(SettingsError, match=expected):
            recpoint.embeddings.ray(**settings)
    assert threading.active_count() == threads
    import ray

    assert ray.is_initialized()


_NO_CLUSTER = """
from recpoint.embeddings import ray
from recpoint.errors import SettingsError
for address in ("127.0.0.1:9", "ray://127.0.0.1:9", "nowhere"):
    try:
        ray(address)
    except SettingsError as error:
        print(error)
"""


@needs_ray
def test_no_such_cluster() -> None:
    said = _output(_NO_CLUSTER)
    assert [line.partition(";")[0] for line in said.splitlines()] == [
        "address: found '127.0.0.1:9', and the system says: [Errno 111] Connection refused",
        "address: found 'ray://127.0.0.1:9', of a Ray client's server",
        "address: found 'nowhere', which is no HOST:PORT",
    ]


_WITHOUT_RAY = """
import sys
from recpoint.embeddings import ray
from recpoint.errors import SettingsError
print("ray" in sys.modules)
sys.modules["ray"] = None
try:
    ray()
except SettingsError as error:
    print(error)
"""


def test_without_ray_the_error_has_the_line_of_pip() -> None:
    """Ray is imported when servers are asked for, and not before."""
    is_imported, said = _output(_WITHOUT_RAY).splitlines()
    assert is_imported == "False"
    assert said.startswith("recpoint.embeddings.ray: found no ray installed")
    assert said.endswith(f"Next: {install_command('servers')}")


def _output(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout


@needs_ray
def test_rows_outlive_a_server_that_keeps_parity(cluster: Any) -> None:
    """Ray starts the killed server again, empty; it joins only through a recovery."""
    rows = list(range(0, 500, 2))
    home = recpoint.embeddings.ray(
        cluster.address, per_node=3, parity=Parity(data=2), timeout_seconds=60.0
    )
    assert isinstance(home, ServedHome)
    with home:
        home.add_table("t", rows=500, record_bytes=RECORD_BYTES)
        home.write_back("t", ids_of(rows), records_of(rows, RECORD_BYTES), batch=1)
        lost = home.greetings[1]
        os.kill(lost.pid, signal.SIGKILL)
        changed = rows[::3]
        records = records_of(changed, RECORD_BYTES, version=1)
        home.write_back("t", ids_of(changed), records, batch=2)
        found = fetched(partial(home.fetch, "t"), range(500), RECORD_BYTES)
        expected = {
            row: bytes(records_of([row], RECORD_BYTES, version=int(row in changed))[0].tolist())
            for row in rows
        }
        assert found == expected
        assert home.greetings[1].pid != lost.pid
        assert home.greetings[1].incarnation != lost.incarnation
        until(lambda: not home.being_recovered)


@needs_ray
@pytest.mark.parametrize("parity", [Parity(data=2), None])
def test_a_server_that_hangs_is_replaced(cluster: Any, parity: Parity | None) -> None:
    """Its process lives, so that Ray alone would leave it."""
    rows = range(300)
    with recpoint.embeddings.ray(
        cluster.address, per_node=3, parity=parity, timeout_seconds=20.0
    ) as home:
        home.add_table("t", rows=len(rows), record_bytes=RECORD_BYTES)

        def write() -> None:
            home.write_back("t", ids_of(rows), records_of(rows, RECORD_BYTES), batch=0)

        write()
        before = fetched(partial(home.fetch, "t"), rows, RECORD_BYTES)
        hanging = greetings(home)[1].pid
        stop_process(hanging)
        if parity is None:
            assert "embedding server 2 of 3" in str(_error(write))
            home.clear("t")
            write()
        assert fetched(partial(home.fetch, "t"), rows, RECORD_BYTES) == before
        assert not is_running(hanging)
        assert greetings(home)[1].pid != hanging


@needs_ray
def test_parity_needs_tcp_and_enough_servers(cluster: Any) -> None:
    with pytest.raises(SettingsError, match="'tcp'"):
        recpoint.embeddings.ray(cluster.address, transport="ray", parity=Parity(data=2))
    with pytest.raises(SettingsError, match="at least 5"):
        recpoint.embeddings.ray(cluster.address, per_node=1, parity=Parity(data=4))
