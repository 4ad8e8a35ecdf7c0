"""What a real trainer recorded agrees with what was stored of it, whatever is trained how."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recpoint import Consecutive
from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import verdicts
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore, SettingsError
from tests.forked_program import run_module
from tests.training_builder import (
    Place,
    Training,
    checkpointer,
    seed_everything,
    simple_training,
    train,
)


def adagrad(training: Training) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(training.model.parameters(), lr=0.1)]


def adam(training: Training) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(training.model.parameters(), lr=0.01)]


def sgd(training: Training) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)]


@pytest.mark.filterwarnings("ignore::recpoint.embeddings.tables.optimizers.FullyDirtyTables")
@pytest.mark.parametrize(
    ("optimizers", "settings"),
    [
        (adagrad, {}),
        (adagrad, {"bits": 2, "state": 16}),
        (adagrad, {"bits": 4, "quantizer": "greedy"}),
        (adagrad, {"bits": 3, "tables": {"items": 8}, "quantizer": "symmetric"}),
        (adam, {"bits": 8, "state": 16}),
        (sgd, {"bits": 4, "policy": Consecutive(full_every=2)}),
    ],
)
def test_every_checkpoint_of_a_training_is_valid(
    place: Place,
    optimizers: Callable[[Training], list[torch.optim.Optimizer]],
    settings: dict[str, Any],
) -> None:
    training = simple_training(3)
    training.optimizers = optimizers(training)
    with place.agent():
        with checkpointer(training, place, **settings) as ckpt:
            ckpt.restore()
            train(training, ckpt, 7)
        # Goes on from what was restored: values that were rounded once, and not trained since.
        seed_everything(9)
        again = simple_training(4)
        again.optimizers = optimizers(again)
        with checkpointer(again, place, **settings) as ckpt:
            ckpt.restore()
            train(again, ckpt, 5)
    run = Run.open(open_store(place.run))
    names = run.live_line()
    assert len(names) >= 3
    compared = 0
    for name in names:
        for level in ("sample", "full"):
            found = validate(run, name, level=level)
            assert found.findings == () and found.notes == () and found.passed
            compared = max(compared, found.rows_compared)
    assert compared >= 2 * 64


def test_on_an_object_store(s3_run_url: str, tmp_path: Path) -> None:
    place = Place(s3_run_url, tmp_path / "staging")
    training = simple_training(3)
    with place.agent(), checkpointer(training, place, bits=4) as ckpt:
        ckpt.restore()
        train(training, ckpt, 4)
    run = Run.open(open_store(place.run))
    newest, older = run.live_line()[:2]
    found = validate(run, newest, level="full")
    assert found.passed and found.rows_compared > 100
    assert record(run, found).number == 1 and record(run, found).number == 2
    entry = next(e for e in run.manifest(*newest).chunks if e.content == "rows")
    run.store.delete(entry.key)
    record(run, validate(run, newest, level="metadata"))
    assert verdicts(run)[newest].result == "failed"
    report = restore(run, MemoryTarget())
    assert report.restored.step == older.step and report.skipped[0].name == newest


def test_a_trainer_may_insist_on_what_was_validated(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    training = simple_training(3)
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 4)
    run = Run.open(open_store(place.run))
    newest, older = run.live_line()[:2]
    with pytest.raises(NothingToRestore, match="not validated"):
        checkpointer(simple_training(3), place).restore(validated_only=True)
    record(run, validate(run, older))
    again = checkpointer(simple_training(3), place)
    report = again.restore(validated_only=True)
    again.close(final=False)
    assert report is not None and report.restored.step == older.step
    assert [skipped.name for skipped in report.skipped] == [newest]
    assert f"{newest} is not restored: not validated" in caplog.text


def test_a_trainer_goes_on_from_what_was_validated_if_it_is_near(place: Place) -> None:
    training = simple_training(3)
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 4)
    run = Run.open(open_store(place.run))
    newest, older = run.live_line()[:2]
    record(run, validate(run, older))
    apart = newest.step - older.step
    with pytest.raises(SettingsError, match="validated_within"):
        checkpointer(simple_training(3), place).restore(validated_within=-1)
    for within, expected in ((apart - 1, newest), (apart, older)):
        again = checkpointer(simple_training(3), place)
        report = again.restore(validated_within=within)
        assert report is not None and report.restored.step == expected.step
        assert again.batches_done == expected.step
        again.close(final=False)
    # What was left for it is superseded now.
    assert run.live_line()[0] == older


@pytest.mark.parametrize("steps", range(1, 7))
def test_a_validation_that_is_killed_leaves_nothing_that_counts(
    place: Place, tmp_path: Path, steps: int
) -> None:
    training = simple_training(3)
    with place.agent(), checkpointer(training, place) as ckpt:
        ckpt.restore()
        train(training, ckpt, 2)
    program = ["recpoint.testing.die_at", str(steps), "-m", "recpoint"]
    done = run_module(
        [*program, "validate", place.run, "--level", "full"],
        environment=os.environ,
        directory=tmp_path,
    )
    run = Run.open(open_store(place.run))
    known = verdicts(run)
    if done.returncode == 0:
        assert [str(verdict) for verdict in known.values()] == ["full"]
    else:
        assert done.returncode == -9, done.stderr
        assert all(verdict.result == "passed" for verdict in known.values())
    (newest,) = run.live_line()
    again = record(run, validate(run, newest, level="full"))
    assert again.number == len(known) + 1 and verdicts(run)[newest].passed("full")
