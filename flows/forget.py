"""Flow: delete our flow runs that ended long ago, with their artifacts: they would pile up.

So would those that a schedule made for a host which is gone: they are late for ever.

What must be kept is in the catalog. A server that vacuums by itself, as the local one does, leaves
nothing to do here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

from prefect import State, flow
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterExpectedStartTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.exceptions import ObjectNotFound
from prefect.states import Completed
from pydantic import Field

from recpoint.flows.parameters import NO_RESULTS
from recpoint.tasks.reports import ARTIFACT_PREFIX, TAG

__all__ = ["forget"]


_LOG = logging.getLogger("recpoint.forget")

_PAGE = 200
_AT_ONCE = 8

#: An hour at least: what has just ended is looked at.
Days = Annotated[float, Field(ge=1 / 24, le=3660, allow_inf_nan=False)]


@flow(
    name="forget",
    timeout_seconds=6 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def forget(older_than_days: Days = 3.0) -> State[Any]:
    """Delete flow runs tagged `recpoint` that ended so long ago, and the artifacts they made.

    Also those that should have begun so long ago and never did, since no worker took them.

    Args:
        older_than_days: by the time that Prefect recorded for the end of a run, or planned for the
            beginning of one that never began.

    Returns:
        Completed; its message says how many went. Flow runs of others are never looked at.
    """
    before = datetime.now(UTC) - timedelta(days=older_than_days)
    runs = artifacts = 0
    async with get_client() as client:
        while page := await _over_before(client, before):
            artifacts += await _delete_artifacts(client, page)
            await _each(client.delete_flow_run, page)
            runs += len(page)
            _LOG.info("%d flow runs and %d artifacts deleted", runs, artifacts)
    return Completed(message=f"{runs} flow runs and {artifacts} artifacts deleted")


async def _over_before(client: PrefectClient, before: datetime) -> list[UUID]:
    """A page of runs that ended before that time; when there are none, of those never begun."""
    ours, until = FlowRunFilterTags(all_=[TAG]), {"before_": before}
    for chosen in (
        FlowRunFilter(tags=ours, end_time=FlowRunFilterEndTime.model_validate(until)),
        FlowRunFilter(
            tags=ours,
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime.model_validate(until),
        ),
    ):
        found = await client.read_flow_runs(
            flow_run_filter=chosen, sort=FlowRunSort.START_TIME_ASC, limit=_PAGE
        )
        if found:
            return [run.id for run in found]
    return []


async def _delete_artifacts(client: PrefectClient, runs: list[UUID]) -> int:
    """Those of ours that the runs made: an evaluation may have made some of its own.

    And those without a key, which Prefect makes of results: a run of an older recpoint that raised
    has one.
    """
    count = 0
    for key in (ArtifactFilterKey(like_=f"{ARTIFACT_PREFIX}%"), ArtifactFilterKey(exists_=False)):
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=runs), key=key)
        while page := await client.read_artifacts(artifact_filter=chosen, limit=_PAGE):
            await _each(client.delete_artifact, [one.id for one in page])
            count += len(page)
    return count


async def _each(delete: Callable[[UUID], Coroutine[Any, Any, object]], ids: Iterable[UUID]) -> None:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(identity: UUID) -> None:
        async with places:
            try:
                await delete(identity)
            except ObjectNotFound:
                pass  # somebody else was at it too

    await asyncio.gather(*(one(identity) for identity in ids))
