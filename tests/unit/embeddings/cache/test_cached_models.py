"""What scripts do to cached models outside of training: it works, or the error says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, SparseAdam

from recpoint.embeddings.cache.install import cached, read_rows
from recpoint.embeddings.home.homes import local
from recpoint.embeddings.home.initial import Uniform
from recpoint.errors import SettingsError
from tests.cached_training import (
    INITIAL,
    ITEMS,
    USERS,
    Batches,
    Model,
    cached_model,
    lookahead,
    plain_model,
    train,
)

SMALL = {"users": 40, "items": 60}


def _another_weight(model: Model) -> None:
    model.users.weight = nn.Parameter(torch.zeros(SMALL["users"] + 2, 6))


MOVES: dict[str, Callable[[Model], Any]] = {
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "there and back": lambda model: model.half().float(),
    "emptied": lambda model: model.to_empty(device="cpu"),
    "to meta": lambda model: model.to("meta"),
    "another weight": _another_weight,
}


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_model_that_is_converted_or_moved_is_refused(move: str, ahead: bool) -> None:
    model, cache = cached_model(SMALL)
    MOVES[move](model)
    optimizer = SGD(model.parameters(), lr=0.1)
    reader: Any = lookahead(Batches(), model, 5) if ahead else Batches()
    with pytest.raises(SettingsError, match=r"cached table '\w+'.*after cached\(\).*before cached"):
        train(model, optimizer, reader, batches=2)
    cache.close()


def test_a_model_that_is_moved_between_two_passes_takes_no_step() -> None:
    model, _ = cached_model(SMALL)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(Batches().batch(0)).sum().backward()
    model.users.double()
    with pytest.raises(SettingsError, match="cached table 'users'.*torch.float64"):
        optimizer.step()
    with pytest.raises(SettingsError, match="cached table 'users'.*torch.float64"):
        read_rows(model, "users")


def test_a_conversion_that_changes_nothing_is_none() -> None:
    plain, (model, _) = plain_model(), cached_model(SMALL)
    model.to("cpu").float().requires_grad_().train()
    model.users.weight.data.share_memory_()  # other memory, but for all who hold it
    batch = Batches().batch(0)
    assert torch.equal(model(batch), plain(batch))


@pytest.mark.parametrize("files", [False, True])
def test_a_home_has_one_model(files: bool, tmp_path: Path) -> None:
    with local(tmp_path / "home") if files else local() as home:
        with pytest.raises(SettingsError, match="capacity_rows"):
            cached(plain_model(), home, 1)  # this one does not take it
        model, cache = cached_model(SMALL, home)
        other = plain_model()
        with pytest.raises(SettingsError, match="home that has the rows of another model.*local"):
            cached(other, home, SMALL)
        assert other.users.weight.shape[0] == USERS  # it stays as it is
        train(model, SGD(model.parameters(), lr=0.1), lookahead(Batches(), model, 5), batches=3)
        cache.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_an_initial_that_raises_is_named(ahead: bool) -> None:
    def failing(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        if table == "items":
            raise ZeroDivisionError("of the script")
        return INITIAL(table, ids, dim, dtype)

    model, cache = cached_model(SMALL, initial=failing)
    reader: Any = lookahead(Batches(), model, 5) if ahead else Batches()
    with pytest.raises(ZeroDivisionError, match="of the script") as raised:
        train(model, SGD(model.parameters(), lr=0.1), reader, batches=1)
    assert any("initial(...)" in note and "'items'" in note for note in raised.value.__notes__)
    cache.close()


@pytest.mark.parametrize("seed", [-1, 2**32, 0.5, True])
def test_seeds_that_would_give_the_values_of_others(seed: Any) -> None:
    with pytest.raises(SettingsError, match=r"Uniform\(seed=...\).*2\*\*32 - 1"):
        Uniform(seed=seed)


def test_each_seed_gives_other_values() -> None:
    ids = torch.arange(ITEMS)
    first, last = (Uniform(seed)("items", ids, 3, torch.float32) for seed in (0, 2**32 - 1))
    assert not torch.equal(first, last)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("make", [SGD, SparseAdam, Adagrad])
def test_row_states_are_read_as_those_of_a_plain_table(
    make: Callable[..., torch.optim.Optimizer], steps: int
) -> None:
    found = []
    for model in (plain_model(sparse=True), cached_model(SMALL, sparse=True)[0]):
        form = {"initial_accumulator_value": 0.25} if make is Adagrad else {}
        optimizer = make([model.users.weight], lr=0.1, **form)
        for number in range(steps):
            model(Batches().batch(number)).sum().backward()
            optimizer.step()
        some = torch.tensor([3, 190, 3])
        found.append([read_rows(model, "users", optimizer, ids) for ids in (None, some, some[:0])])
    for plain, own in zip(*found, strict=True):
        assert plain.keys() == own.keys()
        for name, array in plain.items():
            assert torch.equal(array, own[name]), name
    assert ("sum" in found[1][0]) == (make is Adagrad)
    assert ("exp_avg" in found[1][0]) == (make is SparseAdam and steps == 1)
