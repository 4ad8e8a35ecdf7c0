"""Trainings whose increments are stored as residuals: under every policy, and over restarts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from recpoint import Precision
from recpoint.catalog.check.validate import validate
from recpoint.catalog.persist import first_rows
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.embeddings.home.contract import Home
from recpoint.embeddings.home.memory import MemoryHome
from recpoint.errors import SettingsError
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from tests.cached_training import Rows
from tests.training_builder import (
    Place,
    Training,
    checkpointer,
    reject,
    simple_training,
    train,
    until,
)
from tests.unit.trainer_plugin.test_cached_checkpoints import SMALL, Both, checkpointing
from tests.unit.trainer_plugin.test_parts_of_servers import served

SETTINGS: dict[str, Any] = {"bits": 4, "residual": True, "interval_batches": 1}


def schemes(manifest: Manifest) -> set[str | None]:
    return {chunk.scheme for chunk in manifest.chunks if chunk.content == "rows"}


def run_of(place: Place) -> Run:
    return Run.open(open_store(place.run))


def batches(training: Training, ckpt: Any, place: Place, count: int) -> None:
    """Train batches with a committed checkpoint after each."""
    for _ in range(count):
        train(training, ckpt, 1)
        until(lambda: place.persist_all() > 0)
        until(lambda: ckpt.stats.committed + ckpt.stats.failed >= ckpt.stats.staged)


def worst_error(place: Place, training: Training, step: int) -> float:
    target = MemoryTarget()
    restore(run_of(place), target, Selection(step=step))
    errors = [
        (target.tables[name].values - table.weight.detach()).abs().max()
        for name, table in (("users", training.model.users), ("items", training.model.items))
    ]
    return float(max(errors))


@pytest.mark.parametrize("policy", ["consecutive", "continuous", "intermittent", "one_shot"])
def test_every_increment_has_residuals_that_validate(place: Place, policy: str) -> None:
    training = simple_training(lr=0.01)
    with checkpointer(training, place, policy=policy, **SETTINGS) as ckpt:
        ckpt.restore()
        batches(training, ckpt, place, 4)
    kinds = set()
    for name in run_of(place).manifest_names():
        manifest = run_of(place).manifest(*name)
        kinds.add(manifest.kind)
        expected = {"asymmetric"} if manifest.kind == "full" else {"residual"}
        assert schemes(manifest) == expected
        validated = validate(run_of(place), name, level="full")
        assert (validated.result, validated.findings) == ("passed", ())
    assert kinds == {"full", "increment"}


def test_a_restart_goes_on_from_an_increment(place: Place) -> None:
    training = simple_training(lr=0.01)
    with checkpointer(training, place, **SETTINGS) as ckpt:
        ckpt.restore()
        batches(training, ckpt, place, 3)
    again = simple_training(seed=2, lr=0.01)
    with checkpointer(again, place, **SETTINGS) as ckpt:
        assert ckpt.restore() is not None and ckpt.batches_done == 3
        batches(again, ckpt, place, 2)
    for step in (4, 5):
        manifest = run_of(place).manifest(step, run_of(place).generation_numbers()[-1])
        if manifest.kind == "increment":
            assert schemes(manifest) == {"residual"}
        name = ManifestName(manifest.step, manifest.generation)
        assert validate(run_of(place), name, level="full").result == "passed"
    assert worst_error(place, again, 5) < 0.2


def test_the_setting_may_be_turned_on_at_a_restart(place: Place) -> None:
    training = simple_training(lr=0.01)
    with checkpointer(training, place, **(SETTINGS | {"residual": False})) as ckpt:
        ckpt.restore()
        batches(training, ckpt, place, 2)
    again = simple_training(lr=0.01)
    with checkpointer(again, place, **SETTINGS) as ckpt:
        ckpt.restore()
        batches(again, ckpt, place, 2)
    newest = run_of(place).live_line()[0]
    assert validate(run_of(place), newest, level="full").result == "passed"


def test_values_are_staged_wherever_rows_are_quantized(place: Place) -> None:
    training = simple_training(lr=0.01)
    settings = SETTINGS | {"place": "device", "quantizer": "asymmetric"}
    with checkpointer(training, place, **settings) as ckpt:
        ckpt.restore()
        for kind in ("full", "increment"):
            train(training, ckpt, 1)
            until(lambda: len(StagedRun(place.run_directory).staged_jobs()) == 1)
            job = job_files.read_job(StagedRun(place.run_directory).staged_jobs()[0])
            assert job.kind == kind
            assert [table.codes for table in job.tables] == [kind == "full"] * 2
            assert [table.residual for table in job.tables] == [
                None if kind == "full" else True
            ] * 2
            assert place.persist_all() == 1
            until(lambda: ckpt.stats.committed == ckpt.batches_done)


def cached_rows(place: Place, home: str, *, restart: bool) -> Rows:
    """Train with rows in memory, in a cache, or at servers that stage them; return the restored."""
    settings = {"bits": 4, "residual": True, "quantizer": "asymmetric", "when_busy": "wait"}
    settings |= {"at_servers": home == "servers", "interval_batches": 4}
    with ExitStack() as stack:
        rows_at: Home | None = MemoryHome() if home == "cache" else None
        if home == "servers":
            rows_at = stack.enter_context(served(3))
        slots = None if rows_at is None else SMALL
        both = Both("adagrad", slots, rows_at)
        with checkpointing(both, place, **settings) as ckpt:
            both.train(ckpt, 12)
        newest = run_of(place).live_line()[0]
        manifest = run_of(place).manifest(*newest)
        assert manifest.kind == "increment" and "residual" in schemes(manifest)
        assert validate(run_of(place), newest, level="full").passed
        is_cached = restart and home == "cache"
        again = Both("adagrad", slots if is_cached else None, MemoryHome() if is_cached else None)
        with checkpointing(again, place, **settings | {"at_servers": False}):
            return again.rows


@pytest.fixture
def _all_rows_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have fulls of caches store rows with their first values, as those of other tables do."""
    monkeypatch.setattr(first_rows, "_CHUNK_COST_BYTES", 1 << 40)


