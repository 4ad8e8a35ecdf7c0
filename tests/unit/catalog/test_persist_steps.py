"""Who runs the steps of a persist sees each of them, in order, and ends it by failing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import plan
from recpoint.catalog.persist.persist import Committed, PersistJob, StoredJob, drive
from recpoint.catalog.persist.plan import ChunkGroup
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import DigestMismatch, StoreUnavailable
from tests.catalog_builder import tables
from tests.job_builder import stage


class Watched:
    """The job's own steps; notes which were begun, and how many are at work on groups at once."""

    def __init__(self, job: PersistJob, before: Callable[[str], None] = lambda step: None) -> None:
        self.job = job
        self.seen: list[str] = []
        self.stored: list[tuple[int, int]] = []
        self.uploaded: list[int] = []
        self.most_at_once = 0
        self._before = before
        self._unfinished: set[int] = set()
        self._lock = threading.Lock()

    def _note(self, step: str, group: ChunkGroup | None = None) -> None:
        with self._lock:
            self.seen.append(step if group is None else f"{step} {group.index}")
            if group is not None:
                self._unfinished.add(group.index)
            self.most_at_once = max(self.most_at_once, len(self._unfinished))
        self._before(self.seen[-1])

    def find_done(self) -> StoredJob:
        self._note("find_done")
        return self.job.find_done()

    def verify(self) -> None:
        self._before("verify")
        self.job.verify()

    def quantize(self, group: ChunkGroup) -> None:
        self._note("quantize", group)
        self.job.quantize(group)

    def encode(self, group: ChunkGroup) -> None:
        self._note("encode", group)
        self.job.encode(group)

    def upload(self, group: ChunkGroup) -> None:
        self._note("upload", group)
        self.job.upload(group)
        with self._lock:
            self._unfinished.discard(group.index)
            self.uploaded.append(group.index)

    def commit(self) -> Committed:
        self._note("commit")
        return self.job.commit()

    def advanced(self, done_bytes: int, total_bytes: int) -> None:
        self.stored.append((done_bytes, total_bytes))


@pytest.fixture
def job(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PersistJob:
    """One of several groups."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 400)
    monkeypatch.setattr(plan, "GROUP_BYTES", 900)
    path = stage(run, tmp_path / "staging", tables(rows=120, bits=4), step=1, generation=1)
    opened = PersistJob.open(path)
    assert len(opened.groups) > 3
    return opened


def test_each_step_of_each_group_is_run_once_and_two_groups_at_most_are_at_work(
    run: Run, job: PersistJob
) -> None:
    steps = Watched(job)
    answer = drive(job, steps)
    assert answer.outcome.result == "committed" and check(run, level="full").ok
    of_groups = [
        [step for step in ("quantize", "encode", "upload") if step != "quantize" or group.quantized]
        for group in job.groups
    ]
    for group, expected in zip(job.groups, of_groups, strict=True):
        found = [one for one in steps.seen if one.endswith(f" {group.index}")]
        assert found == [f"{step} {group.index}" for step in expected]
    assert (steps.seen[0], steps.seen[-1]) == ("find_done", "commit")
    assert len(steps.seen) == 2 + sum(map(len, of_groups))
    assert steps.most_at_once == 2
    total = sum(group.staged_bytes for group in job.groups)
    assert steps.stored[-1] == (total, total) and steps.stored == sorted(steps.stored)
    assert len(steps.stored) == len(job.groups)


def test_what_is_damaged_is_rejected_without_encoding_the_rest(job: PersistJob) -> None:
    known = threading.Event()
    damaged = DigestMismatch("slot", found="a", expected="b", next_step="c")

    def before(step: str) -> None:
        if step == "verify":
            known.set()
            raise damaged
        if step == "upload 0":
            known.wait()

    steps = Watched(job, before)
    assert drive(job, steps).outcome.error_type == "DigestMismatch"
    assert "commit" not in steps.seen and not job.path.exists()
    assert f"encode {job.groups[-1].index}" not in steps.seen


def test_nothing_is_at_work_any_more_when_a_step_has_failed(job: PersistJob) -> None:
    at_work, failing = threading.Event(), threading.Event()

    def before(step: str) -> None:
        if step == "upload 0":
            at_work.set()
            failing.wait()
        if step == "encode 1":
            at_work.wait()
            failing.set()
            raise StoreUnavailable("store", found="a", expected="b", next_step="c")

    steps = Watched(job, before)
    with pytest.raises(StoreUnavailable):
        drive(job, steps)
    assert steps.uploaded == [0] and job.path.exists()


def test_a_job_that_somebody_has_removed_is_neither_committed_nor_answered(
    run: Run, job: PersistJob
) -> None:
    def before(step: str) -> None:
        if step == "commit":
            job.path.unlink()

    with pytest.raises(FileNotFoundError):
        drive(job, Watched(job, before))
    assert run.manifest_names() == []
    assert not (StagedRun(job.path.parents[1]).outcomes_directory / job.path.name).exists()
