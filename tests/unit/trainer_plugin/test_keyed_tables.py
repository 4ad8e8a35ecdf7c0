"""Checkpoints of keyed tables: exact row states of a table beside those of its optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recpoint import (
    Checkpointer,
    Follower,
    LeastRecent,
    LeastUsed,
    Loss,
    Probability,
)
from recpoint.catalog.check.validate import validate
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings import Uniform
from recpoint.errors import IncompatibleModel, SettingsError
from recpoint.format.naming import ManifestName
from recpoint.trainer_plugin.snapshot.window import Window
from tests.consolidation import merge
from tests.keyed_training import (
    DIM,
    OPTIMIZERS,
    KeyedReader,
    KeyedTraining,
    everything,
    keyed_checkpointer,
    rows_by_key,
)
from tests.running_parts import pipeline_of
from tests.training_builder import Place, until


def train(
    training: KeyedTraining, place: Place, batches: int, every: int, **settings: object
) -> None:
    """Train to so many batches in all, with a committed checkpoint after every `every`."""
    with keyed_checkpointer(training, place, **settings) as ckpt:
        ckpt.restore()
        while ckpt.batches_done < batches:
            training.batch()
            ckpt.step()
            if ckpt.batches_done % every == 0:
                commit(ckpt, place)


def commit(ckpt: Checkpointer, place: Place) -> None:
    """Take a checkpoint, and wait until it is committed."""
    count = ckpt.stats.committed
    assert ckpt.checkpoint()
    until(lambda: place.persist_all() > 0)
    until(lambda: ckpt.stats.committed > count)


@pytest.mark.filterwarnings("ignore::recpoint.embeddings.tables.optimizers.FullyDirtyTables")
@pytest.mark.parametrize(
    ("optimizer", "sparse"), [("adagrad", False), ("adam", False), ("adam", True), ("sgd", True)]
)
def test_a_killed_training_goes_on_bit_for_bit(place: Place, optimizer: str, sparse: bool) -> None:
    uninterrupted = KeyedTraining(12, optimizer=optimizer, sparse=sparse)
    for _ in range(26):
        uninterrupted.batch()
    assert uninterrupted.model.users.slots.evicted > 9
    for batches in (7, 13, 26):
        resumed = KeyedTraining(12, optimizer=optimizer, sparse=sparse)
        train(resumed, place, batches, 6, verify_unmarked_rows=1000)
    assert everything(resumed) == everything(uninterrupted)


def test_an_increment_holds_the_slots_that_changed(place: Place) -> None:
    training = KeyedTraining(capacity_rows=60, optimizer="adagrad", sparse=True)
    train(training, place, 8, 4)
    run = Run.open(open_store(place.run))
    increment = run.manifest(8, 1)
    assert increment.kind == "increment"
    users = next(i for i, table in enumerate(increment.tables) if table.name == "users")
    stored_rows = sum(chunk.row_count or 0 for chunk in increment.chunks if chunk.table == users)
    last_use = training.model.users.slots.row_states["keyed.last_use"]
    # Each slot that was looked up since, and row 0, which the marks of a lookup may hold.
    assert int((last_use >= 4).sum()) <= stored_rows <= int((last_use >= 4).sum()) + 1
    assert validate(run, ManifestName(8, 1), level="full").passed
    merge(run, increment)
    assert validate(run, ManifestName(8, 1), level="full").passed
    resumed = KeyedTraining(capacity_rows=60, optimizer="adagrad", sparse=True)
    train(resumed, place, 8, 4)
    assert everything(resumed) == everything(training)


@pytest.mark.parametrize("capacity_rows", [12, 60])
def test_another_capacity_keeps_keys_rows_and_states(place: Place, capacity_rows: int) -> None:
    training = KeyedTraining(capacity_rows=20)
    train(training, place, 9, 9)
    resumed = KeyedTraining(capacity_rows=capacity_rows)
    with keyed_checkpointer(resumed, place) as ckpt:
        ckpt.restore()
        stored, kept = rows_by_key(training), rows_by_key(resumed)
        leaving = sorted(stored, key=lambda key: (stored[key][0], key))
        assert list(kept) and kept.items() <= stored.items()
        assert set(kept) == set(leaving[-capacity_rows:])
        resumed.batch()
        ckpt.step()
        commit(ckpt, place)
    assert Run.open(open_store(place.run)).manifest(10, 2).kind == "full"


def test_a_plain_table_becomes_a_keyed_one_of_its_row_numbers(place: Place) -> None:
    plain = KeyedTraining(capacity_rows=20)
    users = nn.Embedding(15, DIM)
    plain.model.add_module("users", users)
    weight = users.weight
    plain.optimizers[0] = OPTIMIZERS["adagrad"]([weight, plain.model.items.weight], False)
    plain.reader = BelowFifteen()
    train(plain, place, 4, 4)
    sums = plain.optimizers[0].state[weight]["sum"]
    for capacity_rows in (30, 10):
        resumed = KeyedTraining(capacity_rows=capacity_rows)
        with keyed_checkpointer(resumed, place) as ckpt:
            ckpt.restore()
            assert ckpt.batches_done == 4
            assert rows_by_key(resumed) == {
                key: [0, weight[key].tolist(), sums[key].tolist()]
                for key in range(15 - min(capacity_rows, 15), 15)
            }
            assert resumed.model.users.slots.steps == 0
            resumed.batch()
            ckpt.step()


class BelowFifteen(KeyedReader):
    """Reads keys that are rows of a table of fifteen."""

    def __next__(self) -> tuple[Tensor, Tensor]:
        keys, target = super().__next__()
        return keys.remainder(15), target


def test_a_cut_between_forward_and_step_has_no_state_of_the_key_before(place: Place) -> None:
    training = KeyedTraining(12)
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore()
        for _ in range(9):
            training.batch()
            ckpt.step()
        slots = training.model.users.slots
        earlier_keys, evicted = set(training.model.users.keys().tolist()), slots.evicted
        training.forward()
        assert slots.evicted > evicted
        new_keys = set(training.model.users.keys().tolist()) - earlier_keys
        new_slots = slots.find(torch.tensor(sorted(new_keys)))
        commit(ckpt, place)
    target = MemoryTarget(["users"])
    run = Run.open(open_store(place.run))
    restore(run, target, Selection())
    spec = next(spec for spec in run.manifest(9, 1).tables if spec.name == "users")
    stored_states = zip(spec.row_states, target.tables["users"].row_states, strict=True)
    states = {state.name: tensor for state, tensor in stored_states if tensor is not None}
    live_states = training.optimizers[0].state[training.model.users.weight]
    assert torch.equal(states["sum"], live_states["sum"])
    assert bool((states["sum"][new_slots] == 0.25).all())


def test_keys_are_deleted_and_marked_by_key(place: Place) -> None:
    training = KeyedTraining(20)
    with keyed_checkpointer(training, place) as ckpt:
        ckpt.restore()
        for _ in range(3):
            training.batch()
            ckpt.step()
        slots = training.model.users.slots
        deleted = torch.cat([training.model.users.keys()[:3], torch.tensor([10**12])])
        ckpt.delete_rows("users", deleted)
        assert not slots.find(deleted).any()
        training.batch()
        ckpt.step()
        commit(ckpt, place)
        expected = rows_by_key(training)
        ckpt.mark("users", torch.tensor([10**12]))
        ckpt.mark("users", training.model.users.keys())
        with pytest.raises(ValueError, match="int64"):
            ckpt.delete_rows("users", torch.tensor([1.0]))
    resumed = KeyedTraining(20)
    with keyed_checkpointer(resumed, place) as ckpt:
        ckpt.restore()
        assert rows_by_key(resumed) == expected


def test_other_rules_are_refused_by_name(place: Place) -> None:
    train(KeyedTraining(20), place, 2, 2)
    for rules, match in (
        ({"evict": LeastRecent(ttl_batches=5)}, "'users' has evict .*5} here and .*None}"),
        ({"admit": Probability(share=0.5)}, "'users' has admit .*Probability"),
        ({"evict": LeastUsed()}, "has the row states .*keyed.uses"),
    ):
        with (
            keyed_checkpointer(KeyedTraining(20, **rules), place) as ckpt,
            pytest.raises(IncompatibleModel, match=match),
        ):
            ckpt.restore()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"bits": Loss(increase=1e-4, of=lambda model, batch: torch.zeros(()))}, "keys"),
        ({"grow": {"users": Uniform(seed=0)}}, "grows by Options"),
    ],
    ids=["Loss", "grow"],
)
def test_what_goes_by_row_numbers_is_refused(
    place: Place, settings: dict[str, object], match: str
) -> None:
    train(KeyedTraining(20), place, 2, 2)
    with (
        pytest.raises((SettingsError, IncompatibleModel), match=match),
        keyed_checkpointer(KeyedTraining(25), place, **settings) as ckpt,
    ):
        ckpt.restore()


def test_a_wrapper_and_a_second_name_are_refused(place: Place) -> None:
    training = KeyedTraining(20)
    training.model.add_module("users", nn.DataParallel(training.model.users))
    with pytest.raises(SettingsError, match="DataParallel around it"):
        keyed_checkpointer(training, place)
    training = KeyedTraining(20)
    training.model.out = nn.Linear(DIM, 21)
    training.model.out.weight = training.model.users.weight
    with pytest.raises(SettingsError, match="in the module 'out', too"):
        keyed_checkpointer(training, place)


def test_a_follower_does_not_serve_slots_as_rows(place: Place) -> None:
    train(KeyedTraining(20), place, 2, 2)
    served = nn.Module()
    served.users, served.items = nn.Embedding(21, DIM), nn.Embedding(9, DIM)
    served.top = nn.Linear(DIM, 1)
    with (
        Follower(place.run, model=served) as follower,
        pytest.raises(IncompatibleModel, match="keys"),
    ):
        follower.poll()


def test_parts_of_a_keyed_table_are_not_loaded(place: Place) -> None:
    train(KeyedTraining(20), place, 2, 2)
    with (
        keyed_checkpointer(KeyedTraining(20), place) as ckpt,
        pytest.raises(IncompatibleModel, match="has keys, and its values alone"),
    ):
        ckpt.restore(partial={"tables": ["users"]})


@pytest.mark.parametrize("residual", [False, True], ids=["rows", "residuals"])
def test_rounded_rows_keep_their_keys(place: Place, residual: bool) -> None:
    """Of residuals, the row in the full may be another key's."""
    settings = {"bits": 4, "residual": residual, "policy": "consecutive"}
    training = KeyedTraining(12)
    train(training, place, 12, 3, **settings)
    run = Run.open(open_store(place.run))
    newest = run.manifest(12, 1)
    assert newest.kind == "increment"
    schemes = {chunk.scheme for chunk in newest.chunks}
    assert ("residual" in schemes) is residual
    assert validate(run, ManifestName(12, 1), level="full").passed
    merge(run, newest)
    assert validate(run, ManifestName(12, 1), level="full").passed
    resumed = KeyedTraining(12)
    with keyed_checkpointer(resumed, place, **settings) as ckpt:
        ckpt.restore()
        stored, restored = rows_by_key(training), rows_by_key(resumed)
        assert {key: row[0] for key, row in restored.items()} == {
            key: row[0] for key, row in stored.items()
        }
        for key, row in restored.items():
            assert torch.allclose(torch.tensor(row[1]), torch.tensor(stored[key][1]), atol=0.2)


