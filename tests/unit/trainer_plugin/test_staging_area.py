"""What a starting trainer takes for its agent, and what it clears away."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.agent_lock import AGENT, DRAIN, AgentLock, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import read_trainer_note, trainer_state
from recpoint.trainer_plugin.ranks.agreement import incomplete_parts
from recpoint.trainer_plugin.snapshot.staging import StagingArea
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage
from tests.rank_jobs import RankJobs


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = new_run(tmp_path / "run")
    run.claim(None)
    return run


def test_who_does_the_jobs_of_its_run_is_its_agent(tmp_path: Path) -> None:
    area = StagingArea(tmp_path, "/runs/own")
    area.create()
    assert not area.agent_is_running()
    for who in (AGENT, DRAIN, sweep_of(StagedRun(area.staged_run.path))):
        with AgentLock(tmp_path, who):
            assert area.agent_is_running()
    with AgentLock(tmp_path, sweep_of(StagedRun.of(tmp_path, "/runs/other"))):
        assert not area.agent_is_running()


def test_a_sweep_of_another_run_is_not_waited_for(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(seconds: float) -> None:
        pytest.fail("it waits for who does none of its jobs")

    job = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    area = StagingArea(tmp_path / "staging", run.url)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=refuse)
    monkeypatch.setattr("recpoint.trainer_plugin.snapshot.staging.time", clock)
    with AgentLock(area.root, sweep_of(StagedRun.of(area.root, "/runs/other"))):
        assert area.wait_until_drained(60.0) == 1
        area.lock()
        area.take_over(generation=2)
    # Nobody else would ever have answered it.
    assert not job.exists()
    area.close()


def test_a_job_that_a_start_removes_is_named_with_what_is_lost(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = stage(run, tmp_path / "staging", tables(), step=7, generation=1)
    area = StagingArea(tmp_path / "staging", run.url)
    area.lock()
    with caplog.at_level("WARNING"), AgentLock(area.root):
        area.take_over(generation=2)
    assert job.exists() and not caplog.records  # the agent rejects it, and says so
    with caplog.at_level("WARNING"):
        area.take_over(generation=2)
    area.close()
    assert not job.exists()
    (told,) = (record.getMessage() for record in caplog.records)
    assert told.startswith(f"{job}: removed")
    assert "step 7 (generation 1, rank 0)" in told and "generation 2 has taken" in told
    assert f"recpoint agent --staging {area.root}" in told


def test_slots_that_a_job_which_nobody_can_read_may_name_stay(run: Run, tmp_path: Path) -> None:
    jobs = RankJobs(run, [tmp_path / "host"] * 3, tables())
    *_, last = jobs.stage(10)
    last.write_bytes(b"\xff")
    area = StagingArea(tmp_path / "host", run.url)
    slot = StagedRun(area.staged_run.path).slot_path(2, 0)
    (slot.parent / "r00002-notes.bin").write_bytes(b"no slot")
    area.clear_other_ranks((0, 1), generation=1)  # whose job it is
    assert slot.exists()
    with AgentLock(tmp_path / "host"):
        area.clear_other_ranks((0, 1), generation=2)
        assert slot.exists()  # the agent rejects it
    area.clear_other_ranks((0, 1), generation=2)
    assert not slot.exists() and not last.exists()
    assert {path.name for path in slot.parent.iterdir()} == {
        "r00000-0.bin",
        "r00001-0.bin",
        "r00002-notes.bin",
    }


def test_a_lock_whose_file_was_removed_is_taken_anew_before_a_slot_is_written(
    tmp_path: Path,
) -> None:
    area = StagingArea(tmp_path, "/runs/own")
    area.create()
    area.lock()
    lock = StagedRun(area.staged_run.path).trainer_lock_path()
    for remove in (lock.unlink, partial(shutil.rmtree, area.staged_run.path)):
        inode = lock.stat().st_ino
        area.create_if_cleared()
        assert lock.stat().st_ino == inode
        remove()
        assert not StagedRun(area.staged_run.path).trainer_is_running()
        area.create_if_cleared()
        assert StagedRun(area.staged_run.path).trainer_is_running()
    area.close()
    assert not StagedRun(area.staged_run.path).trainer_is_running()


def test_whose_lock_is_anothers_by_now_does_not_say_that_its_training_has_ended(
    tmp_path: Path,
) -> None:
    first, second = (StagingArea(tmp_path, "/runs/own") for _ in range(2))
    first.create()
    first.lock()
    first.take_over(1)
    lock = first.staged_run.trainer_lock_path()
    lock.unlink()
    second.lock()
    second.take_over(2)
    first.say_ended()
    first.close()
    second.close()  # killed
    assert _state(second) == "lost"
    second.lock()
    lock.unlink()  # and nobody has come
    second.say_ended()
    assert _state(second) == "training"
    second.close()
    assert _state(second) == "ended"


def _state(area: StagingArea) -> str:
    return trainer_state(
        StagedRun(area.staged_run.path), read_trainer_note(StagedRun(area.staged_run.path))
    )


def test_staged_parts_of_embedding_servers_do_not_stand_for_ranks() -> None:
    """Of two ranks and two servers: parts 2 and 3 are the servers', which may be on any hosts."""
    assert incomplete_parts([{(1, 10): {0: 2, 2: 2, 3: 2}}, {}]) == {(1, 10)}
    assert not incomplete_parts([{(1, 10): {0: 2, 2: 2}}, {(1, 10): {1: 2}}])
    # Of what an agent has answered it is not known how many there were.
    assert not incomplete_parts([{(1, 10): {0: 0, 3: 0}}])
