"""SIGKILL of servers and trainers of a training on several ranks: results are as without."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cached_training import as_bits
from tests.several_trainers import Case, Found, alone, on_ranks, train_on_ranks
from tests.training_builder import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def same(found: Found, expected: Found) -> bool:
    return found.rows.differences(expected.rows) == [] and torch.equal(
        as_bits(found.dense), as_bits(expected.dense)
    )


def test_all_ranks_go_back_when_a_server_is_killed(place: Place, tmp_path: Path) -> None:
    case = Case(
        run=place.run, staging=str(place.staging), batches=24, servers=3, kills=(8, 17), interval=3
    )
    with place.agent():
        (found,) = on_ranks([case], 2, tmp_path / "ranks")
    assert same(found, alone(case, 2))
    assert len(found.losses) > case.batches, "some batches were trained again"


def test_a_killed_trainer_ends_the_others_and_the_next_life_goes_on(
    place: Place, tmp_path: Path
) -> None:
    case = Case(run=place.run, staging=str(place.staging), batches=22, interval=4, window=8)
    with place.agent():
        codes, logs = train_on_ranks([replace(case, dies=14)], 3, tmp_path / "first")
        assert codes[2] == -signal.SIGKILL
        assert codes[0] != 0 and codes[1] != 0
        for log in logs[:2]:
            assert "RankLost: " in log
        (found,) = on_ranks([case], 3, tmp_path / "second")
    assert same(found, alone(case, 3))
    assert 0 < len(found.losses) < 22, "it has gone on from a checkpoint"


def test_an_error_on_one_rank_ends_all(tmp_path: Path) -> None:
    codes, logs = train_on_ranks([Case(fails=4, window=8)], 2, tmp_path / "ranks")
    assert 0 not in codes
    assert "an error of the script" in logs[0]
    assert "Error: " in logs[1]  # of the reader, or of the script when it reduces dense gradients
