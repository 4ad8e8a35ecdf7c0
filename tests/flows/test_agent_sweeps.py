"""The agent sweeps the runs of its staging area: once a period, whoever is started or killed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.settings import PREFECT_API_URL

from recpoint.catalog import staged
from recpoint.catalog.agent_lock import AgentLock
from recpoint.catalog.last_sweep import note_sweep, swept_ms
from recpoint.catalog.run import Run
from recpoint.catalog.trainer_note import write_note
from recpoint.errors import SettingsError
from recpoint.flows.agent import run_agent
from tests.agent_process import AgentProcess
from tests.catalog_builder import Checkpoint, build, new_run, tables, upload
from tests.forked_program import PARENT, run_module
from tests.job_builder import stage
from tests.polling import until

DAY = 86400.0


def a_run(directory: Path, staging: Path, name: str) -> tuple[Run, Path, Checkpoint]:
    """A run that was trained here, its directory in the staging area, and old orphans."""
    run = new_run(directory / name)
    run.claim(None)
    orphan = build(run, tables(), step=2, generation=1)
    upload(run.store, orphan)
    for key in orphan.chunks:
        os.utime(Path(run.url) / key, (1, 1))
    run_dir = staged.run_directory(staging, run.url)
    run_dir.mkdir(parents=True)
    write_note(run_dir, run.url, "training")
    return run, run_dir, orphan


def swept_before(run_dir: Path, seconds: float) -> int:
    """Have the last sweep so long ago; its time stamp."""
    note_sweep(run_dir)
    at_ms = int((time.time() - seconds) * 1000)
    (run_dir / "sweep.json").write_text(json.dumps({"at_ms": at_ms}))
    return at_ms


def has_orphans(run: Run) -> bool:
    return bool(list(run.store.list("chunks/")))


def status_of(run_dir: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(staged.status_path(run_dir).read_text())["sweep"]
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
        until(lambda: swept_ms(new_dir) is not None)
        until(lambda: (swept_ms(ahead_dir) or in_a_week) < in_a_week)
        until(lambda: status_of(due_dir)["done"] == 1)
        assert agent.terminate() == 0
    at_ms = swept_ms(due_dir)
    assert at_ms is not None and abs(time.time() - at_ms / 1000) < 600
    assert status_of(due_dir)["last_error"] is None

    # Started again, with another one that is due: those before it are not swept again.
    upload(due.store, build(due, tables(), step=3, generation=1))
    last, last_dir, _ = a_run(tmp_path, staging, "z-last")
    swept_before(last_dir, DAY + 60)
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: not has_orphans(last))
    assert swept_ms(due_dir) == at_ms and swept_ms(recent_dir) == an_hour_ago
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
    assert swept_ms(run_dir) == at_ms
    record.write_bytes(good)
    with AgentProcess(staging, tmp_path / "log"):
        until(lambda: not has_orphans(run))
        until(lambda: swept_ms(run_dir) != at_ms)


def test_an_error_that_nobody_foresaw_ends_no_sweeps_of_other_runs(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    odd_dir = staged.run_directory(staging, str(tmp_path / "a-odd"))
    odd_dir.mkdir(parents=True)
    # Damage that no process can be given as an argument.
    staged.remember_consolidated_run(odd_dir, f"{tmp_path}/a-odd\0")
    swept_before(odd_dir, 2 * DAY)
    run, run_dir, _ = a_run(tmp_path, staging, "b-run")
    swept_before(run_dir, 2 * DAY)
    assert odd_dir.name < run_dir.name
    with AgentProcess(staging, tmp_path / "log") as agent:
        until(lambda: not has_orphans(run))
        assert agent.logged("ValueError") >= 1 and agent.logged("not foreseen") == 1
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
        until(lambda: len(list(run.store.list("chunks/"))) > 0 and swept_ms(run_dir) is not None)
        until(lambda: time.time() - (swept_ms(run_dir) or 0) / 1000 < DAY)
    (name,) = run.live_line()
    assert {info.key for info in run.store.list("chunks/")} == {
        entry.key for entry in run.manifest(*name).chunks
    }


def test_no_agent_that_drains_or_was_told_not_to_sweeps(tmp_path: Path) -> None:
    staging = tmp_path / "staging"
    run, run_dir, _ = a_run(tmp_path, staging, "run")
    at_ms = swept_before(run_dir, 2 * DAY)
    assert run_agent(staging, once=True, prefect="off") == 0
    assert has_orphans(run) and swept_ms(run_dir) == at_ms
    assert status_of(run_dir) is None
    for period in (0.0, -1.0, float("nan")):
        with pytest.raises(SettingsError, match="sweep_every"):
            run_agent(staging, once=True, prefect="off", sweep_every=period)


def sweep_in_a_process(run: Run, run_dir: Path, **variables: str) -> str:
    program = "recpoint.flows.sweep_process", run.url, str(run_dir), str(DAY), PARENT
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
    assert flow_run.state_type == "COMPLETED" and "run:run" in flow_run.tags


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
        until(lambda: swept_ms(run_dir) != at_ms)
        until(lambda: "no run.json" in str(status_of(run_dir)["last"]))
