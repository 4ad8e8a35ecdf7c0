"""Checkpoints of tables that several trainers share restore into any number of trainers."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.cached_training import as_bits, plain_model, rows_of_plain
from tests.several_trainers import (
    Case,
    Found,
    Part,
    alone,
    checkpoints_of,
    on_ranks,
    optimizers_of,
)
from tests.training_builder import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def same(found: Found, expected: Found) -> bool:
    return found.rows.differences(expected.rows) == [] and torch.equal(
        as_bits(found.dense), as_bits(expected.dense)
    )


def test_trainings_go_on_from_checkpoints_with_any_number_of_ranks(
    place: Place, tmp_path: Path
) -> None:
    case = Case(run=place.run, staging=str(place.staging), batches=13)
    with place.agent():
        (first,) = on_ranks([case], 2, tmp_path / "first")
        assert same(first, alone(case, 2))
        longer = replace(case, batches=27, slots={"users": 60, "items": 90}, servers=2)
        (second,) = on_ranks([longer], 2, tmp_path / "second")
        expected = alone(longer, 2)
        assert same(second, expected)
        assert second.losses == expected.losses[13:]
        only = replace(case, batches=0)
        (third,) = on_ranks([only], 3, tmp_path / "third")
        assert same(third, expected)
    plain = plain_model(sparse=True)
    optimizers = optimizers_of(only, plain)
    reader = Part(only.epoch)
    with checkpoints_of(only, plain, optimizers, reader) as checkpoints:
        assert checkpoints is not None
        assert checkpoints.batches_done == reader.position == 27
        assert rows_of_plain(plain, optimizers[0]).differences(expected.rows) == []


def test_a_checkpoint_of_one_process_restores_into_ranks(place: Place, tmp_path: Path) -> None:
    case = Case(run=place.run, staging=str(place.staging), batches=0)
    model, reader = plain_model(sparse=True), Part(case.epoch)
    optimizers = optimizers_of(case, model)
    with (
        place.agent(),
        checkpoints_of(replace(case, batches=9), model, optimizers, reader) as checkpoints,
    ):
        assert checkpoints is not None
        for batch in islice(iter(reader), 9):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batch).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            checkpoints.step()
    (found,) = on_ranks([case], 2, tmp_path / "ranks")
    assert found.rows.differences(rows_of_plain(model, optimizers[0])) == []
