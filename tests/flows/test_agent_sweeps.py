"""The agent sweeps the runs of its staging area: once a period, whoever is started or killed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings import PREFECT_API_URL

from recpoint.catalog.check.check import check
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.agent_lock import AgentLock
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.trainer_note import read_trainer_note, write_trainer_note
from recpoint.errors import SettingsError
from recpoint.flows.agent.agent import Agent, run_agent
from recpoint.flows.agent.gate import PrefectGate
from recpoint.flows.agent.sweeps import BackgroundSweep, last_sweep, note_sweep, swept_ms
from recpoint.format.notes import SweepNote
from tests.agent_process import AgentProcess
from tests.catalog_builder import Checkpoint, build, new_run, tables, upload
from tests.forked_program import PARENT, run_module
from tests.job_builder import stage, stage_chain
from tests.polling import until
from tests.staged_notes import note_to_consolidate

DAY = 86400.0


def a_run(directory: Path, staging: Path, name: str) -> tuple[Run, Path, Checkpoint]:
    """A run that was trained here, its directory in the staging area, and old orphans."""
    run = new_run(directory / name)
    run.claim(None)
    orphan = build(run, tables(), step=2, generation=1)
    upload(run.store, orphan)
    for key in orphan.chunks:
        os.utime(Path(run.url) / key, (1, 1))
    run_dir = StagedRun.of(staging, run.url).path
    run_dir.mkdir(parents=True)
    write_trainer_note(StagedRun(run_dir), run.url, "training")
    return run, run_dir, orphan


def swept_before(run_dir: Path, seconds: float) -> int:
    """Have the last sweep so long ago; its time stamp."""
    note_sweep(StagedRun(run_dir))
    at_ms = int((time.time() - seconds) * 1000)
    (run_dir / "sweep.json").write_text(json.dumps({"at_ms": at_ms}))
    return at_ms


def has_orphans(run: Run) -> bool:
    return bool(list(run.store.list("chunks/")))


def status_of(run_dir: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(StagedRun(run_dir).status_path.read_text())["sweep"]
    return status


def test_a_run_is_swept_once_a_day_however_often_the_agent_starts(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    due, due_dir, _ = a_run(tmp_path, staging, "a-due")
    recent, recent_dir, _ = a_run(tmp_path, staging, "b-recent")
    new, new_dir, _ = a_run(tmp_path, staging, "c-new")
    ahead, ahead_dir, _ = a_run(tmp_path, staging, "d-ahead")
    swept_before(due_dir, DAY + 60)
    an_hour_ago = swept_before(recent_dir, 3600)
    in_a_week = swept_before(ahead_dir, -7 * DAY)
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: not has_orphans(due))
        until(lambda: agent.logged("a-due-") and agent.logged("swept: Removed"))
        until(lambda: swept_ms(StagedRun(new_dir)) is not None)
        until(lambda: (swept_ms(StagedRun(ahead_dir)) or in_a_week) < in_a_week)
        until(lambda: status_of(due_dir)["done"] == 1)
        assert agent.terminate() == 0
    at_ms = swept_ms(StagedRun(due_dir))
    assert at_ms is not None and abs(time.time() - at_ms / 1000) < 600
    assert status_of(due_dir)["last_error"] is None

    # Started again, with another one that is due: those before it are not swept again.
    upload(due.store, build(due, tables(), step=3, generation=1))
    last, last_dir, _ = a_run(tmp_path, staging, "z-last")
    swept_before(last_dir, DAY + 60)
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: not has_orphans(last))
    assert swept_ms(StagedRun(due_dir)) == at_ms and swept_ms(StagedRun(recent_dir)) == an_hour_ago
    assert has_orphans(recent) and has_orphans(new) and has_orphans(ahead)


def test_a_sweep_that_fails_is_made_up_for_by_the_next_agent(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run, run_dir, _ = a_run(tmp_path, staging, "run")
    at_ms = swept_before(run_dir, 2 * DAY)
    record = Path(run.url) / "run.json"
    good = record.read_bytes()
    record.write_bytes(b"damaged")
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: agent.logged("not swept, next try in 60 s") >= 1)
        until(lambda: status_of(run_dir)["last_error"] is not None)
    assert swept_ms(StagedRun(run_dir)) == at_ms
    record.write_bytes(good)
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: not has_orphans(run))
        until(lambda: swept_ms(StagedRun(run_dir)) != at_ms)


def test_an_error_that_nobody_foresaw_ends_no_sweeps_of_other_runs(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    odd_dir = StagedRun.of(staging, str(tmp_path / "a-odd")).path
    odd_dir.mkdir(parents=True)
    # Damage that no process can be given as an argument.
    note_to_consolidate(odd_dir, f"{tmp_path}/a-odd\0")
    swept_before(odd_dir, 2 * DAY)
    run, run_dir, _ = a_run(tmp_path, staging, "b-run")
    swept_before(run_dir, 2 * DAY)
    assert odd_dir.name < run_dir.name
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: not has_orphans(run))
        assert agent.logged("ValueError") >= 1 and agent.logged("unexpected error") == 1
        assert agent.logged("not swept, next try in 60 s") == 1
        assert agent.logged("Traceback") >= 1
        until(lambda: "ValueError" in str(status_of(odd_dir)["last_error"]))


def test_a_sweep_leaves_what_is_staged_to_its_agent(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run, run_dir, _ = a_run(tmp_path, staging, "run")
    swept_before(run_dir, 2 * DAY)
    job = stage(run, staging, tables(), step=5, generation=1)
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: not job.exists())
        until(
            lambda: (
                len(list(run.store.list("chunks/"))) > 0
                and swept_ms(StagedRun(run_dir)) is not None
            )
        )
        until(lambda: time.time() - (swept_ms(StagedRun(run_dir)) or 0) / 1000 < DAY)
    (name,) = run.live_line()
    assert {info.key for info in run.store.list("chunks/")} == {
        entry.key for entry in run.manifest(*name).chunks
    }


def test_no_agent_that_drains_or_was_told_not_to_sweeps(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run, run_dir, _ = a_run(tmp_path, staging, "run")
    at_ms = swept_before(run_dir, 2 * DAY)
    assert run_agent(staging, once=True, prefect="off") == 0
    assert has_orphans(run) and swept_ms(StagedRun(run_dir)) == at_ms
    assert status_of(run_dir) is None
    for period in (0.0, -1.0, float("nan")):
        with pytest.raises(SettingsError, match="sweep_every"):
            run_agent(staging, once=True, prefect="off", sweep_every=period)


def sweep_in_a_process(run: Run, run_dir: Path, **variables: str) -> str:
    program = "recpoint.flows.agent.sweep_process", run.url, str(run_dir), str(DAY), PARENT
    environment = {**os.environ, **variables}
    done = run_module([*program], environment=environment, directory=run_dir)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("prefect_api")
def test_with_prefect_it_is_a_flow_to_be_seen(tmp_path: Path) -> None:
    run, run_dir, orphan = a_run(tmp_path, tmp_path / "staging", "run")
    with AgentLock(run_dir.parent):  # as its agent holds it
        said = sweep_in_a_process(run, run_dir, PREFECT_API_URL=str(PREFECT_API_URL.value()))
    assert f'"done": "Removed {len(orphan.chunks)} objects' in said
    assert not has_orphans(run)
    name = FlowRunFilterName(any_=[f"sweep {run.url}"])
    with get_client(sync_client=True) as client:
        (flow_run,) = client.read_flow_runs(flow_run_filter=FlowRunFilter(name=name))
    assert flow_run.state_type == "COMPLETED" and f"run:{run.url}" in flow_run.tags


def test_where_prefect_fails_it_is_swept_without(tmp_path: Path) -> None:
    run, run_dir, orphan = a_run(tmp_path, tmp_path / "staging", "run")
    nobody = {"PREFECT_API_URL": "http://127.0.0.1:9/api", "PREFECT_CLIENT_MAX_RETRIES": "0"}
    with AgentLock(run_dir.parent):
        said = sweep_in_a_process(run, run_dir, **nobody)
    assert f'"done": "Removed {len(orphan.chunks)} objects' in said
    assert not has_orphans(run)


def test_a_run_that_is_gone_is_told_and_not_asked_for_again(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run, run_dir, _ = a_run(tmp_path, staging, "run")
    at_ms = swept_before(run_dir, 2 * DAY)
    Path(run.url).rename(tmp_path / "away")
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: swept_ms(StagedRun(run_dir)) != at_ms)
        until(lambda: "no run.json" in str(status_of(run_dir)["last"]))


def make_old(directory: Path) -> None:
    """All files of a run, three days old."""
    when = time.time() - 3 * DAY
    for path in directory.rglob("*"):
        if path.is_file():
            os.utime(path, (when, when))


def test_what_a_lost_manifest_has_named_outlasts_the_daily_sweep(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run = new_run(tmp_path / "run")
    run.claim(None)
    stage_chain(run, staging, count=3)
    assert run_agent(staging, once=True, prefect="off") == 0
    (run_dir,) = [run.path for run in staged_runs(staging)]
    write_trainer_note(StagedRun(run_dir), run.url, "training")
    make_old(Path(run.url))
    lost = min((Path(run.url) / "manifests").iterdir())
    data = lost.read_bytes()
    lost.unlink()
    at_ms = swept_before(run_dir, 2 * DAY)
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: swept_ms(StagedRun(run_dir)) != at_ms)
        until(lambda: status_of(run_dir)["done"] == 1)
    said = status_of(run_dir)["last"]
    assert said.startswith("Removed 0 objects, 0 bytes;")
    assert "step 1 (generation 1) is needed by step 2 (generation 1)" in said
    assert f"recpoint check {run.url}" in said and "nothing is left" not in said
    lost.write_bytes(data)
    assert check(run, level="full").ok


def due_again(run_dir: Path) -> None:
    """Have the last sweep so long ago that another is due, and leave the rest of its note."""
    path = run_dir / "sweep.json"
    document = json.loads(path.read_text())
    document["at_ms"] = int((time.time() - 2 * DAY) * 1000)
    path.write_text(json.dumps(document))


@pytest.mark.slow
def test_a_run_that_has_ended_is_swept_until_nothing_is_left(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    ended, ended_dir, _ = a_run(tmp_path, staging, "a-ended")
    other, other_dir, _ = a_run(tmp_path, staging, "z-other")  # is looked at after it
    note_sweep(StagedRun(other_dir))

    def sweep(awaited: Path) -> SweepNote | None:
        """Have another agent sweep until it has swept this run; the note of the one that ended."""
        at_ms = swept_ms(StagedRun(awaited))
        with AgentProcess(staging, tmp_path / "log"):
            until(lambda: swept_ms(StagedRun(awaited)) != at_ms)
        return last_sweep(StagedRun(ended_dir))

    swept_before(ended_dir, 2 * DAY)
    write_trainer_note(StagedRun(ended_dir), ended.url, "ended")
    note = sweep(ended_dir)
    assert note is not None and note.ended_ms is None  # it has removed something
    assert not has_orphans(ended)
    # What is too young to go is there for a later one.
    young = build(ended, tables(), step=3, generation=1)
    upload(ended.store, young)
    due_again(ended_dir)
    note = sweep(ended_dir)
    assert note is not None and note.ended_ms is None and has_orphans(ended)
    for key in young.chunks:
        ended.store.delete(key)
    due_again(ended_dir)
    note, trainer = sweep(ended_dir), read_trainer_note(StagedRun(ended_dir))
    assert note is not None and trainer is not None and note.ended_ms == trainer.at_ms
    # Other agents do not begin again.
    due_again(ended_dir)
    due_again(other_dir)
    asleep = last_sweep(StagedRun(ended_dir))
    assert sweep(other_dir) == asleep
    # A training that has begun and ended since is another one.
    write_trainer_note(StagedRun(ended_dir), ended.url, "training")
    write_trainer_note(StagedRun(ended_dir), ended.url, "ended")
    note = sweep(ended_dir)
    assert note is not None and asleep is not None and note.at_ms > asleep.at_ms


@pytest.mark.slow
def test_a_run_that_is_still_trained_is_swept_every_day(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run, run_dir, orphan = a_run(tmp_path, staging, "run")
    for key in orphan.chunks:
        run.store.delete(key)
    at_ms = swept_before(run_dir, 2 * DAY)
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: swept_ms(StagedRun(run_dir)) != at_ms)
        until(lambda: "nothing is left for a later one" in str(status_of(run_dir)["last"]))
    note = last_sweep(StagedRun(run_dir))
    assert note is not None and note.ended_ms is None


@pytest.mark.slow
def test_nothing_is_remembered_of_a_directory_that_is_gone(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    _, run_dir, _ = a_run(tmp_path, staging, "run")
    swept_before(run_dir, 2 * DAY)
    sweeps = BackgroundSweep(
        staging, every_seconds=DAY, prefect_url=lambda: None, tell=lambda _: None
    )

    def done() -> object:
        status = sweeps.status(StagedRun(run_dir))
        assert status is not None
        return status["done"]

    sweeps.start()
    try:
        until(lambda: done() == 1)
        run_dir.rename(tmp_path / "away")
        until(lambda: done() == 0)
    finally:
        sweeps.stop()


@contextmanager
def serving(agent: Agent) -> Iterator[None]:
    thread = threading.Thread(target=agent.serve)
    thread.start()
    try:
        yield
    finally:
        agent.stop()
        thread.join()


@pytest.mark.slow
def test_an_agent_forgets_to_consolidate_what_is_gone(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run, run_dir, _ = a_run(tmp_path, staging, "run")
    note_to_consolidate(run_dir, run.url)
    agent = Agent(staging, gate=PrefectGate(enabled=False))

    def consolidation() -> tuple[object] | None:
        path = StagedRun(run_dir).status_path
        return (json.loads(path.read_text())["consolidation"],) if path.exists() else None

    with AgentLock(staging), serving(agent):
        until(lambda: (consolidation() or (None,))[0] is not None)
        run_dir.rename(tmp_path / "away")
        _, other_dir, _ = a_run(tmp_path, staging, "other")
        until(StagedRun(other_dir).status_path.exists)  # it has looked since
        run_dir.mkdir()
        assert until(consolidation) == (None,)
