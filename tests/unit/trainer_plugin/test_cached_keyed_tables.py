"""Keyed tables whose rows are in a cache and at home are those of a training without a cache."""

from __future__ import annotations

import copy
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad

import recpoint
from recpoint import Checkpointer, KeyedEmbeddingBag, LeastRecent, LeastUsed, Probability, Seen
from recpoint.catalog.check.validate import validate
from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform, cached, local
from recpoint.embeddings.cache.lookup_hooks import cache_of
from recpoint.embeddings.home.contract import FrozenRows, Home
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.embeddings.parity.stripes import Parity
from recpoint.embeddings.server.home import ServedHome
from recpoint.embeddings.server.processes import servers
from recpoint.embeddings.server.server import EmbeddingServer
from recpoint.embeddings.server.tcp import TcpServer, TcpTransport
from recpoint.errors import SettingsError
from recpoint.format.naming import ManifestName
from tests.keyed_training import (
    DIM,
    OPTIMIZERS,
    KeyedTraining,
    arrays_of,
    keyed_checkpointer,
    state_of,
)
from tests.training_builder import Place, until

RULES: dict[str, dict[str, Any]] = {
    "recent": {},
    "ttl": {"evict": LeastRecent(ttl_batches=2)},
    "used": {"evict": LeastUsed()},
    "seen": {"evict": LeastUsed(), "admit": Seen(times=2)},
    "share": {"admit": Probability(share=0.6)},
}
FORMS = [("adagrad", False), ("adagrad", True), ("adam", True), ("sgd", True)]


def commit(ckpt: Checkpointer, place: Place) -> None:
    """Take a checkpoint, and wait until it is committed."""
    count = ckpt.stats.committed
    assert ckpt.checkpoint()
    until(lambda: place.persist_all() > 0)
    until(lambda: ckpt.stats.committed > count)


def train(training: KeyedTraining, place: Place, batches: int, every: int = 6) -> None:
    """Train to so many batches in all, with a committed checkpoint after every `every`."""
    with keyed_checkpointer(training, place, verify_unmarked_rows=1000) as ckpt:
        ckpt.restore()
        while ckpt.batches_done < batches:
            training.batch()
            ckpt.step()
            if ckpt.batches_done % every == 0:
                commit(ckpt, place)


def rows_of_keys(training: KeyedTraining) -> list[object]:
    """Return what `state_of` does, without the entries in row states of free slots."""
    states = training.model.users.slots.row_states
    values, *entries = arrays_of(training)
    used = states[LAST_USE] >= 0
    rows = [array[used].tolist() for array in (states[KEY], values, *entries)]
    return [rows, values.tolist(), state_of(training)[1:]]


def places(place: Place, tmp_path: Path) -> tuple[Place, Place]:
    """Return two places, for a training without and one with a cache."""
    return place, Place(str(tmp_path / "other-run"), tmp_path / "other-staging")


def pair(home: Home, capacity_rows: int = 14, **settings: Any) -> tuple[KeyedTraining, ...]:
    """Return a training without a cache, and an equal one behind a home."""
    plain = KeyedTraining(capacity_rows, **{**settings, "window": None})
    return plain, KeyedTraining(capacity_rows, home=home, **settings)


def train_both(trainings: tuple[KeyedTraining, ...], batches: int) -> None:
    for _ in range(batches):
        for training in trainings:
            training.batch()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("optimizer", "sparse"), FORMS)
def test_a_cache_changes_no_bit(tmp_path: Path, rule: str, optimizer: str, sparse: bool) -> None:
    home = local(tmp_path) if optimizer == "adam" else local()
    window = None if optimizer == "sgd" else 5
    plain, behind = pair(home, optimizer=optimizer, sparse=sparse, window=window, **RULES[rule])
    train_both((plain, behind), 40)
    assert plain.model.users.slots.evicted > 5
    assert state_of(behind) == state_of(plain)
    cache = cache_of(behind.model)
    assert cache is not None and cache.stats.written_rows > 20


@pytest.mark.parametrize("every", [2, 3])
def test_gradients_of_several_batches_are_added_up(every: int) -> None:
    plain, behind = pair(local(), 40, cached_rows={"users": 20})
    for number in range(30):
        for training in (plain, behind):
            training.forward()
            with torch.no_grad():
                training.model.users(torch.arange(5) + number)
            if number % every == 0:
                training.step()
    assert state_of(behind) == state_of(plain)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("sparse", [False, True])
