"""Events of flows, as a real server has them: the run is their resource."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from recpoint.catalog.persist import persist
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import write_trainer_note
from recpoint.errors import StoreAccessDenied
from recpoint.flows.agent.ended_trainings import tell_ended_trainings
from recpoint.flows.agent.runs import RunState
from recpoint.flows.consolidate import run_consolidate
from recpoint.flows.persist import run_persist
from recpoint.flows.validate import validate
from recpoint.format.naming import ValidationLevel
from recpoint.tasks import reports
from recpoint.testing.faults import Fault, FaultStore
from tests.agent_process import AgentProcess
from tests.catalog_builder import build, publish, tables
from tests.job_builder import stage
from tests.polling import SERVER_SECONDS, until

pytestmark = pytest.mark.usefixtures("prefect_api")


def told(run: Run, *, count: int) -> list[dict[str, Any]]:
    """The run's events, oldest first, once there are `count`."""
    resource = {"id": [f"recpoint.run.{run.id}"]}

    def look() -> list[dict[str, Any]] | None:
        with get_client(sync_client=True) as client:
            body = {"filter": {"resource": resource, "order": "ASC"}, "limit": 50}
            answer = client.request("POST", "/events/filter", json=body)
        found: list[dict[str, Any]] = answer.json()["events"]
        return found if len(found) >= count else None

    found = until(look, longest_pause=SERVER_SECONDS)
    assert {one["resource"]["prefect.resource.name"] for one in found} == {run.url}
    return found


def names(found: list[dict[str, Any]]) -> list[str]:
    return [one["event"].removeprefix("recpoint.checkpoint.") for one in found]


def test_a_job_that_lags_and_is_committed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stage(run, tmp_path / "s", tables(), step=1, generation=1)
    fault = Fault(
        kind="fail", on=frozenset({"put"}), key_contains="state", times=1, error=StoreAccessDenied
    )
    store = FaultStore(run.store, [fault])
    monkeypatch.setattr(persist, "open_store", lambda url, **_: store)
    assert not run_persist(persist.PersistJob.open(path)).state.is_completed()
    assert run_persist(persist.PersistJob.open(path)).state.is_completed()
    lagging, committed = told(run, count=2)
    assert names([lagging, committed]) == ["lagging", "committed"]
    assert lagging["payload"]["error_type"] == "StoreAccessDenied"
    assert committed["payload"]["kind"] == "full" and committed["payload"]["stored_bytes"] > 0
    assert 0 <= committed["payload"]["lag_seconds"]


def test_an_end_is_told_once_also_by_an_agent_that_did_no_job_of_the_run(
    run: Run, tmp_path: Path
) -> None:
    job = stage(run, tmp_path / "s", tables(), step=1, generation=1)
    run_dir = job.parent.parent
    write_trainer_note(StagedRun(run_dir), run.url, "training")
    with AgentProcess(tmp_path / "s", tmp_path / "log") as agent:
        until(lambda: not job.exists())
        assert agent.terminate() == 0
    tell_ended_trainings({StagedRun(run_dir): RunState()})
    write_trainer_note(StagedRun(run_dir), run.url, "ended")
    for _ in range(2):  # agents that were started after its last commit
        tell_ended_trainings({StagedRun(run_dir): RunState()})
    reports.emit("published", run.id, run.url)  # told after all of theirs
    assert names(told(run, count=2)) == ["ended", "published"]


def test_nobody_is_told_of_the_end_of_a_run_that_no_agent_did_a_job_of(
    run: Run, tmp_path: Path
) -> None:
    run_dir = StagedRun.of(tmp_path / "s", run.url).path
    run_dir.mkdir(parents=True)
    write_trainer_note(StagedRun(run_dir), run.url, "ended")
    for damaged in (None, "{", "[]", '{"run": 1, "run_url": "x"}', '{"run_url": "x"}'):
        if damaged is not None:
            (run_dir / "silence.json").write_text(damaged)
        tell_ended_trainings({StagedRun(run_dir): RunState()})
    reports.emit("published", run.id, run.url)
    assert names(told(run, count=1)) == ["published"]


def test_validations_tell_their_result(run: Run, tmp_path: Path) -> None:
    async def validated(level: ValidationLevel = "sample") -> None:
        called: Any = validate(run.url, level=level, return_state=True)
        await called

    job = stage(run, tmp_path / "s", tables(bits=8), step=1, generation=1, samples=20)
    assert persist.persist_job(job).result == "committed"
    asyncio.run(validated("metadata"))  # it stays as it is: nothing is told
    asyncio.run(validated())
    entry = next(e for e in run.manifest(1, 1).chunks if e.content == "rows")
    run.store.put(entry.key, run.store.get(entry.key, max_bytes=1 << 20)[:-1] + b"x")
    asyncio.run(validated())
    passed, failed = told(run, count=2)
    assert names([passed, failed]) == ["validated", "validation_failed"]
    assert passed["payload"]["level"] == "sample"
    assert passed["payload"]["result"] == "passed" and failed["payload"]["result"] == "failed"
    assert "crc32c" in failed["payload"]["first_finding"]


def test_a_consolidation_tells_its_new_length(run: Run) -> None:
    trained = tables(bits=4)
    full = publish(run, build(run, trained, step=1, generation=1))
    dirty = [torch.arange(0, 40, 3), torch.arange(0, 20, 2)]
    newer = build(run, trained, step=2, generation=1, parent=full, dirty=dirty, state={"step": 2})
    publish(run, newer)
    assert run_consolidate(run.url).is_completed()
    (event,) = told(run, count=1)
    assert names([event]) == ["consolidated"]
    assert (event["payload"]["step"], event["payload"]["kind"]) == (2, "full")


def test_without_an_api_nothing_is_handed_to_prefect(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect would start a server for it."""
    sent: list[str] = []
    monkeypatch.setattr(reports, "emit_event", lambda event, **rest: sent.append(event))
    with temporary_settings({PREFECT_API_URL: None}):
        reports.emit("committed", run.id, run.url, step=1)
    assert sent == []
    reports.emit("committed", run.id, run.url, step=1)
    assert sent == ["recpoint.checkpoint.committed"]
