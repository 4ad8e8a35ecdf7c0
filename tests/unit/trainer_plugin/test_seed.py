"""Starting a run with parts of another's checkpoint: by name, renamed, with another optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

from recpoint import Seed
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.errors import IncompatibleModel, SettingsError
from tests.training_builder import (
    DIM,
    ROWS,
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    seed_everything,
    train,
    until,
)


class Other(nn.Module):
    """Another model: two tables of the same people, one of its own, and a deeper top."""

    def __init__(self) -> None:
        super().__init__()
        self.people = nn.Embedding(ROWS, DIM)
        self.people_again = nn.Embedding(ROWS, DIM)
        self.ads = nn.EmbeddingBag(ROWS // 2, DIM, mode="sum")
        self.cities = nn.Embedding(7, DIM)
        self.norm = nn.BatchNorm1d(2 * DIM)
        self.top = nn.Linear(4 * DIM, 1)
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        both = torch.cat([self.people(users) + self.people_again(users), self.ads(items)], dim=1)
        near = self.cities(users % 7)
        deep = torch.cat([self.norm(both), near, near], dim=1)
        scores: Tensor = self.top(deep) + self.head(both)
        return scores.squeeze(1)


@pytest.fixture(params=["lossless", 4])
def source(request: pytest.FixtureRequest, place: Place) -> Training:
    """A run under Adagrad whose newest checkpoint, of step 6, is the third of its chain."""
    seed_everything(1)
    model = Recommender()
    training = Training(model, [Adagrad(model.parameters(), lr=0.1)], Batches(1))
    with place.agent(), checkpointer(training, place, bits=request.param) as ckpt:
        ckpt.restore()
        for _ in range(6):
            train(training, ckpt, 1)
            until(lambda: ckpt.stats.committed == ckpt.batches_done // 2)
    return training


@pytest.fixture
def new(tmp_path: Path) -> Place:
    return Place(run=str(tmp_path / "new-run"), staging=tmp_path / "new-staging")


def other(kind: type[Any] = SGD) -> Any:
    seed_everything(9)
    model = Other()
    return Training(model, [kind(model.parameters(), lr=0.1)], Batches(9))  # type: ignore[arg-type]


def stored(place: Place) -> MemoryTarget:
    """The newest checkpoint as it is stored: what rows read back as."""
    target = MemoryTarget()
    report = restore(Run.open(open_store(place.run)), target)
    assert report.chain_length > 1
    return target


def dense_of(target: MemoryTarget) -> dict[str, Tensor]:
    state: Any = target.state[0]
    tensors: dict[str, Tensor] = state["model"]["tensors"]
    return tensors


def test_renamed_tables_and_dense_layers_start_a_run(
    source: Training, place: Place, new: Place
) -> None:
    training = other()
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    draw = torch.random.get_rng_state()
    seed = Seed(
        place.run,
        tables={"people": "users", "ads": "items", "people_again": "users"},
        dense=["norm.*"],
    )
    with new.agent(), checkpointer(training, new) as ckpt:
        report = ckpt.restore(seed=seed)
        assert report is not None and report.restored.step == 6 and ckpt.batches_done == 0
        there = stored(place)
        seeded: Any = training.model
        assert torch.equal(seeded.people.weight, there.tables["users"].values)
        assert torch.equal(seeded.people_again.weight, there.tables["users"].values)
        assert torch.equal(seeded.ads.weight, there.tables["items"].values)
        for name, tensor in training.model.state_dict().items():
            if name.startswith("norm."):
                assert torch.equal(tensor, dense_of(there)[name]), name
            elif name.partition(".")[0] in ("cities", "top", "head"):
                assert torch.equal(tensor, before[name]), name
        # The optimizer, the reader and the generators are those of here.
        assert not training.optimizers[0].state
        assert training.reader.position == 0
        assert torch.equal(torch.random.get_rng_state(), draw)
        train(training, ckpt, 4)
    run = Run.open(open_store(new.run))
    assert [name.step for name in run.live_line()] == [4, 2]
    assert run.manifest(2, 1).kind == "full"
    lost = report.quantized
    assert run.manifest(2, 1).history.lossy_restores == lost

    # Started again, it goes on where it was: the seed is for the beginning.
    again = other()
    with new.agent(), checkpointer(again, new) as ckpt:
        report = ckpt.restore(seed=seed)
        assert report is not None and report.restored.step == 4 and ckpt.batches_done == 4
        assert again.reader.position == 4


def test_the_optimizer_state_comes_along_if_asked_for(
    source: Training, place: Place, new: Place
) -> None:
    training = other(Adagrad)
    tables = {"people": "users", "people_again": "users"}
    seed = Seed(place.run, tables=tables, dense=["norm.*"], optimizer_states="carry")
    with new.agent(), checkpointer(training, new) as ckpt:
        ckpt.restore(seed=seed)
        there = stored(place)
        model: Any = training.model
        state = training.optimizers[0].state
        (sums,) = there.tables["users"].row_states
        assert sums is not None and bool((sums > 0).any())
        assert torch.equal(state[model.people.weight]["sum"], sums)
        assert torch.equal(state[model.people_again.weight]["sum"], sums)
        assert (
            state[model.people.weight]["sum"].data_ptr()
            != state[model.people_again.weight]["sum"].data_ptr()
        )
        was = source.optimizers[0].state
        for name in ("weight", "bias"):
            here, original = getattr(model.norm, name), getattr(source.model.norm, name)
            assert torch.equal(state[here]["sum"], was[original]["sum"])
            assert state[here]["step"] == was[original]["step"] == 6
        assert bool((state[model.ads.weight]["sum"] == 0).all())
        train(training, ckpt, 2)


@pytest.mark.parametrize(
    ("seed", "messages"),
    [
        ({"tables": ["user"]}, ["table 'user' is not in the checkpoint", "near it: 'users'"]),
        ({"tables": {"peple": "users"}}, ["table 'peple' is not in the model", "'people'"]),
        (
            {"tables": {"cities": "users"}},
            [
                f"table 'cities' (from 'users'): rows 7 in the model, {ROWS} in the checkpoint",
                "recpoint.restore_parts",
            ],
        ),
        (
            {"dense": ["top.*"]},
            ["'top.weight' is torch.float32 [1, 24] in the model and torch.float32 [1, 12]"],
        ),
        ({"dense": ["botom.*"]}, ["no dense tensor matches 'botom.*'", "'top.bias'"]),
        ({"dense": ["norm.wieght"]}, ["'norm.wieght' is not in the", "'norm.weight'"]),
        ({"dense": ["head.*"]}, ["'head.bias' is not in the checkpoint"]),
        ({"dense": {"head.weight": "top.bias"}}, ["'head.weight' (from 'top.bias') is"]),
        (
            {"tables": {"people": "users"}, "optimizer_states": "carry"},
            ["'users.weight' was trained by torch.optim.adagrad.Adagrad", "torch.optim.sgd.SGD"],
        ),
    ],
)
@pytest.mark.parametrize("source", ["lossless"], indirect=True)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    seed: dict[str, Any], messages: list[str], source: Training, place: Place, new: Place
) -> None:
    training = other()
    before = [tensor.clone() for tensor in training.model.state_dict().values()]
    with pytest.raises(IncompatibleModel) as refused:
        checkpointer(training, new).restore(seed=Seed(place.run, **seed))
    for message in messages:
        assert message in str(refused.value)
    assert "recpoint seed" in str(refused.value)
    assert all(map(torch.equal, before, training.model.state_dict().values()))


def test_a_seed_names_something(place: Place) -> None:
    unnamed: list[Any] = [{}, {"tables": "users"}, {"dense": [3]}]
    for wrong in unnamed:
        with pytest.raises(SettingsError, match="Seed"):
            Seed("s3://b/x", **wrong)
    with pytest.raises(SettingsError, match="optimizer_states"):
        Seed("s3://b/x", tables=["a"], optimizer_states="keep")  # type: ignore[arg-type]
    for field, unselectable in (("step", -1), ("generation", 1), ("validated_within", -1)):
        with pytest.raises(SettingsError, match=f"^{field}: "):
            Seed("s3://b/x", tables=["a"], **{field: unselectable})  # type: ignore[arg-type]
    seed = Seed("s3://b/x", tables=["a"])
    others: list[Any] = [{"step": 3}, {"fresh": True}, {"partial": {"tables": ["a"]}}]
    for wrong in others:
        with pytest.raises(SettingsError, match="without"):
            checkpointer(other(), place).restore(seed=seed, **wrong)
    with pytest.raises(SettingsError, match="recpoint.Seed"):
        checkpointer(other(), place).restore(seed="s3://b/x")  # type: ignore[arg-type]
