"""The flow `persist` against a real Prefect server: what is done, and what is to be seen of it."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from prefect import State, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterTags,
    TaskRunFilter,
)
from prefect.client.schemas.objects import Artifact, FlowRun, TaskRun
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_URL, get_current_settings

from recpoint.catalog.check.check import check
from recpoint.catalog.persist import persist, plan
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run.run import Run
from recpoint.catalog.staging import cancels, job_files
from recpoint.catalog.staging.agent_lock import AgentLock, at_work
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import Store
from recpoint.errors import RecpointError, StoreAccessDenied, StoreThrottled, StoreUnavailable
from recpoint.flows.agent.gate import PrefectGate
from recpoint.flows.agent.persist import AgentPersist
from recpoint.flows.agent.runs import RunState
from recpoint.flows.persist import end_flow_run, run_persist
from recpoint.flows.persist import persist as persist_flow
from recpoint.format.job import Outcome
from recpoint.tasks import reports
from recpoint.tasks.job_name import job_log
from recpoint.testing.faults import Fault, FaultStore
from tests.catalog_builder import new_run, tables
from tests.interposed_store import InterposedStore
from tests.job_builder import Links, stage
from tests.polling import SERVER_SECONDS, until
from tests.rank_jobs import RankJobs

pytestmark = pytest.mark.usefixtures("prefect_api")


def flow_runs(place: Path | str, *tags: str) -> list[FlowRun]:
    """Those with all these tags, the newest first.

    Other tests give their flows the same tags on the same server, and parameters of other places.
    """
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(tags=FlowRunFilterTags(all_=list(tags)))
        newest = FlowRunSort.EXPECTED_START_TIME_DESC
        found = client.read_flow_runs(flow_run_filter=chosen, sort=newest)
    return [one for one in found if str(place) in str(one.parameters)]


def task_runs(flow_run: FlowRun, *, count: int = 1, last: str = "") -> list[TaskRun]:
    """At least `count` task runs, one of which is named `last …`; all final.

    They reach the server a moment after the flow, one by one: they are sent as events.
    """
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter.model_validate({"id": {"any_": [flow_run.id]}})

        def final() -> list[TaskRun] | None:
            found = client.read_task_runs(
                flow_run_filter=chosen, task_run_filter=TaskRunFilter(), limit=200
            )
            done = [run for run in found if run.state and run.state.is_final()]
            there = len(found) >= count and any(run.name.startswith(last) for run in found)
            return found if there and len(done) == len(found) else None

        return until(final, longest_pause=SERVER_SECONDS)


def artifacts(prefix: str) -> list[Artifact]:
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(key=ArtifactFilterKey(like_=f"{prefix}%"))
        return client.read_artifacts(artifact_filter=chosen)


def assert_nothing_is_stored_of(state: State[Any], flow_run: FlowRun) -> None:
    """No file with its result anywhere that Prefect may put one, and no artifact of it."""
    data: Any = state.data  # Prefect does not export its type
    key = Path(data.metadata.storage_key)
    places = [key.parent, Path.cwd(), Path(tempfile.gettempdir())]
    places.append(get_current_settings().results.local_storage_path)
    assert [place for place in places if (place / key.name).exists()] == []
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        assert client.read_artifacts(artifact_filter=chosen) == []
        told = client.read_flow_run(flow_run.id).state
    assert told is not None and told.data is None and "exception" in str(told.message)


def test_a_job_is_committed_and_everything_carries_its_name(run: Run, tmp_path: Path) -> None:
    links = Links()
    url_name = Path(run.url).name
    for step in (1, 2):
        dirty = None if step == 1 else [torch.tensor([3]), torch.tensor([4])]
        path = stage(
            run,
            tmp_path / "named",
            tables(bits=4),
            step=step,
            generation=1,
            links=links,
            dirty=dirty,
            state={"w": torch.ones(9)},
        )
        assert run_persist(persist.PersistJob.open(path)).state.is_completed()
        assert not path.exists()
        answer = job_files.read_outcome(path.parent.parent / "outcomes" / path.name)
        assert answer.result == "committed"
    assert check(run, level="full").ok
    (flow_run,) = flow_runs(tmp_path, f"run:{run.url}", "step:2", "rank:0")
    assert flow_run.name == f"persist {url_name} step 2 rank 0"
    assert flow_run.state is not None and flow_run.state.is_completed()
    names = {task_run.name for task_run in task_runs(flow_run, count=5)}
    of = f"of {url_name} step 2 rank 0"
    assert names == {
        f"quantize group 0 {of}",
        f"encode group 0 {of}",
        f"upload group 0 {of}",
        f"commit {of}",
        f"report {of}",
    }
    ours = f"recpoint-{url_name}-{run.id[:12]}-"
    shown = {artifact.key: artifact for artifact in artifacts(ours)}
    table = shown[f"{ours}g1-step-2-r0"]
    assert table.type == "table" and "increment (chain of 2)" in str(table.data)
    lag = shown[f"{ours}r0-lag"]
    assert str(lag.data).lstrip('"').startswith("Step 2 of") and "batches" in str(lag.data)
    assert "behind at step 2, rank 0: `" in str(lag.description)
    assert len(artifacts(f"{ours}r0-lag")) == 1  # brought up to date in place


def test_runs_of_one_name_show_what_is_theirs(run: Run, tmp_path: Path) -> None:
    other = new_run(tmp_path / "elsewhere" / Path(run.url).name)
    other.claim(None)
    for one in (run, other):
        path = stage(one, tmp_path / "staging", tables(), step=1, generation=1)
        assert run_persist(persist.PersistJob.open(path)).state.is_completed()
    for one in (run, other):
        shown = artifacts(f"recpoint-{Path(run.url).name}-{one.id[:12]}-")
        assert {artifact.type for artifact in shown} == {"table", "markdown"} and len(shown) == 2
        assert all(one.url in str(artifact.description) for artifact in shown)
        assert len(flow_runs(tmp_path, f"run:{one.url}")) == 1


def test_groups_without_quantized_tables_have_no_quantize_task(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 400)
    monkeypatch.setattr(plan, "GROUP_BYTES", 900)
    path = stage(run, tmp_path / "groups", tables(rows=120), step=3, generation=1)
    groups = len(persist.PersistJob.open(path).groups)
    assert groups > 2
    assert run_persist(persist.PersistJob.open(path)).state.is_completed()
    (flow_run,) = flow_runs(tmp_path, "step:3")
    count = 2 * groups + 2  # and the commit and the report
    names = [task_run.name.split(" ")[0] for task_run in task_runs(flow_run, count=count)]
    assert sorted(names) == ["commit", *["encode"] * groups, "report", *["upload"] * groups]
    assert check(run, level="full").ok


def test_a_long_persist_shows_how_far_it_is(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", 400)
    monkeypatch.setattr(plan, "GROUP_BYTES", 900)
    monkeypatch.setattr(reports, "_EVERY_SECONDS", 0.0)
    path = stage(run, tmp_path / "long", tables(rows=120), step=8, generation=1)
    assert run_persist(persist.PersistJob.open(path)).state.is_completed()
    url_name = Path(run.url).name
    key = f"recpoint-{url_name}-{run.id[:12]}-g1-step-8-r0-persist-progress"
    (bar,) = until(
        lambda: [one for one in artifacts(key) if float(str(one.data)) == 100.0] or None,
        longest_pause=SERVER_SECONDS,
    )
    assert bar.type == "progress" and bar.flow_run_id == flow_runs(tmp_path, "step:8")[0].id
    assert len(artifacts(key)) == 1


def test_a_rejected_job_is_a_failed_run_that_says_why(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "rejected", tables(), step=4, generation=1)
    run.claim(None)
    assert run_persist(persist.PersistJob.open(path)).state.is_failed()
    assert not path.exists()
    answer = job_files.read_outcome(path.parent.parent / "outcomes" / path.name)
    assert (answer.result, answer.error_type) == ("rejected", "StaleWriter")
    (flow_run,) = flow_runs(tmp_path, "step:4")
    assert flow_run.state is not None and "StaleWriter" in str(flow_run.state.message)


def test_a_job_that_the_trainer_wants_dropped_is_no_failed_run(run: Run, tmp_path: Path) -> None:
    staging = tmp_path / "dropped"
    path = stage(run, staging, tables(), step=7, generation=1)
    cancels.write_mark(StagedRun.of_job(path), job_files.read_job(path).ref, 0)
    state = run_persist(persist.PersistJob.open(path)).state
    assert state.is_completed() and state.name == "Dropped"
    assert not path.exists() and run.manifest_names() == []
    answer = StagedRun.of(staging, run.url).outcome_path(1, 7, 0)
    assert job_files.read_outcome(answer).error_type == "CheckpointCancelled"


@pytest.mark.parametrize(
    ("error", "times", "runs", "committed"),
    [
        (StoreUnavailable, 1, 2, True),
        (StoreThrottled, 1, 2, True),
        (StoreAccessDenied, 1, 1, False),
    ],
)
def test_tasks_are_run_again_for_what_may_heal_only(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[StoreUnavailable | StoreThrottled | StoreAccessDenied],
    times: int,
    runs: int,
    committed: bool,
) -> None:
    fault = Fault(
        kind="fail", on=frozenset({"put"}), key_contains="state", times=times, error=error
    )
    store: Store = FaultStore(run.store, [fault])
    monkeypatch.setattr(persist, "open_store", lambda url, **_: store)
    step = 100 + len(error.__name__)
    path = stage(run, tmp_path / "retried", tables(), step=step, generation=1)
    tried = run_persist(persist.PersistJob.open(path))
    assert tried.state.is_completed() is committed and path.exists() is not committed
    (flow_run,) = flow_runs(tmp_path, f"step:{step}")
    assert tried.flow_run == flow_run.id
    assert tried.error is None if committed else isinstance(tried.error, error)
    found = task_runs(flow_run, last="upload")
    (upload,) = [task_run for task_run in found if task_run.name.startswith("upload")]
    assert upload.run_count == runs


def test_a_flow_called_again_for_a_finished_job_does_no_harm(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "twice", tables(), step=7, generation=1)
    job = persist.PersistJob.open(path)
    assert run_persist(job).state.is_completed()
    assert not run_persist(job).state.is_completed()
    assert check(run, level="full").ok


def test_an_agent_tries_again_with_the_same_flow_run(run: Run, tmp_path: Path) -> None:
    """And so does the next agent, which has to look for it."""
    path = stage(run, tmp_path / "again", tables(), step=12, generation=1)
    job = persist.PersistJob.open(path)
    os.rename(tmp_path / "run", tmp_path / "away")
    tried = run_persist(job)
    assert tried.state.name == "AwaitingRetry" and isinstance(tried.error, RecpointError)
    assert "no run.json" in str(tried.state.message)
    once_more = run_persist(persist.PersistJob.open(path), flow_run=tried.flow_run)
    assert once_more.state.name == "AwaitingRetry" and once_more.flow_run == tried.flow_run
    os.rename(tmp_path / "away", tmp_path / "run")
    last = run_persist(persist.PersistJob.open(path), tried_before=True)
    assert last.state.is_completed() and last.error is None and not path.exists()
    (flow_run,) = flow_runs(tmp_path, "step:12")
    assert (flow_run.id, flow_run.run_count) == (tried.flow_run, 3)
    assert flow_run.state is not None and flow_run.state.is_completed()


def test_a_flow_run_that_somebody_deleted_is_made_anew(run: Run, tmp_path: Path) -> None:
    path = stage(run, tmp_path / "deleted", tables(), step=13, generation=1)
    os.rename(tmp_path / "run", tmp_path / "away")
    tried = run_persist(persist.PersistJob.open(path))
    os.rename(tmp_path / "away", tmp_path / "run")
    assert tried.flow_run is not None
    with get_client(sync_client=True) as client:
        client.delete_flow_run(tried.flow_run)
    last = run_persist(persist.PersistJob.open(path), flow_run=tried.flow_run)
    assert last.state.is_completed() and last.flow_run != tried.flow_run


@pytest.mark.parametrize(
    ("result", "error_type", "name"),
    [
        ("committed", "", "Completed"),
        ("rejected", "StaleWriter", "Failed"),
        ("rejected", "CheckpointCancelled", "Dropped"),
    ],
)
def test_a_flow_run_ends_though_its_job_was_answered_without_it(
    run: Run, tmp_path: Path, result: Literal["committed", "rejected"], error_type: str, name: str
) -> None:
    step = 14 + len(error_type)
    path = stage(run, tmp_path / "bare", tables(), step=step, generation=1)
    os.rename(tmp_path / "run", tmp_path / "away")
    tried = run_persist(persist.PersistJob.open(path))
    assert tried.flow_run is not None
    outcome = Outcome.model_construct(result=result, error_type=error_type, error="why")
    end_flow_run(tried.flow_run, outcome)
    (flow_run,) = flow_runs(tmp_path, f"step:{step}")
    assert flow_run.state_name == name


def test_an_agent_ends_the_flow_run_of_a_job_that_it_stored_without_prefect(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the next job comes at once."""
    staging = tmp_path / "two"
    first, second = (
        stage(run, staging, tables(), step=step, generation=1, slot=step - 80) for step in (81, 82)
    )
    monkeypatch.setenv("PREFECT_API_URL", str(PREFECT_API_URL.value()))
    gate = PrefectGate(enabled=True)
    gate.start()
    try:
        until(gate.persist_flow)
        agent, state = AgentPersist(gate), RunState()
        os.rename(tmp_path / "run", tmp_path / "away")
        with pytest.raises(RecpointError, match="no run.json"):
            agent.persist(first, persist.PersistJob.open(first), state, job_log(str(first)))
        assert state.awaits is not None and state.awaits.job_file == first
        os.rename(tmp_path / "away", tmp_path / "run")
        assert persist.persist_job(first).result == "committed"
        agent.persist(second, persist.PersistJob.open(second), state, job_log(str(second)))
        assert state.awaits is None
        for step in (81, 82):

            def completed(step: int = step) -> bool:
                (flow_run,) = flow_runs(tmp_path, f"step:{step}")
                return flow_run.state_name == "Completed"

            until(completed, longest_pause=SERVER_SECONDS)
    finally:
        gate.stop()


