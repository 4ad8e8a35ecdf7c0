"""Random training through a cache, compared with a model whose tables are in memory."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from recpoint import Lookahead
from recpoint.embeddings.cache.install import read_rows
from recpoint.embeddings.cache.view import CacheView
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.files import FileHome
from recpoint.embeddings.home.homes import FileLimits
from recpoint.embeddings.home.memory import MemoryHome
from tests.cached_training import (
    ITEMS,
    USERS,
    Model,
    Rows,
    cached_model,
    plain_model,
    rows_of_plain,
)
from tests.example_counts import examples

MOST = 6  # users in a batch; each has two items
UNFINISHED = 3  # batches whose gradients no step has applied yet
CAPACITIES = [
    {"users": (UNFINISHED + 1) * MOST, "items": (UNFINISHED + 1) * 2 * MOST},
    {"users": 60, "items": 70},
    {"users": USERS, "items": ITEMS},
]
EPOCH = 9
SIZES = {"users": USERS, "items": ITEMS}

Kind = Literal["sgd", "adagrad", "sparse sgd", "sparse adagrad", "sparse adam"]
KINDS: list[Kind] = ["sgd", "adagrad", "sparse sgd", "sparse adagrad", "sparse adam"]


def optimizer_of(kind: Kind, model: Model) -> Optimizer:
    tables = [model.users.weight, model.items.weight]
    if kind.endswith("sgd"):
        return SGD(tables, lr=0.5)
    if kind.endswith("adagrad"):
        return Adagrad(tables, lr=0.1, initial_accumulator_value=0.2)
    return SparseAdam(tables, lr=0.01)


class Counting:
    """Checks that a home gets each row once for each time that it was in a slot."""

    def __init__(self) -> None:
        self.written: set[tuple[str, int]] = set()  # and not fetched since

    def note_write(self, table: str, ids: Tensor) -> None:
        for row in ids.tolist():
            assert (table, row) not in self.written, f"{table} {row} was written twice"
            self.written.add((table, row))

    def note_fetch(self, table: str, ids: Tensor) -> None:
        self.written -= {(table, row) for row in ids.tolist()}


class CountingMemory(MemoryHome):
    def __init__(self) -> None:
        super().__init__()
        self.counting = Counting()

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        self.counting.note_write(table, ids)
        super().write_back(table, ids, records, batch=batch)

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        self.counting.note_fetch(table, ids)
        return super().fetch(table, ids, out)


class CountingFiles(FileHome):
    def __init__(self, directory: Path) -> None:
        limits = FileLimits(index_rows=40, segment_bytes=8_192, buffer_bytes=4_096)
        super().__init__(directory, limits=limits)
        self.counting = Counting()

    def write_back(self, table: str, ids: Tensor, records: Tensor, *, batch: int) -> None:
        self.counting.note_write(table, ids)
        super().write_back(table, ids, records, batch=batch)

    def fetch(self, table: str, ids: Tensor, out: Tensor) -> Tensor:
        self.counting.note_fetch(table, ids)
        return super().fetch(table, ids, out)


class Drawn:
    """A reader: each batch follows from seed and position."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.position += 1
            yield batch_of(self.seed, self.position)
            if self.position % EPOCH == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def batch_of(seed: int, position: int) -> dict[str, Any]:
    drawn = np.random.default_rng([seed, position])
    count = int(drawn.choice([0, 1, MOST, MOST]))
    ids = {}
    for name, shape in (("users", (count,)), ("items", (count, 2))):
        one = drawn.integers(0, SIZES[name], shape)
        match drawn.integers(4):
            case 0:
                one %= 4  # duplicates
            case 1:
                one = np.where(one % 2, 0, SIZES[name] - 1)  # both ends
        ids[name] = torch.from_numpy(one.astype(drawn.choice(["int32", "int64"])))
    hints: dict[str, Tensor] = dict(ids)
    is_right = False
    match drawn.integers(6):
        case 0:
            del hints["items"]
        case 1:
            hints = {}
        case 2:
            hints["users"] = torch.tensor([-1, USERS, 3, 2**40], dtype=torch.int64)
        case 3:
            hints["items"] = torch.arange(ITEMS - 30, ITEMS)  # rows that do not come
        case _:
            is_right = True
    return {**ids, "hints": hints, "is right": is_right, "again": int(drawn.integers(3))}


class Taken(NamedTuple):
    """A view, where its rows go, and what has to be there in the end."""

    view: CacheView
    ids: dict[str, Tensor | None]
    outs: dict[str, list[Tensor]]
    then: Rows