def test_bags_in_a_cache(mode: Any, sparse: bool) -> None:
    if mode == "max" and sparse:
        return
    results = []
    for home in (None, local()):
        torch.manual_seed(1)
        bags = KeyedEmbeddingBag(
            3,
            30,
            mode=mode,
            sparse=sparse,
            initial=Uniform(seed=1),
            evict=LeastRecent(),
            device=None if home is None else "meta",
        )
        model = nn.ModuleDict({"bags": bags, "top": nn.Linear(3, 1)})
        if home is not None:
            cached(model, home, 16)
        optimizer = Adagrad([bags.weight], lr=0.1)
        weights = nn.Parameter(torch.linspace(0.1, 1.0, 12).view(4, 3))
        outs = []
        for number in range(25):
            generator = torch.Generator().manual_seed(number)
            keys = torch.randint(0, 12, (4, 3), generator=generator) + number
            of_bags = {} if mode != "sum" else {"per_sample_weights": weights}
            out = bags(keys, **of_bags)
            model["top"](out).square().sum().backward()
            outs.append(out.tolist())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                outs.append(bags(keys[0] + 1, torch.tensor([0, 2])).tolist())
            bags.eval()
            outs.append(bags(keys, **of_bags).tolist())
            bags.train()
        gradient = None if weights.grad is None else weights.grad.tolist()
        results.append((outs, gradient, bags.counts, bags.to_table(bags.keys()).weight.tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("optimizer", "sparse"),
    [
        FORMS[1],
        *(
            pytest.param(*form, marks=pytest.mark.nightly("loops"))
            for form in FORMS
            if form != FORMS[1]
        ),
    ],
)
def test_a_killed_training_goes_on_with_and_without_a_cache(
    place: Place, optimizer: str, sparse: bool
) -> None:
    uninterrupted = KeyedTraining(12, optimizer=optimizer, sparse=sparse)
    for _ in range(26):
        uninterrupted.batch()
    assert uninterrupted.model.users.slots.evicted > 9
    lives: list[tuple[int, Home | None, int | None]] = [
        (7, local(), None),
        (13, None, None),
        (20, local(place.staging.parent / "home"), 4),
        (26, local(), 9),
    ]
    for batches, home, window in lives:
        resumed = KeyedTraining(12, optimizer=optimizer, sparse=sparse, home=home, window=window)
        train(resumed, place, batches)
    assert state_of(resumed) == state_of(uninterrupted)


def test_checkpoints_are_those_of_a_training_without_a_cache(place: Place, tmp_path: Path) -> None:
    stored = []
    trainings = pair(local(), 30, sparse=True)
    for training, where in zip(trainings, places(place, tmp_path), strict=True):
        train(training, where, 12, 4)
        run = Run.open(open_store(where.run))
        manifests = [run.manifest(step, 1) for step in (4, 8, 12)]
        target = MemoryTarget(["users"])
        restore(run, target, Selection())
        users = target.tables["users"]
        states = [None if state is None else state.tolist() for state in users.row_states]
        stored.append(
            (
                [(manifest.kind, manifest.dirty_rows, manifest.keyed) for manifest in manifests],
                users.values.tolist(),
                states,
            )
        )
        assert validate(run, ManifestName(12, 1), level="full").passed
    assert stored[0] == stored[1]
    assert [kind for kind, *_ in stored[0][0]] == ["full", "increment", "increment"]


def test_new_keys_of_planned_batches_find_a_slot_that_is_free() -> None:
    plain, behind = pair(local(), 26, cached_rows={"users": 24}, window=2)
    train_both((plain, behind), 80)
    assert state_of(behind) == state_of(plain)
    assert plain.model.users.counts.evicted > 20
    cache = cache_of(behind.model)
    assert cache is not None
    assert cache.stats.misses == cache.stats.fetched_bytes == 0 and cache.stats.written_rows > 20


class SlowHome(MemoryHome):
    """A home whose frozen rows are there as late as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.may_freeze = threading.Event()

    def freeze(self, table: str, rows: range) -> FrozenRows:
        assert self.may_freeze.wait(60)
        return super().freeze(table, rows)


def test_a_checkpoint_has_the_keys_and_rows_of_its_cut_however_late_they_are_read(
    place: Place,
) -> None:
    home = SlowHome()
    uninterrupted, behind = pair(home, 14, cached_rows={"users": 15})
    train_both((uninterrupted,), 18)
    with keyed_checkpointer(behind, place) as ckpt:
        ckpt.restore()
        for _ in range(18):
            behind.batch()
            ckpt.step()
        cache = cache_of(behind.model)
        assert cache is not None
        rows = cache.tables["users"]
        cache.mover.submit(lambda: cache.mover.put_at_home(rows)).result()
        evicted = behind.model.users.counts.evicted
        assert ckpt.checkpoint()
        for _ in range(6):  # before the home thread has copied what is in slots
            behind.batch()
        assert behind.model.users.counts.evicted > evicted
        home.may_freeze.set()
        until(lambda: place.persist_all() > 0)
        until(lambda: ckpt.stats.committed == 1)
        ckpt.close(final=False)
    resumed = KeyedTraining(14)
    with keyed_checkpointer(resumed, place) as ckpt:
        ckpt.restore()
        assert ckpt.batches_done == 18
        assert state_of(resumed) == state_of(uninterrupted)


@pytest.mark.parametrize("capacity_rows", [12, 60])
def test_another_capacity_behind_a_home(place: Place, tmp_path: Path, capacity_rows: int) -> None:
    train(KeyedTraining(20), place, 9, 9)
    home = local(tmp_path / "home") if capacity_rows == 12 else MemoryHome()
    trainings = pair(home, capacity_rows)
    for training in trainings:
        with keyed_checkpointer(training, place) as ckpt:
            ckpt.restore()
            assert ckpt.batches_done == 9
            for _ in range(5):
                training.batch()
                ckpt.step()
    assert rows_of_keys(trainings[0]) == rows_of_keys(trainings[1])
    if isinstance(home, MemoryHome):
        assert shelf_pages(home) == [0]


def shelf_pages(home: MemoryHome) -> list[int]:
    """Return how many pages each table has at which rows waited for their places."""
    return [
        table.live.record_pages for table in home._tables.all() if "restored" in table.form.table
    ]


def test_rows_of_a_damaged_checkpoint_do_not_stay_at_home(place: Place) -> None:
    train(KeyedTraining(20), place, 12, 6)
    for chunk in Path(place.run).glob("chunks/000000000012-*/r00000-t*"):
        chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    home = MemoryHome()
    trainings = pair(home, 40)
    for training in reversed(trainings):
        with keyed_checkpointer(training, place) as ckpt:
            ckpt.restore()
            assert ckpt.batches_done == 6
            ckpt.close(final=False)
    assert rows_of_keys(trainings[0]) == rows_of_keys(trainings[1])
    assert shelf_pages(home) == [0, 0]


def test_a_table_without_keys_in_another_capacity_behind_a_home(place: Place) -> None:
    training = KeyedTraining(20)
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore()
        training.step()  # without gradients
        ckpt.step()
        commit(ckpt, place)
    for resumed in pair(local(), 12):
        with keyed_checkpointer(resumed, place) as ckpt:
            ckpt.restore()
            assert (ckpt.batches_done, resumed.model.users.rows_used) == (1, 0)


def test_a_plain_table_becomes_a_keyed_one_at_home(place: Place) -> None:
    plain = KeyedTraining(20)
    users = nn.Embedding(15, DIM)
    plain.model.add_module("users", users)
    weight = users.weight
    plain.optimizers[0] = OPTIMIZERS["adagrad"]([weight, plain.model.items.weight], False)
    with keyed_checkpointer(plain, place) as ckpt:
        ckpt.restore()
        users(torch.arange(15)).sum().backward()
        plain.step()
        ckpt.step()
        commit(ckpt, place)
    for capacity_rows in (30, 10):
        trainings = pair(local(), capacity_rows)
        for training in trainings:
            with keyed_checkpointer(training, place) as ckpt:
                ckpt.restore()
                if capacity_rows == 30:  # a batch needs more than the rows of keys never used
                    training.batch()
                    ckpt.step()
        assert rows_of_keys(trainings[0]) == rows_of_keys(trainings[1])


def test_keys_are_deleted_and_tables_grow(place: Place, tmp_path: Path) -> None:
    trainings = pair(local(tmp_path / "home"))
    for training, where in zip(trainings, places(place, tmp_path), strict=True):
        with keyed_checkpointer(training, where) as ckpt:
            ckpt.restore()
            for number in range(12):
                training.batch()
                ckpt.step()
                if number == 4:
                    ckpt.delete_rows("users", training.model.users.keys()[:3])
                if number == 8:
                    recpoint.grow(training.model, training.optimizers, "users", 25)
            commit(ckpt, where)
    assert trainings[1].model.users.rows_used > 14
    assert state_of(trainings[0]) == state_of(trainings[1])
    resumed = KeyedTraining(25, home=local())
    with keyed_checkpointer(resumed, place) as ckpt:
        ckpt.restore()
        assert state_of(resumed) == state_of(trainings[0])


def test_a_keyed_table_beside_a_cached_one(place: Place) -> None:
    trainings = pair(local(), cached_rows={"items": 7})
    for training in trainings:
        train(training, place, 9, 9)
        break
    with keyed_checkpointer(trainings[1], place) as ckpt:
        ckpt.restore()
        assert state_of(trainings[0]) == state_of(trainings[1])
        trainings[1].batch()
        ckpt.step()


def test_what_a_cache_refuses(place: Place) -> None:
    used = KeyedTraining(14)
    used.batch()
    with pytest.raises(SettingsError, match="keys that have rows already"):
        cached(used.model, local(), 20)
    behind = KeyedTraining(14, home=local())
    with pytest.raises(SettingsError, match="cached already"):
        cached(behind.model, local(), 20)
    with pytest.raises(SettingsError, match="a copy of the model"):
        copy.deepcopy(behind.model)
    with pytest.raises(SettingsError, match="load_state_dict"):
        behind.model.load_state_dict({})
    with pytest.raises(SettingsError, match="Adam moves every row"):
        behind.optimizers[0] = torch.optim.Adam([behind.model.users.weight])
        behind.batch()
    small = KeyedTraining(14, home=local(), cached_rows={"users": 2})
    with pytest.raises(SettingsError, match="'users'.*2 slots"):
        for _ in range(9):
            small.batch()


def test_the_trainer_stages_keyed_tables_where_servers_stage_others(place: Place) -> None:
    started = [EmbeddingServer(name=f"server {number}") for number in range(2)]
    token = b"of this test"
    with ExitStack() as stack:
        for server in started:
            stack.callback(server.end)
        listening = [stack.enter_context(TcpServer(server, token)) for server in started]
        home = stack.enter_context(
            ServedHome([TcpTransport(server.address, token) for server in listening])
        )
        slots = {"users": 10, "items": 8}
        plain, behind = pair(home, sparse=True, cached_rows=slots, window=3)
        settings = {"at_servers": True, "when_busy": "wait", "interval_batches": 5}
        with place.agent(), keyed_checkpointer(behind, place, **settings) as ckpt:
            ckpt.restore()
            for keys, target in ckpt.batches(total=17):
                nn.functional.mse_loss(behind.model(keys), target).backward()
                behind.step()
    train_both((plain,), 17)
    run = Run.open(open_store(place.run))
    manifest = run.manifest(15, 1)
    assert (manifest.kind, manifest.servers) == ("increment", 2)
    names = [spec.name for spec in manifest.tables]
    ranks = {names[chunk.table]: chunk.rank for chunk in manifest.chunks if chunk.table is not None}
    assert ranks["users"] == 0 < ranks["items"]
    assert validate(run, ManifestName(17, 1), level="full").passed
    for home_again in (None, local()):
        resumed = KeyedTraining(14, sparse=True, home=home_again)
        with keyed_checkpointer(resumed, place) as ckpt:
            ckpt.restore()
            assert state_of(resumed) == state_of(plain)


@pytest.mark.nightly("kills")
def test_a_server_with_parity_is_killed() -> None:
    with servers(count=3, parity=Parity(data=2, parity=1), timeout_seconds=60.0) as home:
        assert isinstance(home, ServedHome)
        plain, behind = pair(home, optimizer="adam", sparse=True, window=3)
        train_both((plain, behind), 15)
        os.kill(home.greetings[1].pid, signal.SIGKILL)
        train_both((plain, behind), 15)
        assert state_of(behind) == state_of(plain)


def test_training_goes_back_when_a_server_is_lost(place: Place) -> None:
    running = [EmbeddingServer(name=f"server {number}") for number in range(2)]

    def revive(number: int) -> EmbeddingServer:
        running[number] = EmbeddingServer(name=f"server {number}")
        return running[number]

    plain, behind = pair(ServedHome(running, revive=revive), window=3, evict=LeastUsed())
    lost_at = [13]
    settings = {"rewinds": 1, "when_busy": "wait", "interval_batches": 5}
    with place.agent(), keyed_checkpointer(behind, place, **settings) as ckpt:
        ckpt.restore()
        for keys, target in ckpt.batches(total=26):
            nn.functional.mse_loss(behind.model(keys), target).backward()
            behind.step()
            if lost_at and ckpt.batches_done + 1 == lost_at[0]:
                lost_at.clear()
                running[1].end()
        assert ckpt.batches_done == 26
    train_both((plain,), 26)
    assert state_of(behind) == state_of(plain)
    for server in running:
        server.end()
