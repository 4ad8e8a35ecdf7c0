"""Checkpoints of tables that several trainers share restore into any number of trainers."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests import cached_training
from tests.cached_training import as_bits, plain_model, rows_of_plain
from tests.several_trainers import (
    NEW_USERS,
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


@pytest.mark.nightly("loops")
@pytest.mark.parametrize("at_servers", [False, True])
def test_ranks_that_share_rows_get_more_users(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_servers: bool
) -> None:
    case = Case(run=place.run, staging=str(place.staging), batches=13)
    larger = replace(case, more_users=70, servers=2, at_servers=at_servers)
    with place.agent():
        (first,) = on_ranks([case], 2, tmp_path / "first")
        (grown,) = on_ranks([replace(larger, batches=0)], 3, tmp_path / "grown")
        (trained,) = on_ranks([replace(larger, batches=24)], 2, tmp_path / "trained")
    for name, arrays in grown.rows.arrays.items():
        for number, (array, old) in enumerate(zip(arrays, first.rows.arrays[name], strict=True)):
            new = torch.full_like(array[len(old) :], 0.2)
            if number == 0:
                ids = torch.arange(len(old), len(array))
                new = NEW_USERS(name, ids, array.shape[1], array.dtype)
            assert torch.equal(as_bits(array), as_bits(torch.cat([old, new])))
    assert len(grown.rows.arrays["users"][0]) == len(first.rows.arrays["users"][0]) + 70
    monkeypatch.setattr(cached_training, "USERS", cached_training.USERS + 70)
    plain = plain_model(sparse=True)
    optimizers = optimizers_of(case, plain)
    only = replace(case, batches=0)
    with (
        place.agent(),
        checkpoints_of(only, plain, optimizers, Part(case.epoch)) as checkpoints,
    ):
        assert checkpoints is not None
        assert checkpoints.batches_done == 24
        assert rows_of_plain(plain, optimizers[0]).differences(trained.rows) == []
        assert trained.rows.differences(grown.rows)


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
