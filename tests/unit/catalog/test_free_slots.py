"""Slots that nobody will use are given back, and no other (format §6.5)."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from recpoint.catalog.persist import persist
from recpoint.catalog.run.ends import tell_ended
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import free, job_files, locks
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.free import (
    RankJobs,
    free_slots,
    free_slots_of_ended,
    has_ended,
    read_rank_jobs,
    remove_unnamed,
    slots_by_rank,
)
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.format.job import Job
from tests.catalog_builder import tables
from tests.job_builder import rewrite, stage

HOUR = 3600.0


def slots(run_dir: Path) -> set[str]:
    return {path.name for path in StagedRun(run_dir).slots_directory.iterdir()}


@pytest.fixture
def run_dir(run: Run, tmp_path: Path) -> Path:
    """Of a run with one staged job of rank 0, and more slots than jobs."""
    job = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    directory = job.parent.parent
    for rank, index in ((0, 1), (0, 2), (1, 0)):
        StagedRun(directory).slot_path(rank, index).write_bytes(bytes(1000 + index))
    return directory


def test_slots_that_no_job_names_go_once_training_has_ended(run_dir: Path) -> None:
    (job,) = StagedRun(run_dir).staged_jobs()
    before = slots(run_dir)
    planned = free_slots(StagedRun(run_dir), ended=True, grace_seconds=HOUR, dry_run=True)
    assert slots(run_dir) == before and not list(run_dir.glob("trainer*.lock"))
    assert [(one.slot, one.size_bytes) for one in planned] == [
        ("r00000-1.bin", 1001),
        ("r00000-2.bin", 1002),
        ("r00001-0.bin", 1000),
    ]
    also = free_slots(
        StagedRun(run_dir), ended=True, grace_seconds=HOUR, besides={job.stem}, dry_run=True
    )
    assert {one.slot for one in also} == before
    assert free_slots(StagedRun(run_dir), ended=True, grace_seconds=HOUR) == planned
    assert slots(run_dir) == {"r00000-0.bin"}
    assert persist.persist_job(job).result == "committed"
    assert [one.slot for one in free_slots(StagedRun(run_dir), ended=True, grace_seconds=HOUR)] == [
        "r00000-0.bin"
    ]
    assert free_slots(StagedRun(run_dir), ended=True, grace_seconds=HOUR) == []
    assert free_slots(StagedRun(run_dir.with_name("none")), ended=True, grace_seconds=HOUR) == []


def test_slots_of_a_trainer_that_was_killed_go_after_the_grace(run_dir: Path) -> None:
    assert free_slots(StagedRun(run_dir), ended=False, grace_seconds=HOUR) == []
    when = time.time() - 2 * HOUR
    for path in run_dir.rglob("*.bin"):
        os.utime(path, (when, when))
    # What is in memory does not tell when it was written: the queue says when it was used.
    assert free_slots(StagedRun(run_dir), ended=False, grace_seconds=HOUR) == []
    for directory in (StagedRun(run_dir).jobs_directory, StagedRun(run_dir).outcomes_directory):
        os.utime(directory, (when, when))
    assert len(free_slots(StagedRun(run_dir), ended=False, grace_seconds=HOUR)) == 3
    assert slots(run_dir) == {"r00000-0.bin"}


def test_a_trainer_keeps_its_slots(run_dir: Path) -> None:
    lock = locks.acquire(StagedRun(run_dir).trainer_lock_path(1), expected="", next_step="")
    try:
        assert {
            one.slot for one in free_slots(StagedRun(run_dir), ended=True, grace_seconds=0.0)
        } == {
            "r00000-1.bin",
            "r00000-2.bin",
        }
    finally:
        locks.release(lock)
    assert slots(run_dir) == {"r00000-0.bin", "r00001-0.bin"}


def test_what_a_job_that_cannot_be_read_may_name_stays(run_dir: Path) -> None:
    (job,) = StagedRun(run_dir).staged_jobs()
    job.write_bytes(b"\xff")
    assert [one.slot for one in free_slots(StagedRun(run_dir), ended=True, grace_seconds=0.0)] == [
        "r00001-0.bin"
    ]


def test_no_job_is_read_while_a_starting_trainer_would_be_kept_out(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its lock for a fifth of a second; jobs of many tables take longer to parse."""
    read = job_files.read_job
    held = []

    def watched(path: Path | str) -> Job:
        held.append(locks.is_held(StagedRun(run_dir).trainer_lock_path()))
        return read(path)

    monkeypatch.setattr(free, "read_job", watched)
    assert len(free_slots(StagedRun(run_dir), ended=True, grace_seconds=0.0)) == 3
    assert held and not any(held)


