"""Checkpoints of tables in a cache: they restore into plain models, other caches, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, SparseAdam

from recpoint import Checkpointer, Consecutive, Intermittent, Lookahead, OneShot
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.errors import HomeError, IncompatibleModel, SettingsError
from recpoint.kernels import moments
from tests.cached_training import (
    ITEMS,
    USERS,
    Batches,
    Model,
    Rows,
    as_bits,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
    train,
)
from tests.combinations import combinations
from tests.flat_settings import arguments
from tests.training_builder import Place

SMALL = {"users": 30, "items": 40}


def _tables(model: Model) -> list[Tensor]:
    return [model.users.weight, model.items.weight]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda m: [SGD(m.parameters(), lr=0.5)],
    "adagrad": lambda m: [Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.2)],
    "sparse adam": lambda m: [SparseAdam(_tables(m), lr=0.01), SGD(m.top.parameters(), lr=0.1)],
}


class Both:
    """A model with its optimizers and reader; in a cache if it has slots."""

    def __init__(
        self,
        name: str,
        slots: dict[str, int] | None,
        home: Home | None = None,
        window: int = 10,
        *,
        is_meta: bool = True,
    ) -> None:
        sparse = name == "sparse adam"
        self.reader: Any = Batches()
        if slots is None:
            self.model = plain_model(sparse=sparse)
        else:
            self.model, _ = cached_model(slots, home, sparse=sparse, is_meta=is_meta)
            self.reader = Lookahead(self.reader, self.model, window=window)
        self.optimizers = OPTIMIZERS[name](self.model)

    @property
    def rows(self) -> Rows:
        cache = cache_of(self.model)
        if cache is None:
            return rows_of_plain(self.model, self.optimizers[0])
        return rows_of_cache(cache)

    def checkpointer(self, place: Place, **settings: Any) -> Checkpointer:
        return Checkpointer(
            self.model,
            self.optimizers,
            **arguments(
                {
                    "run": place.run,
                    "directory": place.staging,
                    "reader": self.reader,
                    "interval_batches": 5,
                    "small_table_values": 0,
                    "close_seconds": 120.0,
                    "drain_seconds": 120.0,
                    "handle_sigterm": False,
                    "announce": False,
                    "on_error": "raise",
                    **settings,
                }
            ),
        )

    def train(self, ckpt: Checkpointer | None, batches: int) -> list[float]:
        def after(_: int) -> None:
            if ckpt is not None:
                ckpt.step()

        return _train(self, batches, after)

    def same_as(self, other: Both) -> None:
        assert self.rows.differences(other.rows) == []
        assert torch.equal(as_bits(self.model.top.weight), as_bits(other.model.top.weight))


def _train(both: Both, batches: int, after: Any) -> list[float]:
    class Together:
        def zero_grad(self) -> None:
            for one in both.optimizers:
                one.zero_grad()

        def step(self) -> None:
            for one in both.optimizers:
                one.step()

    return train(both.model, Together(), both.reader, batches=batches, after=after)  # type: ignore[arg-type]


@contextmanager
def checkpointing(both: Both, place: Place, **settings: Any) -> Iterator[Checkpointer]:
    with place.agent(), both.checkpointer(place, **settings) as ckpt:
        ckpt.restore()
        yield ckpt


POLICIES: dict[str, Any] = {
    "consecutive": Consecutive(),
    "one-shot": OneShot(),
    "intermittent": Intermittent(),
}


@pytest.mark.parametrize(("policy", "name"), combinations(list(POLICIES), list(OPTIMIZERS)))
def test_what_a_cache_stored_restores_into_a_plain_model(
    place: Place, name: str, policy: str
) -> None:
    first = Both(name, SMALL)
    with checkpointing(first, place, policy=POLICIES[policy]) as ckpt:
        first.train(ckpt, 32)
    plain = Both(name, None)
    with checkpointing(plain, place, policy=POLICIES[policy]) as ckpt:
        assert ckpt.batches_done == 32
        plain.same_as(first)
        uninterrupted = Both(name, None)
        uninterrupted.train(None, 32)
        plain.same_as(uninterrupted)


def test_second_moments_of_a_cache_are_stored_in_eight_bits(place: Place) -> None:
    first = Both("adagrad", SMALL)
    with checkpointing(first, place, state=8) as ckpt:
        first.train(ckpt, 32)
    plain, uninterrupted = Both("adagrad", None), Both("adagrad", None)
    with checkpointing(plain, place, state=8):
        restored = [plain.optimizers[0].state[w]["sum"].clone() for w in _tables(plain.model)]
    cached = Both("adagrad", SMALL)
    with checkpointing(cached, place, state=8):
        cached.same_as(plain)
    uninterrupted.train(None, 32)
    for found, weight in zip(restored, _tables(uninterrupted.model), strict=True):
        trained = uninterrupted.optimizers[0].state[weight]["sum"]
        codes, grids, _ = moments.encode(trained)
        assert torch.equal(found, moments.decode(codes, grids)) and not torch.equal(found, trained)


@pytest.mark.parametrize(("before", "name"), combinations([None, SMALL], list(OPTIMIZERS)))
def test_training_goes_on_in_a_cache_bit_for_bit(
    place: Place, name: str, before: dict[str, int] | None
) -> None:
    first = Both(name, before)
    with checkpointing(first, place) as ckpt:
        first.train(ckpt, 23)
    second = Both(name, {"users": 40, "items": 60}, window=3)
    with checkpointing(second, place) as ckpt:
        assert ckpt.batches_done == 23
        second.same_as(first)
        second.train(ckpt, 20)
    whole = Both(name, None)
    whole.train(None, 43)
    second.same_as(whole)
    third = Both(name, None)
    with checkpointing(third, place):
        third.same_as(whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_that_had_values_are_trained_and_restored(place: Place, name: str) -> None:
    """An optimizer may make row states in its first step, after the Checkpointer was built."""
    first = Both(name, SMALL, is_meta=False)
    with checkpointing(first, place) as ckpt:
        first.train(ckpt, 7)
    expected = Both(name, None)
    expected.train(None, 7)
    first.same_as(expected)
    second = Both(name, SMALL, is_meta=False)
    with checkpointing(second, place):
        second.same_as(expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_checkpoints(place: Place, bits: int) -> None:
    first = Both("adagrad", SMALL)
    with checkpointing(first, place, bits=bits) as ckpt:
        first.train(ckpt, 20)
    restored = [Both("adagrad", slots) for slots in (None, SMALL)]
    for one in restored:
        with checkpointing(one, place, bits=bits):
            pass
    restored[0].same_as(restored[1])


class SlowHome(MemoryHome):
    """Reads frozen rows only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        import threading

        self.may_freeze = threading.Event()
        self.may_freeze.set()

    def freeze(self, table: str, rows: range) -> Any:
        assert self.may_freeze.wait(60)
        return super().freeze(table, rows)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_has_the_rows_of_its_cut_however_late_they_are_read(
    place: Place, name: str
) -> None:
    """Steps go on before the home thread freezes the home and copies the slots."""
    home = SlowHome()
    first = Both(name, {"users": USERS, "items": ITEMS}, home)
    with checkpointing(first, place, interval_batches=20, when_busy="wait") as ckpt:

        def after(_: int) -> None:
            if ckpt.batches_done == 18:
                cache = cache_of(first.model)
                assert cache is not None
                for rows in cache.tables.values():  # so that there is something to freeze
                    cache.mover.submit(partial(cache.mover.put_at_home, rows)).result()
                home.may_freeze.clear()
            ckpt.step()
            if ckpt.batches_done == 25:
                home.may_freeze.set()

        _train(first, 25, after)
        ckpt.close(final=False)
    second = Both(name, None)
    with checkpointing(second, place):
        pass
    expected = Both(name, None)
    expected.train(None, 20)
    second.same_as(expected)


