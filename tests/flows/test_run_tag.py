"""Each flow run has the tag of its run, and its artifacts begin with what differs."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect import State, tags
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import Artifact

from recpoint.catalog.persist.persist import persist_job
from recpoint.catalog.run.run import Run
from recpoint.flows import (
    consolidate,
    drain,
    persist,
    publish,
    publish_to,
    restore,
    retain,
    sweep,
    validate,
)
from recpoint.tasks.job_name import run_tag
from recpoint.tasks.run_tags import tag_flow_run
from tests.job_builder import stage_chain

pytestmark = pytest.mark.usefixtures("prefect_api")

ROOT = Path(__file__).resolve().parents[2]

#: It deletes flow runs of all runs.
OF_NO_RUN = {"forget"}


def called(flow: Any, **parameters: Any) -> State[Any]:
    """The final state of the flow, called as a deployment calls it: with tags of its own alone."""

    async def call() -> State[Any]:
        with tags("recpoint", "of-the-deployment"):
            state: State[Any] = await flow(**parameters, return_state=True)
            return state

    return asyncio.run(call())


def tags_of(state: State[Any]) -> set[str]:
    identity = state.state_details.flow_run_id
    assert identity is not None
    with get_client(sync_client=True) as client:
        return set(client.read_flow_run(identity).tags)


def artifacts_of(run: Run) -> list[Artifact]:
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(like_=f"recpoint-run-{run.id[:12]}-%")
        return client.read_artifacts(artifact_filter=ArtifactFilter(key=key))


def test_flow_runs_have_the_tag_of_their_run(run: Run, tmp_path: Path) -> None:
    staging = str(tmp_path / "staging")
    first, second, third = stage_chain(run, tmp_path / "staging", count=3)
    assert persist_job(first).result == "committed"
    of_run: dict[str, Any] = {"run_url": f"{run.url}/"}
    keep = retain.Keep(last=2, require_validated=False)
    plays = {
        "persist": (persist.persist, {"job_path": str(second)}),
        "drain": (drain.drain, {"staging": staging}),
        "validate": (validate.validate, of_run),
        "publish": (publish.publish, of_run),
        "publish_to": (publish_to.publish_to, {**of_run, "sink_url": f"sqlite:{tmp_path}/served"}),
        "consolidate": (consolidate.consolidate, of_run),
        "restore": (restore.restore, {**of_run, "target": str(tmp_path / "restored")}),
        "sweep": (sweep.sweep, {**of_run, "staging": staging, "dry_run": True}),
        "retain": (retain.retain, {**of_run, "keep": keep, "staging": staging}),
    }
    file = yaml.safe_load((ROOT / "flows" / "prefect.yaml").read_text())
    deployed = {one["entrypoint"].rpartition(":")[2] for one in file["deployments"]}
    assert plays.keys() == deployed - OF_NO_RUN
    states = {name: called(flow, **parameters) for name, (flow, parameters) in plays.items()}
    assert {name: state.type.value for name, state in states.items()} == dict.fromkeys(
        plays, "COMPLETED"
    )
    expected = {"recpoint", "of-the-deployment", run_tag(run.url)}
    assert {name: tags_of(state) for name, state in states.items()} == dict.fromkeys(
        plays, expected
    )
    assert not third.exists()

    # People see the first words of a description in a list. The URL is the same in each of them.
    heads = [str(one.description).partition("`")[0] for one in artifacts_of(run)]
    assert len(heads) >= 6 and len(set(heads)) == len(heads), heads
    assert all(re.search(r"\d", head) for head in heads), heads


def test_without_the_tag_a_flow_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(tag_flow_run("s3://bucket/run"))  # outside a flow run there is nothing to tag
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid4()))  # the server knows none like it
    asyncio.run(tag_flow_run("s3://bucket/run"))
    (record,) = (one for one in caplog.records if one.name == "recpoint.tags")
    assert "may lack the tags run:s3://bucket/run" in record.getMessage()
