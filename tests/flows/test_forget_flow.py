"""The flow `forget`: our old flow runs go with their artifacts, and nothing that is not ours."""

from __future__ import annotations

import asyncio
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import State, flow, tags
from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
)
from prefect.exceptions import ParameterTypeError
from prefect.runtime import flow_run
from prefect.settings import get_current_settings
from prefect.states import Scheduled

from recpoint.flows import forget as module
from recpoint.flows.forget import forget
from recpoint.flows.parameters import NO_RESULTS

pytestmark = pytest.mark.usefixtures("prefect_api")

MADE = ("recpoint-forgotten-lag", "recpoint-forgotten-g1-step-2-r0", "forgotten-elsewhere")


@flow(name="forgotten", persist_result=False, result_storage=NO_RESULTS)
async def made() -> UUID:
    """A flow run with artifacts of ours, and one that an evaluation made."""
    async with get_client() as client:
        for key in MADE:
            await Artifact(type="markdown", key=key, data="x").acreate(client)
    return UUID(flow_run.get_id())


def make(*names: str) -> UUID:
    with tags(*names):
        called: Any = made()
        identity: UUID = asyncio.run(called)
    return identity


def raised(directory: Path, *names: str) -> UUID:
    """A flow run that raised, whose exception Prefect has stored, and told the server where."""

    @flow(name="forgotten", persist_result=False, result_storage=directory)
    async def raising() -> None:
        raise ValueError("x")

    async def call() -> State[Any]:
        called: Any = raising(return_state=True)
        state: State[Any] = await called
        return state

    with tags(*names):
        identity = asyncio.run(call()).state_details.flow_run_id
    assert identity is not None and len(without_key([identity])) == 1
    return identity


def without_key(runs: list[UUID]) -> list[UUID]:
    """Artifacts of the runs that nothing can be found by."""
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=runs), key=ArtifactFilterKey(exists_=False)
        )
        return [one.id for one in client.read_artifacts(artifact_filter=chosen)]


def age(runs: list[UUID], **ago: float) -> None:
    """Let the runs have ended so long ago: the server takes no such time from a client."""
    url = get_current_settings().server.database.connection_url
    assert url is not None
    path = url.get_secret_value().partition("///")[2]
    ended = (datetime.now(UTC) - timedelta(**ago)).strftime("%Y-%m-%d %H:%M:%S.%f")
    with sqlite3.connect(path, timeout=240) as database:
        for run in runs:
            changed = database.execute(
                "UPDATE flow_run SET end_time = ? WHERE id = ?", (ended, str(run))
            )
            assert changed.rowcount == 1
    database.close()


def there(runs: list[UUID]) -> tuple[set[UUID], list[str]]:
    """Which of the runs are left, and the keys of artifacts that are."""
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter.model_validate({"id": {"any_": runs}})
        left = {run.id for run in client.read_flow_runs(flow_run_filter=chosen)}
        keys = ArtifactFilter(key=ArtifactFilterKey(any_=list(MADE)))
        artifacts = client.read_artifacts(artifact_filter=keys)
    return left, sorted(str(one.key) for one in artifacts if one.flow_run_id in runs)


def forgot(**parameters: float) -> Any:
    async def call() -> Any:
        called: Any = forget(**parameters, return_state=True)
        return await called

    return asyncio.run(call())


def test_old_runs_of_ours_go_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 2)  # several pages
    old = [make("recpoint", f"step:{step}") for step in range(3)]
    young, foreign = make("recpoint"), make("somebody-else")
    age([*old, foreign], days=2)
    age([young], hours=20)

    assert forgot(older_than_days=1).message == "3 flow runs and 6 artifacts deleted"
    left, artifacts = there([*old, young, foreign])
    assert left == {young, foreign}
    # What an evaluation made in a flow run of ours is its own.
    assert artifacts == sorted([*2 * MADE, *3 * MADE[2:]])
    assert forgot(older_than_days=1).message == "0 flow runs and 0 artifacts deleted"


def test_what_is_left_of_runs_that_raised_goes_with_them(tmp_path: Path) -> None:
    old, foreign = raised(tmp_path, "recpoint"), raised(tmp_path, "somebody-else")
    age([old, foreign], days=2)
    assert forgot(older_than_days=1).message == "1 flow runs and 1 artifacts deleted"
    assert there([old, foreign])[0] == {foreign}
    assert without_key([old]) == [] and len(without_key([foreign])) == 1


def late(tag: str, **ago: float) -> UUID:
    """A run that a worker should have begun so long ago."""
    when = datetime.now(UTC) - timedelta(**ago)
    with get_client(sync_client=True) as client:
        run = client.create_flow_run(made, state=Scheduled(scheduled_time=when), tags=[tag])
        return run.id


def test_runs_that_no_worker_ever_took_go_too() -> None:
    gone = late("recpoint", days=2)
    kept = [late("recpoint", hours=20), late("recpoint", days=-1), late("somebody-else", days=2)]
    assert forgot(older_than_days=1).message == "1 flow runs and 0 artifacts deleted"
    left, _ = there([gone, *kept])
    assert left == set(kept)


def test_what_has_just_ended_is_never_forgotten() -> None:
    for days in (0, -1, 0.01, float("nan")):
        with pytest.raises(ParameterTypeError, match="older_than_days"):
            forget.validate_parameters({"older_than_days": days})
