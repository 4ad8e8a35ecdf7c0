"""Deletes recpoint's old flow runs and their artifacts from Prefect as a flow.

They would pile up otherwise. So would flow runs that a schedule makes for a host that is gone: they
stay late for ever. The catalog has everything that must be kept. If the server deletes old runs
itself, as the local one does, this flow has nothing to do.
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

#: At least an hour, because people look at runs that have just ended.
Days = Annotated[float, Field(ge=1 / 24, le=3660, allow_inf_nan=False)]


@flow(
    name="forget",
    timeout_seconds=6 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def forget(older_than_days: Days = 3.0) -> State[Any]:
    """Delete old flow runs with the tag `recpoint`, and the artifacts that they made.

    Also deletes flow runs that were scheduled long ago and never began, because no worker took
    them. Flow runs without the tag are left alone.

    Args:
        older_than_days: age in days since the flow run ended, or, if it never began, since its
            scheduled start.

    Returns:
        Completed; its message says how many flow runs and artifacts were deleted.
    """
    end_time = datetime.now(UTC) - timedelta(days=older_than_days)
    runs = artifacts = 0
    async with get_client() as client:
        while page := await _over_before(client, end_time):
            artifacts += await _delete_artifacts(client, page)
            await _each(client.delete_flow_run, page)
            runs += len(page)
            _LOG.info("%d flow runs and %d artifacts deleted", runs, artifacts)
    return Completed(message=f"{runs} flow runs and {artifacts} artifacts deleted")


async def _over_before(client: PrefectClient, end_time: datetime) -> list[UUID]:
    """Return a page of runs that ended before a time, or else of runs due before it, not begun."""
    own_runs, time_bound = FlowRunFilterTags(all_=[TAG]), {"before_": end_time}
    for chosen in (
        FlowRunFilter(tags=own_runs, end_time=FlowRunFilterEndTime.model_validate(time_bound)),
        FlowRunFilter(
            tags=own_runs,
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
            expected_start_time=FlowRunFilterExpectedStartTime.model_validate(time_bound),
        ),
    ):
        runs = await client.read_flow_runs(
            flow_run_filter=chosen, sort=FlowRunSort.START_TIME_ASC, limit=_PAGE
        )
        if runs:
            return [run.id for run in runs]
    return []


async def _delete_artifacts(client: PrefectClient, runs: list[UUID]) -> int:
    """Delete recpoint's artifacts of these flow runs, but not those of a user's evaluation.

    Also deletes artifacts without a key. Prefect made them for results of failed runs of older
    recpoint versions.

    Returns:
        Number of artifacts deleted.
    """
    count = 0
    for key in (ArtifactFilterKey(like_=f"{ARTIFACT_PREFIX}%"), ArtifactFilterKey(exists_=False)):
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=runs), key=key)
        while page := await client.read_artifacts(artifact_filter=chosen, limit=_PAGE):
            await _each(client.delete_artifact, [artifact.id for artifact in page])
            count += len(page)
    return count


async def _each(delete: Callable[[UUID], Coroutine[Any, Any, object]], ids: Iterable[UUID]) -> None:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(identity: UUID) -> None:
        async with places:
            try:
                await delete(identity)
            except ObjectNotFound:
                pass  # deleted by somebody else

    await asyncio.gather(*(one(identity) for identity in ids))
