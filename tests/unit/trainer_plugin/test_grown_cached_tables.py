"""Cached tables that have more rows than their checkpoint, in each home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

import recpoint
from recpoint import Checkpointer, Lookahead
from recpoint.embeddings import Uniform, local
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.errors import IncompatibleModel, SettingsError
from tests import cached_training
from tests.cached_training import (
    DIM,
    Batch,
    Batches,
    Model,
    Rows,
    RowWiseAdagrad,
    as_bits,
    cached_model,
    plain_model,
    rows_of_cache,
    rows_of_plain,
    train,
)
from tests.flat_settings import arguments
from tests.grown_training import kinds
from tests.training_builder import Place

USERS, MORE_USERS = cached_training.USERS, cached_training.USERS + 90
RULE = Uniform(seed=3, low=-0.2, high=0.2)
SLOTS = {"users": 30, "items": 40}

OPTIMIZERS: dict[str, Callable[[Model], list[Optimizer]]] = {
    "adagrad": lambda m: [Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.2)],
    "sparse adam": lambda m: [
        SparseAdam([m.users.weight, m.items.weight], lr=0.01),
        SGD(m.top.parameters(), lr=0.1),
    ],
    "row-wise": lambda m: [
        RowWiseAdagrad([m.users.weight, m.items.weight]),
        SGD(m.top.parameters(), lr=0.1),
    ],
}


class Trained:
    """A model with optimizers and reader; in a cache if there is a home."""

    def __init__(
        self,
        home: Home | None = None,
        name: str = "adagrad",
        *,
        slots: dict[str, int] = SLOTS,
        batches: Callable[[], Batches] = Batches,
        **form: Any,
    ) -> None:
        self.reader: Any = batches()
        form = {"sparse": True, **form}
        if home is None:
            self.model: Model = plain_model(**form)
        else:
            row_local = (RowWiseAdagrad,)
            self.model, self.cache = cached_model(slots, home, row_local=row_local, **form)
            self.reader = Lookahead(self.reader, self.model, window=6)
        self.home = home
        self.optimizers = OPTIMIZERS[name](self.model)

    @property
    def rows(self) -> Rows:
        arrays = rows_of_plain(self.model, self.optimizers[0]).arrays
        return Rows(arrays if self.home is None else arrays | rows_of_cache(self.cache).arrays)

    def checkpointer(self, place: Place, **settings: Any) -> Checkpointer:
        given = {
            "run": place.run,
            "directory": place.staging,
            "reader": self.reader,
            "interval_batches": 5,
            "small_table_values": 0,
            "close_seconds": 120.0,
            "drain_seconds": 120.0,
            "handle_sigterm": False,
            "announce": False,
            "row_local_optimizers": (RowWiseAdagrad,),
            "grow": {"users": RULE},
            **settings,
        }
        return Checkpointer(self.model, self.optimizers, **arguments(given))

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def train(
        self, ckpt: Checkpointer | None, batches: int, *, grows_after: int | None = None
    ) -> None:
        def after(batches_done: int) -> None:
            if ckpt is not None:
                ckpt.step()
            if batches_done == grows_after:
                grow(self)

        train(self.model, self, self.reader, batches=batches, after=after)  # type: ignore[arg-type]

    def same_as(self, expected: Trained) -> None:
        assert self.rows.differences(expected.rows) == []
        assert torch.equal(as_bits(self.model.top.weight), as_bits(expected.model.top.weight))


class MoreUsersLater(Batches):
    """Looks up more users after as many batches."""

    batches_before = 12

    def batch(self, position: int) -> Batch:
        batch = super().batch(position)
        if position >= self.batches_before:
            batch["users"] = batch["users"] * 7919 % MORE_USERS
        return batch


def grow(trained: Trained) -> None:
    recpoint.grow(trained.model, trained.optimizers, "users", MORE_USERS, initial=RULE)


def first_run(place: Place, name: str = "adagrad") -> Trained:
    """Train the smaller model, plain, for 12 batches, with a checkpoint at the end."""
    first = Trained(name=name)
    with place.agent(), first.checkpointer(place, grow={}) as ckpt:
        ckpt.restore()
        first.train(ckpt, 12)
    return first


@pytest.fixture
def more_users(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns what gives models and batches that are built later more users."""
    return lambda: monkeypatch.setattr(cached_training, "USERS", MORE_USERS)


