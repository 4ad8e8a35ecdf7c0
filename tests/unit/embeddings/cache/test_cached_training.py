"""Training through a cache gives the bits of training without one."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, SparseAdam

from recpoint.embeddings.cache.install import cached
from recpoint.embeddings.home.homes import local
from recpoint.errors import SettingsError
from tests.cached_training import (
    INITIAL,
    ITEMS,
    USERS,
    Batches,
    Model,
    RowWiseAdagrad,
    as_bits,
    cached_model,
    lookahead,
    plain_model,
    rows_of_cache,
    rows_of_plain,
    train,
)
from tests.combinations import combinations

TIGHT = {"users": 8, "items": 24}  # what one batch may need
AMPLE = {"users": USERS, "items": ITEMS}


def _tables(model: Model) -> list[Tensor]:
    return [model.users.weight, model.items.weight]


OPTIMIZERS: dict[str, tuple[Any, bool]] = {
    "sgd": (lambda m: SGD(m.parameters(), lr=0.5), False),
    "sparse sgd": (lambda m: SGD(m.parameters(), lr=0.5), True),
    "adagrad": (lambda m: Adagrad(m.parameters(), lr=0.1), False),
    "sparse adagrad": (
        lambda m: Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.3),
        True,
    ),
    "sparse adam": (lambda m: SparseAdam(_tables(m), lr=0.01), True),
    "row-wise adagrad": (lambda m: RowWiseAdagrad(_tables(m)), True),
}


def both(
    name: str, capacity: dict[str, int], window: int | None, *, batches: int = 60, **form: Any
) -> Any:
    """Train plain and cached; return the cache, after comparing all bits."""
    make, sparse = OPTIMIZERS[name]
    weighted = form.pop("weighted", False)
    is_meta = form.pop("is_meta", True)
    plain = plain_model(sparse=sparse, **form)
    optimizer = make(plain)
    losses = train(plain, optimizer, Batches(weighted=weighted), batches=batches)
    model, cache = cached_model(
        capacity, sparse=sparse, is_meta=is_meta, row_local=(RowWiseAdagrad,), **form
    )
    own = make(model)
    reader: Any = Batches(weighted=weighted)
    if window is not None:
        reader = lookahead(reader, model, window)
    assert train(model, own, reader, batches=batches) == losses
    assert rows_of_plain(plain, optimizer).differences(rows_of_cache(cache)) == []
    assert torch.equal(as_bits(model.top.weight), as_bits(plain.top.weight))
    cache.close()
    return cache


@pytest.mark.parametrize(
    ("room", "name"),
    combinations(
        list(itertools.product([1, 7, 300], [TIGHT, {"users": 30, "items": 40}, AMPLE])),
        list(OPTIMIZERS),
    ),
)
def test_bits_are_those_of_plain_training(room: tuple[int, dict[str, int]], name: str) -> None:
    window, capacity = room
    cache = both(name, capacity, window)
    assert cache.stats.batches == 60
    if capacity != TIGHT:
        assert cache.stats.misses == 0
    if capacity == AMPLE:
        assert cache.stats.written_rows == 0
    else:
        assert cache.stats.written_rows > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_a_lookahead_rows_are_brought_by_lookups(name: str) -> None:
    cache = both(name, {"users": 40, "items": 60}, None)
    assert cache.stats.misses > 0


@pytest.mark.parametrize("mode", ["mean", "max", "sum"])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_every_way_of_reducing_bags(name: str, mode: str) -> None:
    both(name, {"users": 30, "items": 40}, 10, mode=mode)


@pytest.mark.parametrize("name", ["sgd", "sparse sgd"])
def test_weights_of_samples(name: str) -> None:
    both(name, {"users": 30, "items": 40}, 10, weighted=True)


@pytest.mark.parametrize("name", ["sparse adam", "adagrad"])
def test_the_padding_row_is_left_alone(name: str) -> None:
    both(name, {"users": 30, "items": 40}, 10, padding=0)


@pytest.mark.parametrize("name", ["sparse adam", "adagrad", "sgd"])
def test_tables_with_storage_are_copied_to_the_home(name: str) -> None:
    cache = both(name, {"users": 30, "items": 40}, 10, is_meta=False)
    assert all(rows.storage is None for rows in cache.tables.values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    both("sparse sgd", {"users": 30, "items": 40}, 10, dtype=dtype)


@pytest.mark.parametrize("name", ["sgd", "sparse adagrad", "sparse adam"])
def test_gradients_of_several_batches_are_summed(name: str) -> None:
    make, sparse = OPTIMIZERS[name]

    def trained(model: Model, reader: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(model)
        for number, batch in enumerate(reader):
            loss = torch.nn.functional.mse_loss(model(batch), batch["target"])
            loss.backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 2 == 0)
        return optimizer

    plain = plain_model(sparse=sparse)
    optimizer = trained(plain, Batches())
    # So few that rows leave between two batches whose gradients are summed, unless they are held.
    model, cache = cached_model({"users": 30, "items": 60}, sparse=sparse)
    trained(model, lookahead(Batches(), model, 5))
    assert cache.stats.written_rows > 0
    assert rows_of_plain(plain, optimizer).differences(rows_of_cache(cache)) == []
    assert cache.stats.misses == 0


def test_a_loop_that_reads_one_batch_ahead_is_right() -> None:
    def trained(model: Model, reader: Any) -> torch.optim.Optimizer:
        optimizer = SGD(model.parameters(), lr=0.5)
        batches = iter(reader)
        present = next(batches)
        for coming in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(present), present["target"]).backward()
            optimizer.step()
            present = coming
        return optimizer

    plain = plain_model(sparse=True)
    optimizer = trained(plain, Batches())
    model, cache = cached_model({"users": 16, "items": 48}, sparse=True)
    trained(model, lookahead(Batches(), model, 20))
    assert rows_of_plain(plain, optimizer).differences(rows_of_cache(cache)) == []


def test_evaluation_between_batches_changes_nothing() -> None:
    make, sparse = OPTIMIZERS["sparse adagrad"]
    plain = plain_model(sparse=sparse)
    optimizer = make(plain)
    expected = train(plain, optimizer, Batches(), batches=40)
    model, cache = cached_model({"users": 30, "items": 50}, sparse=sparse)
    own = make(model)
    scores: list[Tensor] = []

    def evaluate(done: int) -> None:
        if done % 5 == 0:
            with torch.no_grad():
                scores.append(model(Batches(seed=1).batch(done)))

    losses = train(model, own, lookahead(Batches(), model, 20), batches=40, after=evaluate)
    assert losses == expected
    assert rows_of_plain(plain, optimizer).differences(rows_of_cache(cache)) == []
    with torch.no_grad():
        assert torch.equal(scores[-1], plain(Batches(seed=1).batch(40)))


def test_two_views_have_the_rows_of_their_moments() -> None:
    """The home thread copies neither before the training thread has changed rows again."""
    make, sparse = OPTIMIZERS["sparse adagrad"]
    model, cache = cached_model(AMPLE, sparse=sparse)
    plain = plain_model(sparse=sparse)
    batches = [Batches().batch(number) for number in range(12)]
    optimizers = make(model), make(plain)
    expected, found = [], []
    for part in (batches[:4], batches[4:8], batches[8:]):
        for batch in part:
            for trained, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(trained(batch), batch["target"]).backward()
                optimizer.step()
        expected.append(
            [one.clone() for one in rows_of_plain(plain, optimizers[1]).arrays["users"]]
        )
        view = cache.view()
        outs = [torch.empty_like(one) for one in expected[-1]]
        view.fetch("users", None, outs)
        found.append((view, outs))
    for view, _ in found:
        view.begin()
    for (view, outs), arrays in zip(found, expected, strict=True):
        view.finish()
        for out, array in zip(outs, arrays, strict=True):
            assert torch.equal(as_bits(out), as_bits(array))


def test_an_evaluation_of_all_rows_needs_no_more_slots_than_a_batch() -> None:
    plain = plain_model()
    model, _ = cached_model({"users": 8, "items": 24})
    with torch.no_grad():
        for number in range(30):
            batch = Batches(seed=3).batch(number)
            assert torch.equal(model(batch), plain(batch))


def test_a_batch_that_does_not_fit_names_what_is_needed() -> None:
    model, _ = cached_model({"users": 8, "items": 10})
    reader = lookahead(Batches(), model, 5)
    with pytest.raises(SettingsError, match=r"table 'items'.*found 10 slots.*at least 1\d|2\d"):
        train(model, SGD(model.parameters(), lr=0.1), reader, batches=40)


def test_of_one_number_for_all_tables_the_error_says_which_would_do() -> None:
    model, cache = cached_model(20)
    assert cache.tables["users"].slots.capacity == 10
    with pytest.raises(SettingsError, match=r"\{'users': 12\}, or 24 if you give one number"):
        model.users(torch.arange(12))
    model, _ = cached_model(24)
    assert len(model.users(torch.arange(12))) == 12


def test_rows_that_wait_for_a_step_count_as_needed() -> None:
    model, _ = cached_model({"users": 10, "items": ITEMS})
    waiting = model.users(torch.arange(6))
    with pytest.raises(SettingsError, match=r"table 'users'.*found 10 slots.*at least 12:"):
        model.users(torch.arange(100, 106))
    assert waiting.requires_grad


@pytest.mark.parametrize("gradients", [False, True])
def test_rows_that_wait_for_a_step_leave_the_other_slots_to_lookups(gradients: bool) -> None:
    """Lookups whose outputs are dropped never get gradients, and give their slots free."""
    plain = plain_model()
    model, _ = cached_model({"users": 10, "items": ITEMS})
    waiting = model.users(torch.arange(2))
    with torch.set_grad_enabled(gradients):
        for first in range(100, 180, 8):
            ids = torch.arange(first, first + 8)
            assert torch.equal(model.users(ids), plain.users(ids))
    assert torch.equal(waiting, plain.users(torch.arange(2)))


def test_an_evaluation_waits_for_rows_that_are_on_their_way() -> None:
    def slow(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        time.sleep(0.1)
        return INITIAL(table, ids, dim, dtype)

    plain = plain_model()
    model, cache = cached_model(AMPLE, initial=slow)
    reader = iter(lookahead(Batches(), model, 10))
    for _ in range(4):
        next(reader)
    assert cache.stats.window > 0
    with torch.no_grad():
        for number in (6, 7):
            batch = Batches().batch(number)
            assert torch.equal(model(batch), plain(batch))
    assert cache.stats.misses > 0


def test_a_lookup_out_of_range_is_an_index_error() -> None:
    model, _ = cached_model(AMPLE)
    for wrong in (-1, USERS):
        with pytest.raises(IndexError):
            model.users(torch.tensor([0, wrong]))
    assert model.users(torch.tensor([], dtype=torch.int64)).shape == (0, 6)


REFUSED: dict[str, tuple[Any, str]] = {
    "momentum": (lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9), "momentum"),
    "decay": (lambda m: Adagrad(m.parameters(), weight_decay=0.1), "weight_decay"),
    "adam": (lambda m: Adam(m.parameters()), "Adam"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_changes_other_rows_is_refused_by_name(name: str) -> None:
    make, says = REFUSED[name]
    model, _ = cached_model(AMPLE)
    with pytest.raises(SettingsError, match=f"cached table.*{says}"):
        train(model, make(model), lookahead(Batches(), model, 5), batches=1)


def test_hyperparameters_are_looked_at_again_when_they_change() -> None:
    model, _ = cached_model(AMPLE)
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, optimizer, lookahead(Batches(), model, 5), batches=2)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(SettingsError, match="weight_decay"):
        train(model, optimizer, lookahead(Batches(), model, 5), batches=1)


def test_a_mapping_caches_the_tables_that_it_names() -> None:
    model = plain_model()
    cached(model, local(), {"users": 50})
    assert model.users.weight.shape[0] == 52
    assert model.items.weight.shape[0] == ITEMS


def test_slots_are_shared_out_small_tables_first() -> None:
    model = plain_model()
    cached(model, local(), 150)
    assert (model.users.weight.shape[0], model.items.weight.shape[0]) == (77, 77)
    model = plain_model()
    cached(model, local(), 1000)
    assert (model.users.weight.shape[0], model.items.weight.shape[0]) == (USERS + 2, ITEMS + 2)


WRONG: dict[str, tuple[Any, str]] = {
    "no home": (lambda: cached(plain_model(), None, 10), "a home"),  # type: ignore[arg-type]
    "no tables": (lambda: cached(torch.nn.Linear(2, 2), local(), 10), "at least one"),
    "too few": (lambda: cached(plain_model(), local(), 1), "at least 2"),
    "unknown": (lambda: cached(plain_model(), local(), {"user": 3}), "no|one of"),
    "no values": (lambda: cached(Model(device="meta"), local(), 10), "initial="),
    "twice": (lambda: cached(cached(plain_model(), local(), 10), local(), 10), "already"),
    "max_norm": (
        lambda: cached(torch.nn.Sequential(torch.nn.Embedding(5, 2, max_norm=1.0)), local(), 10),
        "max_norm",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_cached_is_refused(name: str) -> None:
    act, says = WRONG[name]
    with pytest.raises(SettingsError, match=says):
        act()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # from torch, at a graph break
def test_compiled_models() -> None:
    plain = plain_model(sparse=True)
    optimizer = SGD(plain.parameters(), lr=0.5)
    losses = train(plain, optimizer, Batches(), batches=5)
    model, cache = cached_model({"users": 30, "items": 40}, sparse=True)
    own = SGD(model.parameters(), lr=0.5)
    reader = lookahead(Batches(), model, 5)
    model.compile(backend="eager")
    assert train(model, own, reader, batches=5) == losses
    assert rows_of_plain(plain, optimizer).differences(rows_of_cache(cache)) == []
