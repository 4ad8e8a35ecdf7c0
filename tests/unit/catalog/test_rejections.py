"""What an agent has rejected is left in the store, and told from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.overview.watch import RunWatch
from recpoint.catalog.persist import persist
from recpoint.catalog.retention.sweep import plan_sweep
from recpoint.catalog.run.rejections import RejectionWatch, leave_rejection
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import cancels, job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import StoreFull
from recpoint.format.naming import REJECTIONS_KEY
from recpoint.format.records import CheckpointRef, pack_record
from recpoint.format.rejections import (
    MAX_REJECTIONS,
    MAX_REJECTIONS_BYTES,
    Rejection,
    Rejections,
)
from recpoint.testing.faults import Fault, FaultStore
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that a trainer has claimed."""
    made = new_run(tmp_path / "run")
    made.claim(None)
    return made


ATTEMPT = "0a" * 16


def rejection(step: int, error: str = "x") -> Rejection:
    ref = CheckpointRef(step=step, generation=1, attempt=ATTEMPT)
    return Rejection(
        checkpoint=ref, error_type="DigestMismatch", error=error, rejected_ms=1000 + step
    )


def damaged_job(run: Run, staging: Path, step: int) -> Path:
    job_file = stage(run, staging, tables(), step=step, generation=1)
    slot = job_file.parent.parent / "slots" / job_files.read_job(job_file).slot
    slot.write_bytes(bytes(slot.stat().st_size))
    return job_file


def test_a_rejected_checkpoint_is_told_of_with_its_cause(run: Run, tmp_path: Path) -> None:
    watch = RunWatch(run)
    assert watch.refresh().failures == ()
    outcome = persist.persist_job(damaged_job(run, tmp_path / "s", 7))
    assert outcome.result == "rejected"
    (failure,) = watch.refresh().failures
    assert failure.kind == "rejected" and failure.subject.startswith("step 7 (generation 1, ")
    assert failure.cause == f"{outcome.error_type}: {outcome.error[:1024]}"
    assert failure.when_ms == outcome.finished_ms
    # It is one of our objects: no check wonders at it, and no sweep takes it.
    assert REJECTIONS_KEY.of(0) not in {one.key for one in check(run).findings}
    plan = plan_sweep(run, grace_seconds=0)
    assert plan.unrecognised == () and REJECTIONS_KEY.of(0) not in {one.key for one in plan.objects}


def test_what_a_superseded_trainer_staged_is_in_no_later_checkpoint(
    run: Run, tmp_path: Path
) -> None:
    job_file = stage(run, tmp_path / "s", tables(), step=3, generation=1)
    run.claim(None)
    assert persist.persist_job(job_file).error_type == "StaleWriter"
    (failure,) = [one for one in RunWatch(run).refresh().failures if one.kind == "rejected"]
    assert failure.next_step is not None and "later checkpoint" not in failure.next_step
    assert "stop the second trainer" in failure.next_step


def test_what_a_trainer_wished_dropped_is_no_failure(run: Run, tmp_path: Path) -> None:
    job_file = stage(run, tmp_path / "s", tables(), step=1, generation=1)
    cancels.write_mark(StagedRun.of_job(job_file), job_files.read_job(job_file).ref, 0)
    assert persist.persist_job(job_file).error_type == "CheckpointCancelled"
    assert RejectionWatch(run).refresh() == []


def test_a_store_that_takes_no_word_of_it_keeps_no_answer_from_the_trainer(
    run: Run, tmp_path: Path
) -> None:
    fault = Fault(kind="fail", on=frozenset({"put"}), key_contains="rejections/", error=StoreFull)
    store = FaultStore(run.store, [fault])
    job_file = damaged_job(run, tmp_path / "s", 1)
    assert persist.persist_job(job_file, store=store).result == "rejected"
    assert not job_file.exists() and RejectionWatch(run).refresh() == []


def test_the_newest_of_each_rank_are_kept_and_each_is_told_once(run: Run) -> None:
    for step in range(MAX_REJECTIONS + 5):
        leave_rejection(run, 0, rejection(step))
        leave_rejection(run, 0, rejection(step))  # an agent that was killed answers it again
    leave_rejection(run, 3, rejection(1))
    watch = RejectionWatch(run)
    first, other = sorted(watch.refresh(), key=lambda one: one.rank)
    assert first.count == MAX_REJECTIONS + 5 and len(first.newest) == MAX_REJECTIONS
    assert [one.checkpoint.step for one in first.newest[:2]] == [24, 23]
    assert (other.rank, other.count) == (3, 1)
    failures = [one for one in RunWatch(run).refresh().failures if one.kind == "rejected"]
    assert len(failures) == 20 and failures[0].when_ms == 1024
    assert watch.refresh() == [first, other] or watch.refresh() == [other, first]


@pytest.mark.parametrize(
    "bad",
    [
        b"{}",
        bytes(MAX_REJECTIONS_BYTES + 1),  # not read
        pack_record(
            Rejections(run="1b" * 16, rank=0, count=1, newest=(rejection(1),), host="", pid=1)
        ),
    ],
    ids=["no record", "too large", "another run's"],
)
def test_a_damaged_record_is_told_of_and_written_anew(run: Run, bad: bytes) -> None:
    run.store.put(REJECTIONS_KEY.of(0), bad)
    (failure,) = RunWatch(run).refresh().failures
    assert failure.kind == "record" and failure.subject.endswith(REJECTIONS_KEY.of(0))
    assert failure.cause.startswith("found ") and "Next: " not in failure.cause
    leave_rejection(run, 0, rejection(5))
    (failure,) = RunWatch(run).refresh().failures
    assert failure.kind == "rejected"


def test_the_longest_record_is_read(run: Run) -> None:
    longest = [rejection(step, "\x01" * 1024) for step in range(MAX_REJECTIONS)]
    for one in longest:
        leave_rejection(run, 0, one)
    assert len(RejectionWatch(run).refresh()[0].newest) == MAX_REJECTIONS