def test_a_home_that_fails_fails_the_checkpoint_and_then_training(place: Place) -> None:
    home = SlowHome()
    first = Both("adagrad", SMALL, home)
    with place.agent(), first.checkpointer(place, on_error="continue") as ckpt:
        ckpt.restore()
        first.train(ckpt, 4)
        home.close()
        with pytest.raises(HomeError, match=r"close\(\)"):
            first.train(ckpt, 40)


def test_deleted_and_marked_rows(place: Place) -> None:
    first, plain = Both("adagrad", SMALL), Both("adagrad", None)
    other = Place(place.run + "-plain", place.staging)
    ids = torch.tensor([0, 5, 5, 150])
    for both, at in ((first, place), (plain, other)):
        with checkpointing(both, at) as ckpt:
            both.train(ckpt, 7)
            ckpt.delete_rows("users", ids)
            ckpt.mark("items", torch.tensor([3]))
            both.train(ckpt, 4)
            ckpt.mark_all("users")
    first.same_as(plain)
    restored = Both("adagrad", None)
    with checkpointing(restored, place):
        restored.same_as(plain)


def test_rows_trained_before_the_start_are_in_the_first_checkpoint(place: Place) -> None:
    first = Both("adagrad", SMALL)
    first.train(None, 10)
    with checkpointing(first, place) as ckpt:
        first.train(ckpt, 6)
    second = Both("adagrad", None)
    with checkpointing(second, place):
        second.same_as(first)


def test_parts_of_a_checkpoint_are_refused(place: Place) -> None:
    first = Both("sgd", None)
    with checkpointing(first, place) as ckpt:
        first.train(ckpt, 6)
    second = Both("sgd", SMALL)
    with (
        second.checkpointer(place) as ckpt,
        pytest.raises(IncompatibleModel, match="'users' is cached: only a whole checkpoint"),
    ):
        ckpt.restore(partial={"tables": ["users"]})


def test_an_optimizer_that_changes_other_rows_is_refused_at_once(place: Place) -> None:
    both = Both("sgd", SMALL)
    both.optimizers = [SGD(both.model.parameters(), lr=0.1, momentum=0.9)]
    with pytest.raises(SettingsError, match="cached table 'users'.*momentum"):
        both.checkpointer(place)


def test_an_optimizer_built_before_the_cache_is_refused(place: Place) -> None:
    from recpoint.embeddings.cache.install import cached
    from recpoint.embeddings.home.homes import local

    model = plain_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    cached(model, local(), SMALL)
    both = Both("sgd", None)
    both.model, both.optimizers = model, [optimizer]
    with pytest.raises(SettingsError, match="a parameter of shape .* outside the model"):
        both.checkpointer(place)