def _wait_for_a_copied_row(ckpt: Checkpointer) -> None:
    """Wait until the open window has copied something, also where the machine is busy."""
    ahead = pipeline_of(ckpt).ahead
    assert ahead is not None and isinstance(ahead.window, Window)
    window = ahead.window
    until(lambda: window._copier is not None and window._copier.copied()[0] > 0)


def test_a_full_is_copied_before_its_cut(place: Place) -> None:
    uninterrupted = KeyedTraining(12)
    for _ in range(14):
        uninterrupted.batch()
    for last in (9, 14):
        training = KeyedTraining(12)
        with (
            place.agent(),
            keyed_checkpointer(
                training, place, interval_batches=4, copy_fulls_ahead=3, when_busy="wait"
            ) as ckpt,
        ):
            ckpt.restore()
            while ckpt.batches_done < last:
                training.batch()
                ckpt.step()
                if last == 9 and ckpt.batches_done < 4:
                    _wait_for_a_copied_row(ckpt)
    assert Run.open(open_store(place.run)).manifest(4, 1).copied_ahead is not None
    assert everything(training) == everything(uninterrupted)


def plain_training(rows: int) -> KeyedTraining:
    """Return the training with a plain table in place of the keyed one."""
    training = KeyedTraining()
    users = nn.Embedding(rows, DIM)
    training.model.add_module("users", users)
    training.optimizers[0] = OPTIMIZERS["adagrad"](
        [users.weight, training.model.items.weight], False
    )
    training.reader = BelowFifteen()
    return training


