"""The agent without Prefect: order, patience, signals, and being killed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import cancels, job_files
from recpoint.catalog.staging.agent_lock import DRAIN, AgentLock, agent_lock_path, at_work, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.errors import StagingError
from recpoint.flows.agent.agent import Agent, run_agent
from recpoint.flows.agent.gate import PrefectGate
from tests.agent_process import AgentProcess
from tests.catalog_builder import new_run, tables
from tests.job_builder import stage, stage_chain
from tests.polling import until


def outcome_of(path: Path) -> str:
    answer = job_files.read_outcome(path.parent.parent / "outcomes" / path.name)
    return answer.result if answer.result == "committed" else answer.error_type


def test_staged_chains_of_several_runs_are_drained_in_order(tmp_path: Path) -> None:
    runs = [new_run(tmp_path / f"run{number}") for number in range(3)]
    paths = []
    for run in runs:
        run.claim(None)
        paths += stage_chain(run, tmp_path / "staging", count=4)
    assert run_agent(tmp_path / "staging", once=True, prefect="off") == 0
    assert {outcome_of(path) for path in paths} == {"committed"}
    for run in runs:
        assert len(run.live_line()) == 4
        assert check(run, level="full").ok


def test_slots_go_with_the_last_job_of_a_training_that_ended(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    (first,) = stage_chain(run, staging, count=1)
    run_dir = first.parent.parent
    write_trainer_note(StagedRun(run_dir), run.url, "training")
    assert run_agent(staging, once=True, prefect="off") == 0
    assert len(list(StagedRun(run_dir).slots_directory.iterdir())) == 1
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: agent.logged("serving") > 0)
        write_trainer_note(StagedRun(run_dir), run.url, "ended")
        until(lambda: not list(StagedRun(run_dir).slots_directory.iterdir()))
        until(lambda: agent.logged("bytes of slots are free again") == 1)  # said after that
        assert agent.terminate() == 0
    # And of one that ended while no agent was there.
    stage(run, staging, tables(), step=2, generation=1)
    assert run_agent(staging, once=True, prefect="off") == 0
    assert not list(StagedRun(run_dir).slots_directory.iterdir())


def test_an_empty_or_missing_staging_area_is_nothing_to_do(tmp_path: Path) -> None:
    assert run_agent(tmp_path / "none", once=True, prefect="off") == 0


def test_bad_jobs_are_answered_and_hold_nobody_up(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    good = stage_chain(run, staging, count=2)
    bad = stage(run, staging, tables(), step=9, generation=1, slot=9)
    bad.write_bytes(b"\xff" * 100)
    lost = stage(run, staging, tables(), step=10, generation=1, slot=10)
    (lost.parent.parent / "slots" / "r00000-10.bin").unlink()
    last = stage(run, staging, tables(), step=11, generation=1, slot=11)
    assert run_agent(staging, once=True, prefect="off") == 0
    assert [outcome_of(path) for path in (*good, bad, lost, last)] == [
        "committed",
        "committed",
        "MalformedObject",
        "StagingError",
        "committed",
    ]


def test_a_store_that_is_away_keeps_its_jobs_and_holds_up_no_other_run(
    run: Run, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    other = new_run(tmp_path / "other")
    other.claim(None)
    waiting = stage_chain(run, staging, count=2)
    done = stage_chain(other, staging, count=2)
    (tmp_path / "run").rename(tmp_path / "away")
    assert run_agent(staging, once=True, prefect="off") == 2
    assert all(path.exists() for path in waiting)
    assert {outcome_of(path) for path in done} == {"committed"}
    status = json.loads(StagedRun(waiting[0].parent.parent).status_path.read_text())
    assert "no run.json" in status["last_error"] and status["pid"] == os.getpid()
    (tmp_path / "away").rename(tmp_path / "run")
    assert run_agent(staging, once=True, prefect="off") == 0
    assert {outcome_of(path) for path in waiting} == {"committed"}


def test_a_run_that_cannot_be_read_stops_no_other(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staging = tmp_path / "staging"
    odd = StagedRun.of(staging, "/somewhere/else").path
    odd.mkdir(parents=True)
    (odd / "jobs").write_text("no directory")
    (odd / "outcomes").write_text("no directory")
    (job,) = stage_chain(run, staging, count=1)
    with pytest.raises(StagingError, match="Not a directory: .*0 checkpoints are still staged"):
        run_agent(staging, once=True, prefect="off")
    assert outcome_of(job) == "committed"
    told = [record for record in caplog.records if "its jobs cannot be read" in record.message]
    assert len(told) == 1
    shutil.rmtree(odd)
    assert run_agent(staging, once=True, prefect="off") == 0


def test_a_staging_area_that_cannot_be_read_is_told_of_once_until_it_can(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staging, away = tmp_path / "staging", tmp_path / "away"
    staging.mkdir()
    agent = Agent(staging, gate=PrefectGate(enabled=False), consolidate="off")
    for times in (1, 2):
        staging.rename(away)
        staging.write_text("no directory")
        for _ in range(5):
            agent._begin_due_runs()
        assert caplog.text.count("cannot look into") == times
        with pytest.raises(StagingError, match="no directory|Not a directory"):
            agent._queue.left(all_must_be_known=True)
        staging.unlink()
        away.rename(staging)
        agent._begin_due_runs()
    (job,) = stage_chain(run, staging, count=1)
    assert agent.serve(once=True) == 0 and outcome_of(job) == "committed"


def test_a_run_that_was_quiet_for_long_is_served_within_seconds(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    StagedRun.of(staging, run.url).path.mkdir(parents=True)
    agent = Agent(staging, gate=PrefectGate(enabled=False), consolidate="off")
    assert agent._begin_due_runs() is False
    (state,) = agent._runs.values()
    state.jobs_seen -= 3600
    assert agent._begin_due_runs() is False and not state.is_to_be_looked_at()
    (job,) = stage_chain(run, staging, count=1)
    serving = threading.Thread(target=agent.serve)
    serving.start()
    until(lambda: not job.exists())
    agent.stop()
    serving.join()
    assert outcome_of(job) == "committed"


def test_a_second_agent_is_refused(tmp_path: Path) -> None:
    with AgentLock(tmp_path), pytest.raises(StagingError, match="lock held by"):
        run_agent(tmp_path, once=True, prefect="off")


def test_an_agent_waits_for_a_sweep_or_drain_and_does_what_it_left(
    run: Run, tmp_path: Path
) -> None:
    staging = tmp_path / "staging"
    (job,) = stage_chain(run, staging, count=1)
    others = (
        AgentLock(staging, sweep_of(StagedRun(staging / "other-0123456789ab"))),
        AgentLock(staging, DRAIN),
    )
    assert others[0].take() is None
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: agent.logged(f"{os.getpid()}, a sweep of other-0123456789ab") == 1)
        others[0].release()
        until(lambda: not job.exists())
        assert agent.logged("waiting for") == 1
        assert agent.terminate() == 0
    assert outcome_of(job) == "committed"
    assert others[1].take() is None
    with AgentProcess(staging, tmp_path / "log", once=True) as agent:
        until(lambda: agent.logged(f"{os.getpid()}, a drain, which ends") == 1)
        others[1].release()
        assert agent.process.wait() == 0
    assert agent.logged("waiting for") == 2


def test_an_agent_whose_lock_file_was_removed_takes_it_anew(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: at_work(staging) is not None)
        shutil.rmtree(staging)
        until(lambda: at_work(staging) is not None)
        (job,) = stage_chain(run, staging, count=1)
        until(lambda: not job.exists())
        assert agent.terminate() == 0
    assert outcome_of(job) == "committed"


def test_an_agent_whose_lock_is_anothers_by_now_ends(tmp_path: Path) -> None:
    """Two at once would write over each other in the spool, and answer each other's jobs."""
    with AgentProcess(tmp_path, tmp_path / "log") as agent:
        until(lambda: agent.logged("serving") == 1)
        agent_lock_path(tmp_path).unlink()
        with AgentLock(tmp_path):
            assert agent.process.wait() != 0
        assert agent.logged(f"a lock held by process {os.getpid()}, an agent") == 1


