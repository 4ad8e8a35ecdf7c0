"""Task: create the manifest of a consolidation whose rows are all in the store."""

from __future__ import annotations

import asyncio
from typing import Literal

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.consolidation.consolidate import commit_consolidation
from recpoint.catalog.consolidation.consolidate_plan import ConsolidationPlan
from recpoint.format.manifest import ChunkEntry, Manifest
from recpoint.tasks.consolidation_task import open_run, task_name
from recpoint.tasks.persist_task import RETRIES, may_heal

__all__ = ["commit_merge"]


@task(
    task_run_name=task_name,
    retry_condition_fn=may_heal,
    timeout_seconds=3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def commit_merge(
    run_url: str, plan: ConsolidationPlan, entries: list[ChunkEntry]
) -> tuple[Literal["created", "already"], Manifest]:
    """Copy the state and commit: whether it was this call that did, and what is there now."""
    return await asyncio.to_thread(_commit, run_url, plan, entries)


def _commit(
    run_url: str, plan: ConsolidationPlan, entries: list[ChunkEntry]
) -> tuple[Literal["created", "already"], Manifest]:
    return commit_consolidation(open_run(run_url), plan, entries)