@pytest.mark.usefixtures("_all_rows_stored")
@pytest.mark.parametrize("home", ["cache", "servers"])
def test_rows_of_a_cache_are_stored_as_those_in_memory(place: Place, home: str) -> None:
    """The newest checkpoint restores into a model without a cache, and into one with a cache."""
    rows = []
    for name in ("memory", home):
        own = replace(place, staging=place.staging / name, run=place.run + name)
        rows.append(cached_rows(own, name, restart=False))
    assert rows[1].differences(rows[0]) == []


@pytest.mark.usefixtures("_all_rows_stored")
def test_residuals_restore_into_a_cache(place: Place) -> None:
    rows = []
    for name in ("memory", "cache"):
        own = replace(place, staging=place.staging / name, run=place.run + name)
        rows.append(cached_rows(own, name, restart=True))
    assert rows[1].differences(rows[0]) == []


def test_rows_of_a_rejected_increment_are_in_the_next_one(place: Place) -> None:
    training = simple_training(lr=0.01)
    with checkpointer(training, place, **SETTINGS) as ckpt:
        ckpt.restore()
        batches(training, ckpt, place, 1)
        train(training, ckpt, 1)
        until(lambda: len(StagedRun(place.run_directory).staged_jobs()) == 1)
        reject(StagedRun(place.run_directory).staged_jobs()[0], "DigestMismatch")
        until(lambda: ckpt.stats.failed == 1)
        batches(training, ckpt, place, 1)
    newest = run_of(place).live_line()[0]
    assert newest.step == 3
    assert validate(run_of(place), newest, level="full").result == "passed"
    assert worst_error(place, training, 3) < 0.2


def test_residuals_need_fewer_bits() -> None:
    with pytest.raises(SettingsError, match=r"Precision\.residual"):
        Precision(residual=True)
    assert Precision(residual=True, tables={"users": 4}).residual
    with pytest.raises(SettingsError, match=r"Precision\.residual"):
        Precision(bits=4, residual=1)  # type: ignore[arg-type]
