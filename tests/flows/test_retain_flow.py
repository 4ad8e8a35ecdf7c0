"""The flow `retain`: what no rule keeps is marked, then deleted, and the plan is there to see."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prefect import State
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ParameterTypeError
from pydantic import ValidationError

from recpoint.catalog.check.check import check
from recpoint.catalog.run import pins
from recpoint.catalog.run.run import Run
from recpoint.errors import SettingsError
from recpoint.flows.retain import Best, Keep, retain
from recpoint.format.naming import EXPIRED_KEY, MANIFEST_KEY, PLAN_KEY, ManifestName
from tests.catalog_builder import build, publish, tables

pytestmark = pytest.mark.usefixtures("prefect_api")


def shown(run: Run) -> list[Any]:
    """The retention artifacts, oldest first."""
    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(any_=[f"recpoint-run-{run.id[:12]}-retention"])
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    return sorted(found, key=lambda artifact: str(artifact.created))


def retained(run: Run, keep: Keep, *, staging: str) -> State[Any]:
    """The state that the flow ends in."""

    async def call() -> State[Any]:
        called: Any = retain(run.url, keep, staging=staging, return_state=True)
        state: State[Any] = await called
        return state

    return asyncio.run(call())


def test_a_plan_is_shown_and_carried_out(run: Run, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        publish(run, build(run, tables(), step=step, generation=1))
    pins.pin(run, ManifestName(2, 1), label="release")
    staging = str(tmp_path / "staging")
    before = {info.key for info in run.store.list()}

    refused = retained(run, Keep(last=1), staging=staging)
    # Nothing has failed, and nobody need look: the first validation ends it.
    assert (refused.type, refused.name) == (StateType.COMPLETED, "Refused")
    assert "no validated checkpoint" in (refused.message or "")
    assert shown(run) == []
    keep = Keep(last=1, require_validated=False)
    asyncio.run(retain(run.url, keep, staging=staging, dry_run=True))
    assert {info.key for info in run.store.list()} == before
    told = retained(run, keep, staging=staging)
    assert told.name == "Completed" and "1 marked" in (told.message or "")
    new = {info.key for info in run.store.list()} - before
    assert new == {EXPIRED_KEY.of(MANIFEST_KEY.of(1, 1)), PLAN_KEY}
    assert check(run, level="full").ok

    dry, real = shown(run)
    assert "(dry run)" in dry.description and "1 marked" in real.description
    rows = json.loads(real.data)
    assert [(row["step"], row["action"]) for row in rows] == [
        (1, "mark"),
        (3, "keep"),
        (2, "keep"),
    ]
    assert rows[2]["reason"] == "pinned (release)"


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    staging = str(tmp_path / "staging")
    with pytest.raises(SettingsError, match="no rule"):
        asyncio.run(retain(run.url, Keep(), staging=staging))
    with pytest.raises(ParameterTypeError, match="grace_seconds"):
        asyncio.run(retain(run.url, Keep(last=1), grace_seconds=60, staging=staging))
    with pytest.raises(ValidationError):
        Keep(last=-1)
    best = Keep(best=[Best(metric="auc", direction="max")])
    assert best.policy().best_by[0].metric == "auc"
    assert retain.parameters.model_dump()["properties"].keys() >= {"keep", "grace_seconds"}