class Play(RuleBasedStateMachine):
    """A model with a cache beside a plain one; both train the same batches."""

    def new_home(self) -> Home:
        raise NotImplementedError

    @initialize(
        kind=st.sampled_from(KINDS),
        capacity=st.sampled_from(CAPACITIES),
        window=st.sampled_from([1, 3, 20]),
        seed=st.integers(0, 2**32),
        mode=st.sampled_from(["sum", "mean"]),
        padding=st.sampled_from([None, None, 0, ITEMS - 1]),
    )
    def begin(
        self,
        kind: Kind,
        capacity: dict[str, int],
        window: int,
        seed: int,
        mode: Literal["sum", "mean"],
        padding: int | None,
    ) -> None:
        form: dict[str, Any] = {"sparse": "sparse" in kind, "mode": mode, "padding": padding}
        self.plain = plain_model(**form)
        self.own = optimizer_of(kind, self.plain)
        self.home = self.new_home()
        self.model, self.cache = cached_model(capacity, self.home, **form)
        self.optimizer = optimizer_of(kind, self.model)
        self.reader = Lookahead(
            Drawn(seed), self.model, ids=lambda batch: batch["hints"], window=window
        )
        self.batches = iter(self.reader)
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.unfinished = 0  # batches in gradients or losses
        self.views: list[Taken] = []

    @property
    def knows_states(self) -> bool:
        """Whether the optimizer has trained both tables."""
        return isinstance(self.optimizer, SGD) or all(
            rows.slots.states for rows in self.cache.tables.values()
        )

    # --- training --------------------------------------------------------------------------------

    def next_batch(self) -> dict[str, Any]:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.reader)
            batch = next(self.batches)
        found: dict[str, Any] = batch
        return found

    def loss(self, model: Model, batch: dict[str, Any]) -> Tensor:
        users, items = model.users(batch["users"]), model.items(batch["items"])
        # The gradient of a row follows from its values.
        loss: Tensor = torch.sin(3 * users).sum() + torch.cos(users * items).sum()
        if batch["again"] > 0:  # the same rows in other lookups
            loss = loss + torch.sin(model.users(batch["users"].flip(0)) + users).sum()
        if batch["again"] > 1:
            loss = loss + torch.sin(model.items(batch["items"].flip(1)[1:])).sum()
            loss = loss + torch.cos(model.users(batch["users"][1:]) - users[:-1]).sum()
        return loss

    @precondition(lambda self: self.unfinished < UNFINISHED)
    @rule()
    def forward(self) -> None:
        before = self.cache.stats
        batch = self.next_batch()
        was_planned = self.cache.stats.unplanned == before.unplanned and batch["is right"]
        one, other = self.loss(self.model, batch), self.loss(self.plain, batch)
        assert torch.equal(one.detach(), other.detach())
        assert not was_planned or self.cache.stats.misses == before.misses
        self.losses.append((one, other))
        self.unfinished += 1

    @precondition(lambda self: self.losses)
    @rule(which=st.integers(0, UNFINISHED - 1))
    def backward(self, which: int) -> None:
        for loss in self.losses.pop(which % len(self.losses)):
            loss.backward()

    @precondition(lambda self: self.losses)
    @rule(which=st.integers(0, UNFINISHED - 1))
    def drop_a_loss(self, which: int) -> None:
        self.losses.pop(which % len(self.losses))

    @rule()
    def step(self) -> None:
        self.optimizer.step()
        self.own.step()
        self.zero_grad(False)

    @rule(keeps=st.booleans())
    def skip_the_step(self, keeps: bool) -> None:
        """As automatic mixed precision does after an overflow."""
        self.zero_grad(keeps)

    def zero_grad(self, keeps: bool) -> None:
        for optimizer in (self.optimizer, self.own):
            optimizer.zero_grad(set_to_none=not keeps)
        if not keeps:
            self.unfinished = len(self.losses)

    @precondition(lambda self: self.unfinished < UNFINISHED)
    @rule()
    def train(self) -> None:
        self.forward()
        for loss in self.losses.pop():
            loss.backward()
        self.step()

    @precondition(lambda self: self.unfinished < UNFINISHED)
    @rule()
    def train_with_a_closure(self) -> None:
        batch = self.next_batch()
        for model, optimizer in ((self.model, self.optimizer), (self.plain, self.own)):

            def closure(model: Model = model, optimizer: Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        self.zero_grad(False)

    @rule()
    def fail_in_a_step(self) -> None:
        def fails() -> float:
            raise OverflowError

        for optimizer in (self.optimizer, self.own):
            try:
                optimizer.step(fails)
            except OverflowError:
                continue
            raise AssertionError("it ended")

    @rule()
    def begin_an_epoch(self) -> None:
        self.batches = iter(self.reader)

    # --- other calls -----------------------------------------------------------------------------

    @rule(
        users=st.lists(st.integers(0, USERS - 1), max_size=40),
        items=st.lists(st.integers(0, ITEMS - 1), max_size=40),
    )
    def evaluate(self, users: list[int], items: list[int]) -> None:
        # At most as many rows as there are slots beside those of unfinished batches.
        batch = {
            "users": torch.tensor(users[:MOST], dtype=torch.int64),
            "items": torch.tensor(items[:MOST], dtype=torch.int64).view(-1, 1),
        }
        with torch.no_grad():
            for name, ids in batch.items():
                one, other = (getattr(model, name)(ids) for model in (self.model, self.plain))
                assert torch.equal(one, other)

    @rule(
        name=st.sampled_from(sorted(SIZES)), chosen=st.lists(st.integers(0, ITEMS - 1), max_size=5)
    )
    def delete(self, name: str, chosen: list[int]) -> None:
        if self.losses or not self.knows_states:
            return  # a loss refers to values of before
        ids = torch.tensor(chosen, dtype=torch.int64)
        self.cache.zero_rows(name, ids)
        with torch.no_grad():
            for array in rows_of_plain(self.plain, self.own).arrays[name]:
                array[ids] = 0

    @precondition(lambda self: len(self.views) < 2)
    @rule(
        users=st.none() | st.sets(st.integers(0, USERS - 1), max_size=50),
        items=st.none() | st.sets(st.integers(0, ITEMS - 1), max_size=50),
        steps=st.booleans(),
    )
    def take_a_view(self, users: set[int] | None, items: set[int] | None, steps: bool) -> None:
        goes_on = threading.Event()
        if steps:  # before the home thread has copied the slots
            self.cache.mover.thread.submit(goes_on.wait)
        view = self.cache.view()
        then = {
            name: tuple(array.clone() for array in arrays)
            for name, arrays in rows_of_plain(self.plain, self.own).arrays.items()
        }
        wanted: dict[str, Tensor | None] = {}
        outs: dict[str, list[Tensor]] = {}
        for name, chosen in (("users", users), ("items", items)):
            ids = None if chosen is None else torch.tensor(sorted(chosen), dtype=torch.int64)
            arrays = [array for _, array in self.cache.tables[name].slots.arrays()]
            count = SIZES[name] if ids is None else len(ids)
            outs[name] = [torch.empty(count, *one.shape[1:], dtype=one.dtype) for one in arrays]
            wanted[name] = ids
            view.fetch(name, ids, outs[name])
        view.begin()
        self.views.append(Taken(view, wanted, outs, Rows(then)))
        if steps:
            self.step()
            goes_on.set()

    @precondition(lambda self: self.views)
    @rule(which=st.integers(0, 1))
    def finish_a_view(self, which: int) -> None:
        taken = self.views.pop(which % len(self.views))
        taken.view.finish()
        for name, ids in taken.ids.items():
            for out, array in zip(taken.outs[name], taken.then.arrays[name], strict=False):
                assert torch.equal(out, array if ids is None else array[ids]), name

    # --- what holds after each call --------------------------------------------------------------

    @invariant()
    def rows_are_those_of_the_plain_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        # Few at a time; all of them in the end.
        at = torch.arange(self.cache.batch % 7, ITEMS, 7)
        self.compare(at)

    def compare(self, ids: Tensor | None) -> None:
        for name in SIZES:
            one = read_rows(self.model, name, self.optimizer, ids)
            other = read_rows(self.plain, name, self.own, ids)
            assert torch.equal(one.pop("values"), other.pop("values")), name
            assert one.keys() == other.keys()
            for state in one:
                assert torch.equal(one[state], other[state]), (name, state)

    @invariant()
    def each_row_is_in_one_slot(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.mover.thread.submit(lambda: None).result()
        for rows in self.cache.tables.values():
            ids, slots = rows.oracle.held()
            assert len(ids) <= rows.slots.capacity
            assert len(torch.unique(ids)) == len(torch.unique(slots)) == len(ids)
            assert torch.equal(rows.slots.ids[slots], ids)
            there = rows.slots.ids[: rows.slots.capacity]
            assert int((there >= 0).sum()) == len(ids)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            while self.views:
                self.finish_a_view(0)
            self.compare(None)
            self.losses.clear()
            # All rows leave their slots, so that the home has to have them.
            with torch.no_grad():
                for name, rows in SIZES.items():
                    for ids in torch.arange(rows).split(MOST):
                        getattr(self.model, name)(ids.view(-1, 1))
            self.compare(None)
            self.cache.close()
            self.home.close()


class MemoryPlay(Play):
    def new_home(self) -> Home:
        return CountingMemory()


class FilePlay(Play):
    def new_home(self) -> Home:
        self.directory = Path(tempfile.mkdtemp(prefix="home-"))
        return CountingFiles(self.directory)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "directory"):
                shutil.rmtree(self.directory)


TestInMemory = MemoryPlay.TestCase
TestInMemory.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)
TestInFiles = FilePlay.TestCase
TestInFiles.settings = settings(max_examples=examples(50), stateful_step_count=30, deadline=None)