def homes(kind: str, folder: Path) -> Home:
    if kind == "memory":
        return local()
    if kind == "files":
        return local(str(folder / "home"))
    return ServedHome([EmbeddingServer(name=f"server {number}") for number in range(2)])


HOMES = [
    ("memory", "adagrad", True),
    ("memory", "sparse adam", False),
    ("files", "adagrad", False),
    ("servers", "sparse adam", True),
]


@pytest.mark.parametrize(("kind", "name", "is_meta"), HOMES)
def test_training_goes_on_in_a_cache_as_in_a_plain_model(
    place: Place, tmp_path: Path, more_users: Any, kind: str, name: str, is_meta: bool
) -> None:
    first = first_run(place, name)
    more_users()
    expected = Trained(name=name)
    with place.agent(), expected.checkpointer(place) as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 12
        values, *states = expected.rows.arrays["users"]
        new = RULE("users", torch.arange(USERS, MORE_USERS), DIM, torch.float32)
        assert torch.equal(values[USERS:], new)
        old_arrays = first.rows.arrays["users"]
        for array, old in zip([values, *states], old_arrays, strict=True):
            assert torch.equal(as_bits(array[:USERS]), as_bits(old))
        for state in states:
            assert bool((state[USERS:] == (0.2 if name == "adagrad" else 0.0)).all())
        ckpt.close(final=False)
    with homes(kind, tmp_path) as home:
        grown = Trained(home, name, is_meta=is_meta)
        with place.agent(), grown.checkpointer(place) as ckpt:
            ckpt.restore()
            assert ckpt.batches_done == 12
            grown.same_as(expected)
            grown.train(ckpt, 9)
            expected.train(None, 9)
            grown.same_as(expected)
        # Rows that were never looked up are in the checkpoint, too.
        again = Trained(name=name)
        with place.agent(), again.checkpointer(place, grow={}) as ckpt:
            ckpt.restore()
            assert ckpt.batches_done == 21
            again.same_as(expected)
        grown.cache.close()


def test_a_row_state_of_an_unknown_optimizer_is_refused(place: Place, more_users: Any) -> None:
    first_run(place, "row-wise")
    more_users()
    for home in (None, local()):
        grown = Trained(home, "row-wise")
        text = "the row state 'sum', which RowWiseAdagrad makes in a step"
        with pytest.raises(IncompatibleModel, match=text):
            grown.checkpointer(place).restore()


