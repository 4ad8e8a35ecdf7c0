"""SIGKILL of embedding servers that keep parity: training goes on, and its bits are as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from tests.cached_training import as_bits
from tests.several_trainers import Case, Found, alone, on_ranks
from tests.training_builder import Place


def same(found: Found, expected: Found) -> bool:
    return found.rows.differences(expected.rows) == [] and torch.equal(
        as_bits(found.dense), as_bits(expected.dense)
    )


def generations(place: Place) -> list[int]:
    return list(Run.open(open_store(place.run)).generation_numbers())


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly("kills")), 2])
def test_training_goes_on_bit_for_bit(ranks: int, tmp_path: Path) -> None:
    cases = [
        Case(servers=3, parity=(2, 1), kills=(8, 17), optimizer="adagrad", lr_factor=0.95),
        Case(servers=3, parity=(1, 2), kills=(5,), optimizer="sparse adam", batches_a_step=2),
        Case(servers=5, parity=(4, 1), kills=(3,), optimizer="sgd", sparse=False, window=1),
    ]
    cases = cases[: 3 if ranks == 1 else 1]
    for found, case in zip(on_ranks(cases, ranks, tmp_path / "ranks"), cases, strict=True):
        assert same(found, alone(case, ranks)), case
        assert len(found.losses) == case.batches, "no batch is trained again"


@pytest.mark.parametrize(
    "at_servers", [pytest.param(False, marks=pytest.mark.nightly("kills")), True]
)
def test_checkpoints_go_on_and_are_restored(at_servers: bool, tmp_path: Path) -> None:
    """Checkpoints that are due during a recovery are taken later, and none is wrong."""
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    case = Case(
        run=place.run,
        staging=str(place.staging),
        servers=3,
        parity=(2, 1),
        kills=(7,),
        batches=40,
        interval=4,
        at_servers=at_servers,
    )
    expected = alone(case, 2)
    with place.agent():
        (found,) = on_ranks([case], 2, tmp_path / "first")
        assert same(found, expected)
        assert len(found.losses) == case.batches
        # `interval_seconds="auto"` counts restarts: the loss was none.
        assert generations(place) == [1]
        again = Case(run=place.run, staging=str(place.staging), servers=2, batches=0)
        (restored,) = on_ranks([again], 1, tmp_path / "second")
    assert same(restored, expected)


def test_all_ranks_go_back_when_more_are_lost_than_parity_makes_up_for(tmp_path: Path) -> None:
    place = Place(str(tmp_path / "run"), tmp_path / "staging")
    case = Case(
        run=place.run,
        staging=str(place.staging),
        servers=4,
        parity=(2, 1),
        kills=(14,),
        kills_at_once=2,
        batches=24,
        interval=3,
    )
    with place.agent():
        (found,) = on_ranks([case], 2, tmp_path / "ranks")
    assert same(found, alone(case, 2))
    assert len(found.losses) > case.batches, "some batches were trained again"
    assert generations(place) == [1, 2], "a loss that parity does not cover is a restart"
