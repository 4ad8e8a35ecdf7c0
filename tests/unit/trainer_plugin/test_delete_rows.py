from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recpoint import Follower
from recpoint.catalog.check.validate import validate
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.tables.tables import plain_tables
from recpoint.errors import SettingsError
from recpoint.format.naming import ManifestName
from recpoint.trainer_plugin.named_tables import NamedTables
from recpoint.trainer_plugin.ranks.ranks import Ranks
from recpoint.trainer_plugin.ranks.sharding import lay_out
from recpoint.trainer_plugin.state.optimizers import OptimizerState
from tests.consolidation import merge
from tests.training_builder import (
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    seed_everything,
    until,
)

DELETED = torch.tensor([[3, 77], [202, 3]])


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def adagrad() -> Training:
    seed_everything(1)
    model = Recommender()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    return Training(model, [optimizer], Batches(1))


def restored(place: Place, step: int) -> tuple[torch.Tensor, ...]:
    target = MemoryTarget(["users"])
    restore(Run.open(open_store(place.run)), target, Selection(step=step))
    table = target.tables["users"]
    states = [state for state in table.row_states if state is not None]
    assert states
    return table.values, *states


@pytest.mark.parametrize(
    ("bits", "residual"), [("lossless", False), (4, False), (4, True)], ids=str
)
@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
def test_a_deleted_row_is_zeros_wherever_it_goes(
    place: Place, bits: object, residual: bool, policy: str
) -> None:
    training = adagrad()
    follower = Follower(place.run)
    gone = DELETED.flatten().unique()
    settings = {"bits": bits, "residual": residual, "policy": policy}
    with checkpointer(training, place, **settings, interval_batches=100) as ckpt:
        ckpt.restore()

        def checkpoint() -> int:
            training.batch()
            ckpt.step()
            if ckpt.batches_done == 2:
                ckpt.delete_rows("users", DELETED)
            assert ckpt.checkpoint()
            until(lambda: place.persist_all() > 0)
            until(lambda: ckpt.stats.committed == ckpt.batches_done)
            return ckpt.batches_done

        checkpoint()
        follower.poll()
        assert not any(bool((part[gone] == 0).all()) for part in restored(place, 1))
        step = checkpoint()
        assert all(bool((part[gone] == 0).all()) for part in restored(place, step))
        follower.poll()
        with follower.reading() as version:
            assert version.step == 2
            assert bool((version.lookup("users", gone) == 0).all())
        run = Run.open(open_store(place.run))
        assert validate(run, ManifestName(step, 1), level="full").passed
        merge(run, run.manifest(step, 1))
        assert all(bool((part[gone] == 0).all()) for part in restored(place, step))
        assert validate(run, ManifestName(step, 1), level="full").passed
        # Trained again, it is a row like any other.
        weight = training.model.users.weight
        with torch.no_grad():
            weight[77] = 1.0
        ckpt.mark("users", torch.tensor([77]))
        step = checkpoint()
        values = restored(place, step)[0]
        assert bool((values[77] != 0).all())


def test_an_id_out_of_range_changes_nothing(place: Place) -> None:
    training = adagrad()
    with checkpointer(training, place) as ckpt:
        ckpt.restore()
        before = training.model.users.weight.detach().clone()
        for ids in (torch.tensor([0, 203]), torch.tensor([-1])):
            with pytest.raises(IndexError):
                ckpt.delete_rows("users", ids)
        with pytest.raises(ValueError, match="int64"):
            ckpt.delete_rows("users", torch.tensor([1.0]))
        with pytest.raises(TypeError, match="list"):
            ckpt.delete_rows("users", [0])  # type: ignore[arg-type]
        with pytest.raises(SettingsError, match="nobody"):
            ckpt.delete_rows("nobody", DELETED)
        assert torch.equal(training.model.users.weight, before)


@pytest.mark.parametrize("what", ["weight", "row states", "nothing"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_deletion_speaks_for_no_other_change(place: Place, what: str, sparse: bool) -> None:
    training = adagrad()
    table = training.model.users
    table.sparse = sparse
    with checkpointer(training, place, interval_batches=100) as ckpt:
        ckpt.restore()
        for deletes in (False, True):
            training.batch()
            ckpt.step()
            if deletes and what == "weight":
                table.weight.detach().clamp_(-0.5, 0.5)
            elif deletes and what == "row states":
                training.optimizers[0].state[table.weight]["sum"].mul_(0.9)
            if deletes:
                ckpt.delete_rows("users", DELETED)
            assert ckpt.checkpoint()
            until(lambda: place.persist_all() > 0)
            until(lambda: ckpt.stats.committed == ckpt.batches_done)
        run = Run.open(open_store(place.run))
        weight, sums = restored(place, 2)
        assert torch.equal(weight, table.weight)
        assert torch.equal(sums, training.optimizers[0].state[table.weight]["sum"])
        manifest = run.manifest(2, 1)
        users = [table.name for table in manifest.tables].index("users")
        rows = sum(chunk.row_count or 0 for chunk in manifest.chunks if chunk.table == users)
        assert (rows == 203) == (what != "nothing")


def test_a_copy_of_a_table_that_another_rank_stores_is_zeroed_too() -> None:
    training = adagrad()
    training.batch()
    (optimizer,) = training.optimizers
    tables = plain_tables(training.model, ()).tables
    # As on a rank that trains a replica and stores nothing of it.
    shards = [replace(shard, table=None, copy=shard.table) for shard in lay_out(Ranks(), tables)]
    state = OptimizerState(training.model, [optimizer], tables)
    NamedTables(shards, {}, state).delete_rows("users", DELETED)
    weight = training.model.users.weight
    for rows in (weight, optimizer.state[weight]["sum"]):
        zero_ids = (rows == 0).all(dim=1).nonzero().flatten()
        assert torch.equal(zero_ids, DELETED.flatten().unique())