def test_a_keyed_table_becomes_a_plain_one_of_its_keys(place: Place) -> None:
    keyed = KeyedTraining(20)
    keyed.reader = BelowFifteen()
    train(keyed, place, 3, 3)
    rows = rows_by_key(keyed)
    assert 0 < len(rows) < 15
    rule = Uniform(seed=9)
    plain = plain_training(15)
    with keyed_checkpointer(plain, place, grow={"users": rule}) as ckpt:
        ckpt.restore()
        weight = plain.model.users.weight
        sums = plain.optimizers[0].state[weight]["sum"]
        first = rule("users", torch.arange(15), DIM, torch.float32)
        for key in range(15):
            expected = rows[key][1:] if key in rows else [first[key].tolist(), [0.25] * DIM]
            assert [weight[key].tolist(), sums[key].tolist()] == expected
        plain.batch()
        ckpt.step()
        commit(ckpt, place)
    assert Run.open(open_store(place.run)).manifest(4, 2).kind == "full"
    again = plain_training(15)
    with keyed_checkpointer(again, place) as ckpt:
        ckpt.restore()
        assert torch.equal(again.model.users.weight, weight)


@pytest.mark.parametrize(
    ("table_rows", "match"),
    [(15, r"no row of \d+ of its keys"), (2, "keys that are no rows of it")],
)
def test_a_plain_table_of_other_keys_is_refused(place: Place, table_rows: int, match: str) -> None:
    keyed = KeyedTraining(20)
    keyed.reader = BelowFifteen()
    train(keyed, place, 3, 3)
    with (
        keyed_checkpointer(plain_training(table_rows), place) as ckpt,
        pytest.raises(IncompatibleModel, match=match),
    ):
        ckpt.restore()