def test_a_job_that_has_come_since_they_were_read_keeps_all_slots(run: Run, run_dir: Path) -> None:
    (first,) = StagedRun(run_dir).staged_jobs()

    def removed(jobs: RankJobs) -> list[str]:
        with ExitStack() as afterwards:
            freed = remove_unnamed(jobs, slots_by_rank(StagedRun(run_dir))[0], afterwards)
        return [name for name, _ in freed]

    before = read_rank_jobs(StagedRun(run_dir), 0)
    second = stage(run, run_dir.parent, tables(), step=2, generation=1, slot=1)
    assert removed(before) == []
    before = read_rank_jobs(StagedRun(run_dir), 0)
    moved = StagedRun(run_dir).slot_path(0, 2)
    StagedRun(run_dir).slot_path(0, 1).rename(moved)
    rewrite(second, slot=moved.name)  # another job of the same name
    StagedRun(run_dir).slot_path(0, 1).write_bytes(b"not needed any more")
    assert removed(before) == []
    before = read_rank_jobs(StagedRun(run_dir), 0)
    StagedRun(run_dir).job_path(1, 3, 1).write_bytes(b"\xff")  # of another rank
    persist.persist_job(first)  # an answer frees slots, and needs none
    assert removed(before) == ["r00000-1.bin"]
    assert removed(read_rank_jobs(StagedRun(run_dir), 0)) == ["r00000-0.bin"]
    assert persist.persist_job(second).result == "committed"


def test_only_slots_are_removed(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    StagedRun(run_dir).slot_path(0, 9).symlink_to(tmp_path / "precious")
    (StagedRun(run_dir).slots_directory / "notes.txt").write_text("mine")
    free_slots(StagedRun(run_dir), ended=True, grace_seconds=0.0)
    assert slots(run_dir) == {"r00000-0.bin", "r00000-9.bin", "notes.txt"}
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_run_has_ended_when_its_newest_trainer_says_so(run: Run, run_dir: Path) -> None:
    assert not has_ended(run, StagedRun(run_dir))
    write_trainer_note(StagedRun(run_dir), run.url, "training")
    assert not has_ended(run, StagedRun(run_dir))
    write_trainer_note(StagedRun(run_dir), run.url, "ended")
    assert has_ended(run, StagedRun(run_dir))
    write_trainer_note(StagedRun(run_dir), run.url, "training")
    tell_ended(run, 1, step=1, reason="finished")
    assert has_ended(run, StagedRun(run_dir))
    run.claim(None)
    assert not has_ended(run, StagedRun(run_dir))


def test_unasked_they_go_with_the_last_job_of_a_training_that_ended(
    run: Run, run_dir: Path
) -> None:
    assert free_slots_of_ended(StagedRun(run_dir)) == []
    write_trainer_note(StagedRun(run_dir), run.url, "ended")
    assert free_slots_of_ended(StagedRun(run_dir)) == []  # the job is still staged
    (job,) = StagedRun(run_dir).staged_jobs()
    persist.persist_job(job)
    write_trainer_note(StagedRun(run_dir), run.url, "training")
    assert free_slots_of_ended(StagedRun(run_dir)) == []  # killed: somebody may start it again
    write_trainer_note(StagedRun(run_dir), run.url, "ended")
    assert len(free_slots_of_ended(StagedRun(run_dir))) == 4
    assert slots(run_dir) == set()
