"""Dropping a staged job at the trainer's wish (format §7, staging order, rule 5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import cancels, job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import CheckpointCancelled
from recpoint.format.records import CheckpointRef, pack_record
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage
from tests.persisted import store_groups


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that a trainer has claimed."""
    made = new_run(tmp_path / "run")
    made.claim(None)
    return made


def staged_job(run: Run, tmp_path: Path, step: int = 10) -> Path:
    return stage(run, tmp_path / "staging", tables(), step=step, generation=1)


def run_dir(job_file: Path) -> Path:
    return job_file.parent.parent


def mark(job_file: Path) -> None:
    cancels.write_mark(StagedRun(run_dir(job_file)), job_files.read_job(job_file).ref, 0)


def test_a_marked_job_is_rejected_and_nothing_is_stored(run: Run, tmp_path: Path) -> None:
    job_file = staged_job(run, tmp_path)
    mark(job_file)
    outcome = persist.persist_job(job_file)
    assert (outcome.result, outcome.error_type) == ("rejected", "CheckpointCancelled")
    assert run.manifest_names() == [] and not list(run.store.list("chunks/"))
    assert not job_file.exists()
    answer = StagedRun(run_dir(job_file)).outcome_path(1, 10, 0)
    assert job_files.read_outcome(answer) == outcome


def test_a_job_is_dropped_although_its_store_is_away(run: Run, tmp_path: Path) -> None:
    job_file = staged_job(run, tmp_path)
    mark(job_file)
    Path(run.url).rename(tmp_path / "elsewhere")
    assert persist.persist_job(job_file).error_type == "CheckpointCancelled"


def test_each_step_and_the_commit_look_first(run: Run, tmp_path: Path) -> None:
    job_file = staged_job(run, tmp_path)
    job = persist.PersistJob.open(job_file)
    store_groups(job)
    job.verify()
    mark(job_file)
    for step in (job.quantize, job.encode, job.upload):
        with pytest.raises(CheckpointCancelled, match="next checkpoint holds these rows"):
            step(job.groups[0])
    with pytest.raises(CheckpointCancelled):
        job.commit()
    assert run.manifest_names() == []
    assert persist.classify(CheckpointCancelled("x", found="", expected="", next_step="")) == (
        "rejected"
    )


@pytest.mark.parametrize("damage", ["another attempt", "not a record", "empty", "a directory"])
def test_a_mark_that_is_not_for_this_job_means_nothing(
    run: Run, tmp_path: Path, damage: str
) -> None:
    job_file = staged_job(run, tmp_path)
    path = StagedRun(run_dir(job_file)).cancel_path(job_files.read_job(job_file).ref, 0)
    if damage == "another attempt":
        other = CheckpointRef(step=10, generation=1, attempt="ab" * 16)
        cancels.write_mark(StagedRun(run_dir(job_file)), other, 0)
    elif damage == "a directory":
        path.mkdir(parents=True)
    else:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"" if damage == "empty" else pack_record(job_files.read_job(job_file)))
    assert not cancels.is_cancelled(job_file)
    assert persist.persist_job(job_file).result == "committed"


def test_a_mark_goes_with_its_answer(run: Run, tmp_path: Path) -> None:
    job_file = staged_job(run, tmp_path)
    ref = job_files.read_job(job_file).ref
    mark(job_file)
    assert cancels.is_cancelled(job_file)
    cancels.remove_mark(StagedRun(run_dir(job_file)), ref, 0)
    cancels.remove_mark(StagedRun(run_dir(job_file)), ref, 0)
    assert not cancels.is_cancelled(job_file)
    assert list(StagedRun(run_dir(job_file)).cancels_directory.iterdir()) == []
