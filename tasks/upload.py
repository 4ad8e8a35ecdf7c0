"""Task: write the chunks of one encoded group to the store."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.persisting.persist import upload_step
from recpoint.tasks.persist_task import RETRIES, may_heal, run_name

__all__ = ["upload"]


@task(
    task_run_name=run_name,
    retry_condition_fn=may_heal,
    timeout_seconds=3600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def upload(job_path: str, group: int) -> int:
    """Write the chunks of group `group` to the store; their bytes."""
    return await asyncio.to_thread(upload_step, job_path, group)
