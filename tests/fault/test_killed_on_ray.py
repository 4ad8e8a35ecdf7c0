"""SIGKILL of servers and trainers on a Ray cluster: tables end as those of one quiet process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.cached_training import as_bits
from tests.ray_cluster import MISSING, ray_cluster
from tests.several_trainers import Case, Found, alone, on_ranks, train_on_ranks
from tests.training_builder import Place

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.slow,
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