def test_an_agent_that_waits_ends_on_sigterm(tmp_path: Path) -> None:
    with AgentLock(tmp_path, DRAIN), AgentProcess(tmp_path, tmp_path / "log") as agent:
        until(lambda: agent.logged("waiting for process") == 1)
        assert agent.terminate() == 0
    assert not agent.logged("serving")


def test_a_resident_agent_waits_for_the_store_and_ends_on_sigterm(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    (first,) = stage_chain(run, staging, count=1)
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: not first.exists())
        (tmp_path / "run").rename(tmp_path / "away")
        second = stage(run, staging, tables(), step=2, generation=1, slot=1)
        until(lambda: agent.logged("next try in") >= 2)
        assert second.exists()
        (tmp_path / "away").rename(tmp_path / "run")
        until(lambda: not second.exists())
        assert agent.terminate() == 0
    assert outcome_of(second) == "committed"
    assert "[run step 2 rank 0]" in (tmp_path / "log").read_text()


def test_a_job_that_waits_for_its_store_is_dropped_without_it(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    (path,) = stage_chain(run, staging, count=1)
    ref = job_files.read_job(path).ref
    Path(run.url).rename(tmp_path / "away")
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: agent.logged("next try in") >= 2)
        cancels.write_mark(StagedRun.of_job(path), ref, 0)
        until(lambda: not path.exists())
    assert outcome_of(path) == "CheckpointCancelled"


@pytest.mark.parametrize("die_at", [8, 24])
def test_an_agent_killed_at_work_is_followed_by_one_that_finishes(
    run: Run, tmp_path: Path, die_at: int
) -> None:
    staging = tmp_path / "staging"
    paths = stage_chain(run, staging, count=2)
    with AgentProcess(staging, tmp_path / "log", once=True, die_at=die_at) as agent:
        assert agent.process.wait() == -9
    assert any(path.exists() for path in paths)
    assert run_agent(staging, once=True, prefect="off") == 0
    assert {outcome_of(path) for path in paths} == {"committed"}
    assert check(run, level="full").ok
    assert not (paths[0].parent.parent / "spool").exists() or not any(
        (paths[0].parent.parent / "spool").iterdir()
    )
