"""A script starts with restore() on a run that `recpoint import` wrote."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad

from recpoint import Checkpointer, Lookahead
from recpoint.catalog.foreign.recognize import open_foreign
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.cli.imported_run import planned_run, write_run
from recpoint.embeddings import Uniform
from recpoint.errors import IncompatibleModel
from tests import cached_training
from tests.flat_settings import arguments
from tests.training_builder import (
    ROWS,
    Batches,
    Place,
    Recommender,
    Training,
    checkpointer,
    everything,
    seed_everything,
    train,
)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "run"), tmp_path / "staging")


def job(seed: int, model: Any = None) -> Training:
    seed_everything(seed)
    model = Recommender() if model is None else model
    optimizer = Adagrad(model.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    return Training(model, [optimizer], Batches(seed), schedulers)


def imported(source: Training, place: Place) -> str:
    """Import what a job has trained; return the path of its checkpoint."""
    for _ in range(3):
        source.batch()
    return written(source.model, place, ("users", "items"))


def written(model: nn.Module, place: Place, tables: tuple[str, ...]) -> str:
    path = str(Path(place.run).with_suffix(".pt"))
    torch.save({"net": model.state_dict()}, path)
    with open_foreign(path) as checkpoint:
        planned = planned_run(checkpoint, {"net.*": "*"}, tables)
        write_run(path, place.run, planned, Path(path).parent)
    return path


def test_a_job_begins_with_the_tensors_and_the_script_with_all_else(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    source, own, expected = job(1), job(9), job(9)
    path = imported(source, place)
    expected.model.load_state_dict(source.model.state_dict())
    seed_everything(5)
    expected_state = everything(expected)
    # A trainer that ends before its first checkpoint begins with the import again.
    for training in (job(9), own):
        seed_everything(5)
        with checkpointer(training, place) as checkpoints:
            report = checkpoints.restore()
            assert report is not None and report.restored.step == checkpoints.batches_done == 0
            assert everything(training) == expected_state
            if training is own:
                seed_everything(6)
                with place.agent():
                    train(own, checkpoints, 2)
                    trained_state = everything(own)
                    checkpoints.close()
            checkpoints.close(final=False)
    log = [record for record in caplog.records if "was imported from" in record.getMessage()]
    assert [record.levelno for record in log] == [logging.WARNING] * 2
    assert path in log[0].getMessage() and "optimizers, schedulers, reader" in log[0].getMessage()

    resumed = job(7)
    with checkpointer(resumed, place) as checkpoints:
        checkpoints.restore()
        assert checkpoints.batches_done == 2
        assert everything(resumed) == trained_state
        checkpoints.close(final=False)
    run = Run.open(open_store(place.run))
    kinds = {name.step: run.manifest(*name).kind for name in run.live_line()}
    assert kinds[2] == "full", "the import has no row states"


class _MoreState(Recommender):
    """Has state that no file of another tool has, and a tensor under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(3.0), persistent=False)
        self.tied = nn.Linear(12, 1)
        self.tied.weight = self.top.weight
        self.calls = {"calls": 1}

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = dict(state)


def test_what_a_file_does_not_have_stays_as_the_script_made_it(place: Place) -> None:
    source = job(1, _MoreState())
    own_model = _MoreState()
    assert isinstance(own_model.mask, Tensor)
    own_model.mask.mul_(7)
    own_model.calls = {"calls": 5}
    own = job(9, own_model)
    imported(source, place)
    with checkpointer(own, place) as checkpoints:
        checkpoints.restore()
        checkpoints.close(final=False)
    assert own_model.mask.tolist() == [0, 7, 14] and own_model.calls == {"calls": 5}
    for name, tensor in source.model.named_parameters():
        assert torch.equal(tensor, own_model.get_parameter(name)), name


def test_what_does_not_fit_is_named_and_nothing_changes(place: Place) -> None:
    imported(job(1), place)
    more_layers: Any = Recommender()
    more_layers.top, more_layers.more = nn.Linear(12, 2), nn.Linear(1, 1)
    more_tables: Any = Recommender()
    more_tables.more = nn.Embedding(5, 2)
    for model, texts in (
        (more_tables, ["table 'more' is not in the checkpoint"]),
        (
            more_layers,
            [
                "'top.weight' is float32[2, 12] in the model and float32[1, 12] in the checkpoint",
                "'more.bias' is not in the checkpoint",
            ],
        ),
    ):
        first_values = copy.deepcopy(model.state_dict())
        checkpoints = checkpointer(job(9, model), place)
        with checkpoints, pytest.raises(IncompatibleModel) as caught:
            checkpoints.restore()
        assert all(text in str(caught.value) for text in texts)
        assert all(torch.equal(t, first_values[name]) for name, t in model.state_dict().items())


def test_cached_tables_are_refused_with_the_line_for_a_seed(place: Place) -> None:
    path = written(cached_training.plain_model(), place, ("users", "items"))
    model, _ = cached_training.cached_model({"users": 30, "items": 40})
    checkpoints = Checkpointer(
        model,
        Adagrad(model.parameters(), lr=0.1),
        reader=Lookahead(cached_training.Batches(), model, window=10),
        **arguments({"run": place.run, "directory": place.staging, "interval_batches": 2}),
    )
    with checkpoints, pytest.raises(IncompatibleModel) as caught:
        checkpoints.restore()
    assert "is cached, and an import has no row states" in str(caught.value)
    assert f"restore(seed=recpoint.Seed({path!r}, tables=" in str(caught.value)


def test_a_table_may_have_more_rows_than_the_import(place: Place) -> None:
    source, own = job(1), job(9)
    imported(source, place)
    own.model.users = nn.Embedding(ROWS + 5, 6)
    own = job(9, own.model)
    with checkpointer(own, place, grow={"users": Uniform(3, 0.5, 1.0)}) as checkpoints:
        checkpoints.restore()
        checkpoints.close(final=False)
    weight = own.model.users.weight
    assert torch.equal(weight[:ROWS], source.model.users.weight)
    assert bool((weight[ROWS:] >= 0.5).all())
    assert all(not state["sum"].any() for state in own.optimizers[0].state.values())