def test_a_new_padding_row_is_zero(place: Place, more_users: Any) -> None:
    first_run(place)
    more_users()

    def rule(table: str, ids: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        assert table == "users"
        return torch.ones(len(ids), dim, dtype=dtype)

    grown = Trained(local())
    slots = grown.cache.tables["users"].slots
    slots.padding_row = MORE_USERS - 1
    with place.agent(), grown.checkpointer(place, grow={"users": rule}) as ckpt:
        ckpt.restore()
        values, *_ = grown.rows.arrays["users"]
        assert bool((values[USERS:-1] == 1.0).all())
        assert not values[-1].any()
        ckpt.close(final=False)


@pytest.mark.parametrize("slots", [SLOTS, {"items": 40}])
def test_training_goes_back_to_a_checkpoint_from_before_the_growth(
    place: Place, more_users: Any, slots: dict[str, int]
) -> None:
    """A server is lost after the growth, before the first full of the new chain.

    Without slots, the table that grew is plain, and its new row states have been trained.
    """
    first_run(place)
    more_users()
    expected = Trained()
    with place.agent(), expected.checkpointer(place) as ckpt:
        ckpt.restore()
        ckpt.close(final=False)
    expected.train(None, 18)

    running = [EmbeddingServer(name=f"server {number}") for number in range(2)]

    def revive(number: int) -> EmbeddingServer:
        running[number] = EmbeddingServer(name=f"server {number}")
        return running[number]

    grown = Trained(ServedHome(running, revive=revive), slots=slots, is_meta=slots is SLOTS)
    lost = 0
    with place.agent(), grown.checkpointer(place, rewinds=1, interval_batches=8) as ckpt:
        ckpt.restore()
        for batch in ckpt.batches(total=30):
            train(grown.model, grown, [batch], batches=1)  # type: ignore[arg-type]
            if not lost and ckpt.batches_done == 15:
                lost = ckpt.batches_done
                running[1].end()
        grown.same_as(expected)
    assert lost
    for server in running:
        server.end()


@pytest.mark.parametrize("grows_after", [0, 12])
@pytest.mark.parametrize(("kind", "name", "is_meta"), HOMES[:3])
def test_a_cached_table_grows_while_it_trains(
    place: Place, tmp_path: Path, kind: str, name: str, is_meta: bool, grows_after: int
) -> None:
    """As a plain table does. The reader has read batches with new rows before they are there."""
    expected = Trained(name=name, batches=MoreUsersLater)
    if not grows_after:
        grow(expected)
    expected.train(None, 23, grows_after=grows_after)
    with homes(kind, tmp_path) as home:
        grown = Trained(home, name, batches=MoreUsersLater, is_meta=is_meta)
        with place.agent(), grown.checkpointer(place, when_busy="wait") as ckpt:
            ckpt.restore()
            if not grows_after:
                grow(grown)
            grown.train(ckpt, 23, grows_after=grows_after)
            grown.same_as(expected)
            assert grown.model.users.num_embeddings == MORE_USERS
        assert [step for step, kind in kinds(place) if kind == "full"] == [5, 15][: 1 + grows_after]
        grown.cache.close()
    again = Trained(name=name, batches=MoreUsersLater)
    grow(again)
    with place.agent(), again.checkpointer(place, grow={}) as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 23
        again.same_as(expected)
        ckpt.close(final=False)


def test_a_cached_table_grows_before_its_restore(place: Place) -> None:
    """From a checkpoint with fewer rows, and into one with all."""
    expected = Trained(batches=MoreUsersLater)
    expected.train(None, 20, grows_after=12)
    first_run(place)
    for first_batch, last_batch in ((12, 16), (16, 20)):
        grown = Trained(local(), batches=MoreUsersLater)
        grow(grown)
        with place.agent(), grown.checkpointer(place) as ckpt:
            ckpt.restore()
            assert ckpt.batches_done == first_batch
            grown.train(ckpt, last_batch - first_batch)
        if last_batch == 20:
            grown.same_as(expected)
        grown.cache.close()


def test_tables_on_servers_keep_their_sizes() -> None:
    home = homes("servers", Path())
    grown = Trained(home)
    with pytest.raises(SettingsError, match="a ServedHome, whose tables keep their sizes"):
        grow(grown)
    grown.train(None, 2)
    grown.cache.close()


def test_training_goes_back_to_a_checkpoint_from_before_a_growth_of_this_process(
    place: Place,
) -> None:
    """A server of another table is lost after the growth, before the full that follows it."""
    expected = Trained(batches=MoreUsersLater)
    expected.train(None, 30, grows_after=12)

    running = [EmbeddingServer(name=f"server {number}") for number in range(2)]

    def revive(number: int) -> EmbeddingServer:
        running[number] = EmbeddingServer(name=f"server {number}")
        return running[number]

    home = ServedHome(running, revive=revive)
    grown = Trained(home, slots={"items": 40}, batches=MoreUsersLater, is_meta=False)
    lost = 0
    with place.agent(), grown.checkpointer(place, rewinds=1, interval_batches=8, grow={}) as ckpt:
        ckpt.restore()
        for batch in ckpt.batches(total=30):
            if ckpt.batches_done >= 12:
                grow(grown)
            train(grown.model, grown, [batch], batches=1)  # type: ignore[arg-type]
            if not lost and ckpt.batches_done == 14:
                lost = ckpt.batches_done
                running[1].end()
        grown.same_as(expected)
    assert lost
    for server in running:
        server.end()
