"""SIGKILL of servers and trainers on a Ray cluster: tables end as those of one quiet process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore
from tests.cached_training import as_bits
from tests.polling import until
from tests.ray_cluster import MISSING, ray_cluster
from tests.several_trainers import Case, Found, alone, on_ranks, train_on_ranks
from tests.training_builder import Place

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),  # one cluster after another
]

#: For `make faults`: of how many boundaries one is taken.
_FAULTS_EVERY = int(os.environ.get("RECPOINT_FAULTS_EVERY", "0"))


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
    case = Case(ray=address, servers=3, lr_factor=0.95, batches=24)
    cases = [case, replace(case, parity=(2, 1), kills=(8,))]
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
    )
    with place.agent():
        (found,) = on_ranks([case], 2, tmp_path / "ranks")
    assert same(found, alone(case, 2))
    assert len(found.losses) > case.batches, "some batches were trained again"
    assert generations(place) == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
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


@pytest.mark.parametrize("parity", [(2, 1), (0, 0)] if _FAULTS_EVERY else [(2, 1)])
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