def test_without_an_agent_a_job_that_cannot_be_stored_now_is_a_failed_run(
    run: Run, tmp_path: Path
) -> None:
    """Nobody tries again, so that whoever asked for it has to see it."""
    path = stage(run, tmp_path / "asked", tables(), step=60, generation=1)
    os.rename(tmp_path / "run", tmp_path / "away")

    async def asked_for() -> State[Any]:
        with tags("step:60"):
            called: Any = persist_flow(str(path), return_state=True)
            state: State[Any] = await called
            return state

    state = asyncio.run(asked_for())
    assert isinstance(state.result(raise_on_failure=False), RecpointError)
    (flow_run,) = flow_runs(tmp_path, "step:60")
    assert_nothing_is_stored_of(state, flow_run)


def test_with_several_ranks_the_last_flow_commits_and_no_flow_fails(
    run: Run, tmp_path: Path
) -> None:
    trained = tables()
    jobs = RankJobs(run, [tmp_path / "host-a", tmp_path / "host-b"], trained)
    first, last = jobs.stage(11)
    state = run_persist(persist.PersistJob.open(first)).state
    assert state.is_completed() and state.name == "Waiting" and first.exists()
    assert state.message == "stored, waits for rank 1"
    for path in (last, first):
        assert run_persist(persist.PersistJob.open(path)).state.name == "Completed"
    assert not first.exists() and not last.exists()
    target = MemoryTarget()
    restore(run, target)
    assert torch.equal(target.tables["items"].values, trained[0].values)
    assert len(flow_runs(tmp_path, "step:11")) == 3


