"""The flow `publish`: what it chooses, that a rolled-back version stays, and what is shown."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from recpoint import Follower
from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.run.publications import newest_publication
from recpoint.catalog.run.run import Run
from recpoint.errors import NothingToRestore, ObjectNotFound, RetentionRefused
from recpoint.flows.publish import publish
from tests.catalog_builder import tables
from tests.consolidation import name_of, spoil, trained

pytestmark = pytest.mark.usefixtures("prefect_api")


def message(run: Run, **parameters: Any) -> str:
    """Return what the flow says; raise what it raises."""

    async def once() -> str:
        state = await publish(run.url, return_state=True, **parameters)
        await state.aresult()
        return str(state.message)

    return asyncio.run(once())


def published(run: Run) -> int | None:
    found = newest_publication(run)
    return None if found is None else found.checkpoint.step


def test_publishes_holds_and_releases(run: Run) -> None:
    made = trained(run, tables(), [1, 2, 3])
    follower = Follower(run.url, channel="published")
    with pytest.raises(NothingToRestore):
        message(run, which="validated")
    record(run, validate(run, name_of(made[1]), level="sample"))
    assert "publication 1" in message(run, which="validated")
    assert published(run) == 2
    assert "publication 2" in message(run)
    assert follower.poll() and follower.version == 3

    assert "publication 3" in message(run, step=1, why="3 is bad")
    assert follower.poll() and follower.version == 1
    trained(run, tables(seed=3), [9])
    assert message(run).startswith("nothing changed: publication 3")
    assert "3 is bad" in message(run)
    assert published(run) == 1
    assert "publication 4" in message(run, release=True)
    assert follower.poll() and follower.version == 9
    with pytest.raises(NothingToRestore, match="step 7"):
        message(run, step=7)
    with pytest.raises(ObjectNotFound):
        message(run, step=7, generation=1)

    with get_client(sync_client=True) as client:
        key = ArtifactFilterKey(any_=[f"recpoint-run-{run.id[:12]}-published"])
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=key))
    newest = max(found, key=lambda artifact: str(artifact.created))
    assert len(found) == 4
    rows = json.loads(str(newest.data))
    assert [(row["step"], row["held"]) for row in rows] == [(9, False), (1, True)]


def test_a_hold_and_a_failed_validation_are_overridden_by_who_says_so(run: Run) -> None:
    made = trained(run, tables(), [1, 2, 3])
    message(run, step=2)
    with pytest.raises(RetentionRefused, match="held by"):
        message(run, step=1)
    spoil(run, made[1])
    assert message(run).endswith("although validation 1 found wrong or damaged rows")
    with pytest.raises(RetentionRefused, match="validation 1"):
        message(run, step=3, release=True)
    forced = message(run, step=3, release=True, force=True)
    assert "publication 2" in forced and "although validation 1 of step 2" in forced
    assert published(run) == 3
