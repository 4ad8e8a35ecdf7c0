"""prefect.yaml, events and automations on a real server, with a real worker and a real agent."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.restore.shard_plan import INDEX
from recpoint.catalog.run.chain import resolve_chain
from recpoint.catalog.run.publications import newest_publication
from recpoint.catalog.run.run import Run
from recpoint.catalog.run.validations import records_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.flows import prefect_server
from recpoint.format.naming import EXPIRED_KEY, MANIFEST_KEY, ManifestName, row_chunk_key
from recpoint.format.record_kinds import VALIDATION
from tests.agent_process import AgentProcess
from tests.catalog_builder import build, new_run, publish, tables
from tests.flows.deployed_server import (
    ROOT,
    SECONDS,
    Server,
    flow_run_of,
    persist_until_told,
    worker_commands,
)
from tests.job_builder import stage, stage_chain
from tests.polling import SERVER_SECONDS, until
from tests.prefect_api import ask
from tests.prefect_database import place_database

pytestmark = [pytest.mark.nightly("deployments"), pytest.mark.xdist_group("deployments")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as the agent starts one, whose vacuum looks every second."""
    home = tmp_path_factory.mktemp("home")
    place_database(home / "prefect" / "prefect.db", tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT_")]:
            patch.delenv(name)
        patch.setenv("RECPOINT_HOME", str(home))
        patch.setenv("PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS", "1")
        try:
            local = prefect_server.start_server()
            until(lambda: prefect_server.is_healthy(local.url), seconds=SECONDS)
            yield Server(home, local.url)
        finally:
            prefect_server.stop_server()


@pytest.fixture(scope="module")
def deployed(server: Server) -> dict[str, dict[str, Any]]:
    made = server.run(
        "prefect", "--no-prompt", "work-pool", "create", "recpoint", "--type", "process"
    )
    assert made.returncode == 0, made.stdout + made.stderr
    done = server.run("prefect", "--no-prompt", "deploy", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    return server.deployments()


def test_each_deployment_is_there_with_schema_schedules_and_queue(
    deployed: dict[str, dict[str, Any]],
) -> None:
    everywhere = {
        "consolidate/recpoint-consolidate",
        "forget/recpoint-forget",
        "publish/recpoint-publish",
        "publish-to/recpoint-publish-to",
    }
    everywhere |= {"restore/recpoint-restore", "retain/recpoint-retain"}
    everywhere |= {"validate/recpoint-validate", "validate/recpoint-validate-full"}
    here = {
        "drain/recpoint-drain-host-1",
        "persist/recpoint-persist-host-1",
        "sweep/recpoint-sweep-host-1",
    }
    assert deployed.keys() == everywhere | here
    for name, one in deployed.items():
        assert one["entrypoint"].startswith("recpoint.flows.") and one["pull_steps"] == []
        assert one["enforce_parameter_schema"] and one["work_pool_name"] == "recpoint"
        assert one["work_queue_name"] == ("host-1" if name in here else "default")
        assert "recpoint" in one["tags"]
        # Flow runs for one sink exclude each other; those for other sinks do not wait.
        limit = 16 if name == "publish-to/recpoint-publish-to" else 1
        assert one["global_concurrency_limit"]["limit"] == limit
        # That one alone needs no run.
        assert {schedule["active"] for schedule in one["schedules"]} <= {
            name == "forget/recpoint-forget"
        }
    retain = deployed["retain/recpoint-retain"]
    schema = retain["parameter_openapi_schema"]
    assert schema["required"] == ["run_url", "keep"]
    assert schema["properties"]["run_url"]["minLength"] == 1
    assert schema["definitions"]["Keep"]["properties"]["last"]["minimum"] == 0
    schema = deployed["restore/recpoint-restore"]["parameter_openapi_schema"]
    assert schema["required"] == ["run_url", "target"]
    assert schema["properties"]["shard_bytes"]["default"] == 1 << 30
    assert retain["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    assert (
        deployed["drain/recpoint-drain-host-1"]["concurrency_options"]["collision_strategy"]
        == "CANCEL_NEW"
    )
    (schedule,) = retain["schedules"]
    assert schedule["slug"] == "retain-hourly"
    assert schedule["schedule"] == {"cron": "17 * * * *", "timezone": "UTC", "day_or": True}


def test_deploying_again_adds_nothing(server: Server, deployed: dict[str, dict[str, Any]]) -> None:
    done = server.run("prefect", "--no-prompt", "deploy", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    again = server.deployments()
    assert {k: one["id"] for k, one in again.items()} == {
        k: one["id"] for k, one in deployed.items()
    }
    assert all(len(one["schedules"]) == len(again[k]["schedules"]) for k, one in deployed.items())


@pytest.mark.parametrize("run_url", [None, ""])
def test_a_run_without_its_run_is_refused_at_once(
    server: Server, deployed: dict[str, dict[str, Any]], run_url: str | None
) -> None:
    path = f"/deployments/{deployed['retain/recpoint-retain']['id']}/create_flow_run"
    given = {} if run_url is None else {"run_url": run_url}
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask(path, {"parameters": {**given, "keep": {"last": 1}}})
    assert refused.value.code == 409 and b"run_url" in refused.value.read()


def test_workers_run_them_beside_the_staging_area_and_elsewhere(
    server: Server, deployed: dict[str, dict[str, Any]], run: Run, tmp_path: Path
) -> None:
    for step in (1, 2):
        publish(run, build(run, tables(), step=step, generation=1))
    staging = tmp_path / "staging"
    job = stage(run, staging, tables(), step=3, generation=1)

    create = partial(flow_run_of, server, deployed)
    drained = create("drain/recpoint-drain-host-1", {"staging": str(staging)})
    retained = create(
        "retain/recpoint-retain",
        {"run_url": run.url, "keep": {"last": 2, "require_validated": False}},
    )
    anywhere, on_host = worker_commands()
    assert on_host[-1] == "host-1"
    page = (ROOT / "docs" / "how-to" / "several-hosts-with-prefect.md").read_text(encoding="utf-8")
    assert all(f"\n{' '.join(command)}\n" in page for command in (anywhere, on_host))
    with (tmp_path / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", *on_host, "--name", "worker-of-host-1"],
            cwd=tmp_path,
            env=server.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        state = server.ended(drained)["state"]
        assert (state["type"], state["message"]) == ("COMPLETED", "1 jobs done, 0 still staged")
        assert not job.exists() and run.manifest(3, 1).chunks
        # That worker is for its host only.
        assert server.ask(f"/flow_runs/{retained['id']}")["state"]["type"] == "SCHEDULED"
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    left = create("drain/recpoint-drain-host-1", {"staging": str(staging)})
    state = server.worked_off(retained)
    assert state["type"] == "COMPLETED", state
    # Nor does one for anywhere take what only a host can do.
    assert server.ask(f"/flow_runs/{left['id']}")["state"]["type"] == "SCHEDULED"
    assert EXPIRED_KEY.of(MANIFEST_KEY.of(1, 1)) in {info.key for info in run.store.list()}
    name = "recpoint.checkpoint.retained"
    (event,) = until(
        lambda: server.events(name) or None, longest_pause=SERVER_SECONDS, seconds=SECONDS
    )
    assert event["resource"]["prefect.resource.id"] == f"recpoint.run.{run.id}"
    assert event["payload"]["summary"].startswith("1 marked")


def test_a_worker_persists_sweeps_validates_merges_publishes_restores_and_forgets(
    server: Server, deployed: dict[str, dict[str, Any]], run: Run, tmp_path: Path
) -> None:
    staging, target = tmp_path / "staging", tmp_path / "restored"
    *before, newest = stage_chain(run, staging, count=3)
    for job in before:
        persist_job(job)

    def work_off(given: dict[str, dict[str, Any]], *, on_host: bool = False) -> None:
        asked = {name: flow_run_of(server, deployed, name, given[name]) for name in given}
        states = {name: server.worked_off(asked[name], on_host=on_host) for name in asked}
        assert {state["type"] for state in states.values()} == {"COMPLETED"}, states

    orphan = row_chunk_key(9, 1, "0" * 32, rank=0, table=0, number=0)
    run.store.put(orphan, b"left by a killed agent")
    os.utime(tmp_path / "run" / orphan, (0, 0))
    of_run = {"run_url": run.url}
    swept = {**of_run, "staging": str(staging), "include_newest": True}
    work_off({"persist/recpoint-persist-host-1": {"job_path": str(newest)}}, on_host=True)
    assert run.live_line() == [(3, 1), (2, 1), (1, 1)]
    work_off({"sweep/recpoint-sweep-host-1": swept}, on_host=True)
    assert orphan not in {info.key for info in run.store.list()}

    work_off(
        {
            "validate/recpoint-validate": of_run,
            "validate/recpoint-validate-full": of_run,
            "restore/recpoint-restore": {**of_run, "target": str(target)},
            "forget/recpoint-forget": {"older_than_days": 1},
        }
    )
    records = [run.records(VALIDATION).read(*name) for name in records_of(run, ManifestName(3, 1))]
    assert {(one.level, one.result) for one in records} == {
        ("sample", "passed"),
        ("full", "passed"),
    }
    assert (target / INDEX).is_file()
    merging = {**of_run, "only_if_it_pays": False}
    work_off({"publish/recpoint-publish": of_run, "consolidate/recpoint-consolidate": merging})
    published = newest_publication(run)
    assert published is not None and published.checkpoint.step == 3
    assert len(resolve_chain(run, ManifestName(3, 1)).manifests) == 1


def test_silence_rejection_and_a_failed_validation_raise_alerts(
    server: Server, deployed: dict[str, dict[str, Any]], run: Run, tmp_path: Path
) -> None:
    def automations(*arguments: str) -> Any:
        done = server.run("recpoint", "automations", *arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    alerts = ("checkpoint rejected", "flow run without a process", "no commit", "validation failed")
    names = [f"recpoint: {alert}" for alert in alerts]
    first = automations("apply", "--no-commit", "10s")["automations"]
    assert sorted(one["name"] for one in first) == names
    assert {one["result"] for one in first} == {"created"}
    again = automations("apply", "--no-commit", "11s")["automations"]
    results = {one["name"]: one["result"] for one in again}
    assert results == {name: "updated" if name.endswith("commit") else "kept" for name in names}
    assert [one["name"] for one in automations("list")["automations"]] == names
    assert len(server.ask("/automations/filter", {})) == 4

    staging, steps = tmp_path / "staging", itertools.count(1)

    def good(step: int) -> Path:
        return stage(run, staging, tables(), step=step, generation=1, slot=step)

    def bad(step: int) -> Path:
        """Damaged before the agent can come to it, since it is staged elsewhere at first."""
        job = stage(run, tmp_path / "aside", tables(), step=step, generation=1, slot=step)
        there = StagedRun.of(staging, run.url).path
        slot = next((job.parent.parent / "slots").glob(f"*-{step}.bin"))
        slot.write_bytes(bytes(slot.stat().st_size))
        slot.rename(there / "slots" / slot.name)
        return job.rename(there / "jobs" / job.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPOINT_HOME", str(server.home))
        with AgentProcess(staging, tmp_path / "agent.log", prefect="auto") as agent:
            until(lambda: agent.logged("Prefect is at") > 0, seconds=SECONDS)
            committed = persist_until_told(server, run, "committed", good, steps)
            persist_until_told(server, run, "failed", bad, steps)
    assert committed["resource"]["prefect.resource.name"] == run.url
    roles = {related["prefect.resource.role"] for related in committed["related"]}
    assert "flow-run" in roles
    damaged = tmp_path / "run" / run.manifest(*run.live_line()[0]).chunks[0].key
    damaged.write_bytes(bytes(damaged.stat().st_size))
    failed = flow_run_of(server, deployed, "validate/recpoint-validate", {"run_url": run.url})
    assert server.worked_off(failed)["type"] == "FAILED"

    def fired() -> bool:
        found = {
            one["resource"]["prefect.resource.name"]
            for one in server.events("prefect.automation.triggered")
        }
        return found >= set(names) - {"recpoint: flow run without a process"}

    until(fired, longest_pause=SERVER_SECONDS, seconds=SECONDS)
    assert automations("remove")["removed"] == names
    assert server.ask("/automations/filter", {}) == []


def test_a_training_that_ended_raises_no_alarm_and_one_that_died_does(
    server: Server, tmp_path: Path
) -> None:
    # A server that comes to the end only after so long has to raise the alarm, also where it heard
    # in time and was behind with what it had heard: with more patience then.
    for seconds in (40, 120, 360):
        ended, dead, alarmed = runs_of_alarms(server, tmp_path / str(seconds), seconds)
        assert dead.id in alarmed
        if ended.id not in alarmed:
            break
    else:
        pytest.fail("an alarm for a training that ended, however much patience the server has")
    assert server.run("recpoint", "automations", "remove").returncode == 0


def runs_of_alarms(server: Server, place: Path, seconds: int) -> tuple[Run, Run, set[str]]:
    """One run that ended, one that died, and those an alarm was raised for after such a silence."""
    done = server.run("recpoint", "automations", "apply", "--no-commit", f"{seconds}s")
    assert done.returncode == 0, done.stdout + done.stderr
    run, dead = (new_run(place / name) for name in ("ended", "dead"))
    for one in (run, dead):
        one.claim(None)
    staging, steps = place / "staging", itertools.count(1)

    def job(one: Run, step: int) -> Path:
        (directory := StagedRun.of(staging, one.url).path).mkdir(parents=True, exist_ok=True)
        write_trainer_note(StagedRun(directory), one.url, "ended" if one is run else "training")
        return stage(one, staging, tables(), step=step, generation=1, slot=step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECPOINT_HOME", str(server.home))
        with AgentProcess(staging, place / "agent.log", prefect="auto") as agent:
            until(lambda: agent.logged("Prefect is at") > 0, seconds=SECONDS)
            for one in (run, dead):
                persist_until_told(server, one, "committed", partial(job, one), steps)
            until(
                lambda: server.events_of(run, "ended") or None,
                longest_pause=SERVER_SECONDS,
                seconds=SECONDS,
            )
            assert server.events_of(dead, "ended") == []

            def fired() -> set[str] | None:
                found = server.events("prefect.automation.triggered")
                runs = {
                    str(one["payload"]["triggering_labels"].get("prefect.resource.id"))
                    for one in found
                }
                return runs if f"recpoint.run.{dead.id}" in runs else None

            # The run that ended had its last commit first: its time was up before this one's.
            raised = until(fired, longest_pause=SERVER_SECONDS, seconds=SECONDS + seconds)
    return run, dead, {name.removeprefix("recpoint.run.") for name in raised}


def test_a_flow_run_of_ours_whose_process_is_gone_is_called_crashed(server: Server) -> None:
    done = server.run("recpoint", "automations", "apply", "--no-heartbeat", "10s")
    assert done.returncode == 0, done.stdout + done.stderr
    hanging = (
        "import sys, time\nfrom prefect import flow, tags\n"
        "@flow\ndef hang():\n    time.sleep(900)\n"
        "with tags(*sys.argv[1:]):\n    hang()\n"
    )
    found: dict[str, dict[str, Any]] = {}
    for tag in ("somebody-else", "recpoint"):
        process = subprocess.Popen([sys.executable, "-c", hanging, tag], env=server.environment)

        def beating(tag: str = tag) -> dict[str, Any] | None:
            for event in server.events("prefect.flow-run.heartbeat"):
                identity = event["resource"]["prefect.resource.id"].rpartition(".")[2]
                one: dict[str, Any] = server.ask(f"/flow_runs/{identity}")
                if one["tags"] == [tag]:
                    return one
            return None

        try:
            found[tag] = until(beating, longest_pause=SERVER_SECONDS, seconds=SECONDS)
        finally:
            process.kill()
            process.wait()
    state = server.ended(found["recpoint"])["state"]
    assert state["type"] == "CRASHED" and "no sign of life" in state["message"]
    other = server.ask(f"/flow_runs/{found['somebody-else']['id']}")
    assert other["state"]["type"] == "RUNNING"
    assert server.run("recpoint", "automations", "remove").returncode == 0


def test_old_flow_runs_go_with_their_artifacts(server: Server) -> None:
    settings = server.ask("/admin/settings")["server"]
    assert settings["services"]["db_vacuum"]["retention_period"] == "P3D"
    assert settings["events"]["retention_period"] == "P3D"
    flow_id = server.ask("/flows/", {"name": "growth"})["id"]
    made = server.ask(
        "/flow_runs/", {"flow_id": flow_id, "name": "old", "state": {"type": "COMPLETED"}}
    )
    artifact = {"key": "recpoint-growth", "type": "markdown", "data": "x"}
    server.ask("/artifacts/", {**artifact, "flow_run_id": made["id"]})
    with sqlite3.connect(server.home / "prefect" / "prefect.db", timeout=240) as database:
        changed = database.execute(
            "UPDATE flow_run SET end_time = datetime('now', '-4 days'), "
            "start_time = datetime('now', '-4 days') WHERE name = 'old'"
        )
        assert changed.rowcount == 1
    database.close()

    def gone() -> bool:
        runs = server.ask("/flow_runs/filter", {"flows": {"name": {"any_": ["growth"]}}})
        there = server.ask(
            "/artifacts/filter", {"artifacts": {"key": {"any_": ["recpoint-growth"]}}}
        )
        return not runs and not there

    until(gone, longest_pause=SERVER_SECONDS, seconds=SECONDS)


def test_a_killed_server_still_knows_who_holds_a_slot(server: Server) -> None:
    """Else the slot is taken for ever, and a deployment with a limit never runs again."""
    held = {"names": ["one-at-a-time"], "slots": 1}
    server.ask("/v2/concurrency_limits/", {"name": "one-at-a-time", "limit": 1})
    lease = server.ask("/v2/concurrency_limits/increment-with-lease", held)["lease_id"]
    local = prefect_server.running_server()
    assert local is not None and local.url == server.url
    os.killpg(local.pid, signal.SIGKILL)
    until(lambda: prefect_server.running_server() is None)
    # On its port again, unless somebody took that meanwhile.
    server.url = prefect_server.start_server().url
    server.environment["PREFECT_API_URL"] = server.url
    until(lambda: prefect_server.is_healthy(server.url), seconds=SECONDS)

    def active() -> Any:
        return server.ask("/v2/concurrency_limits/one-at-a-time")["active_slots"]

    assert active() == 1
    server.ask("/v2/concurrency_limits/decrement-with-lease", {"lease_id": lease})
    assert active() == 0


def test_what_is_committed_is_published(
    server: Server, deployed: dict[str, dict[str, Any]], run: Run
) -> None:
    def automations(*arguments: str) -> None:
        done = server.run("recpoint", "automations", *arguments, "--json")
        assert done.returncode == 0, done.stdout + done.stderr

    automations("apply", "--no-commit", "1h", "--publish", "committed")
    publish(run, build(run, tables(), step=5, generation=1))
    wanted = {"deployments": {"id": {"any_": [deployed["publish/recpoint-publish"]["id"]]}}}

    def flow_runs() -> list[dict[str, Any]] | None:
        found = server.ask("/flow_runs/filter", wanted)
        return [one for one in found if one["parameters"]["run_url"] == run.url] or None

    def made_by_an_event() -> dict[str, Any] | None:
        """Told again: an event is lost on a server that has not loaded its automations yet."""
        event = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "recpoint.checkpoint.committed",
            "resource": {
                "prefect.resource.id": f"recpoint.run.{run.id}",
                "prefect.resource.name": run.url,
            },
        }
        ask(f"{server.url}/events", [event])
        with contextlib.suppress(TimeoutError):
            return until(flow_runs, longest_pause=SERVER_SECONDS, seconds=20)[0]
        return None

    made = until(made_by_an_event, seconds=SECONDS)
    assert made["parameters"] == {"run_url": run.url, "which": "committed"}
    state = server.worked_off(made)
    assert state["type"] == "COMPLETED", state
    record = newest_publication(run)
    assert record is not None and record.checkpoint.step == 5 and not record.held
    automations("remove")