def test_what_is_no_job_file_is_a_failed_run_that_says_so() -> None:
    """Not one that crashed: whoever starts it sees the cause in the run itself."""
    for number, path in enumerate(("", "/", f"{'x' * 5000}.json", "jobs/00000001-1-r0.json")):

        async def call(path: str = path, number: int = number) -> State[Any]:
            with tags(f"no-job:{number}"):
                called: Any = persist_flow(path, return_state=True)
                state: State[Any] = await called
                return state

        state = asyncio.run(call())
        assert state.is_failed() and "expected the path of a staged job" in str(state.message)
        (flow_run,) = flow_runs(path[-200:], f"no-job:{number}")
        assert flow_run.name == f"persist {path[-200:]}"


def test_asked_for_beside_an_agent_it_leaves_the_job_to_that_one(run: Run, tmp_path: Path) -> None:
    """Each would truncate and remove what the other has encoded."""

    async def asked_for(path: Path) -> State[Any]:
        called: Any = persist_flow(str(path), return_state=True)
        state: State[Any] = await called
        return state

    path = stage(run, tmp_path / "staging", tables(), step=1, generation=1)
    (spooled := StagedRun(path.parent.parent).spool_directory / path.stem).mkdir(parents=True)
    (spooled / "of the agent").write_text("encoded")
    with AgentLock(tmp_path / "staging"):
        refused = asyncio.run(asked_for(path))
    assert refused.is_failed() and "an agent" in str(refused.message)
    assert "use the agent that runs, or stop it first" in str(refused.message)
    assert path.exists() and [one.name for one in spooled.iterdir()] == ["of the agent"]
    assert asyncio.run(asked_for(path)).is_completed() and not path.exists()
    assert at_work(tmp_path / "staging") is None


def test_a_flow_that_is_cancelled_leaves_its_job_and_begins_no_step_any_more(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads, go_on = threading.Event(), threading.Event()

    def before(call: str, key: str) -> None:
        if key.startswith("chunks/") and not uploads.is_set():
            uploads.set()
            go_on.wait()

    store = InterposedStore(run.store, before=before)
    monkeypatch.setattr(persist, "open_store", lambda url, **_: store)
    path = stage(run, tmp_path / "staging", tables(), step=1, generation=1)

    def driven() -> bool:
        return any(thread.name.startswith("persist_") for thread in threading.enumerate())

    async def cancelled() -> None:
        called: Any = asyncio.ensure_future(persist_flow(str(path), return_state=True))
        await asyncio.to_thread(uploads.wait)
        assert driven()
        called.cancel()
        try:
            await asyncio.to_thread(until, lambda: not driven())
        finally:
            go_on.set()
        await asyncio.wait([called])

    asyncio.run(cancelled())
    assert path.exists() and run.manifest_names() == []
    assert persist.persist_job(path).result == "committed"
