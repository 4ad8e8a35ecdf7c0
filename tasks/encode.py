"""Task: write the recipes of the chunks of one group of a job."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.persisting.persist import encode_step
from recpoint.tasks.persist_task import RETRIES, may_heal, run_name

__all__ = ["encode"]


@task(
    task_run_name=run_name,
    retry_condition_fn=may_heal,
    timeout_seconds=1800,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def encode(job_path: str, group: int) -> str:
    """Write the recipes of the chunks of group `group`; path of the result."""
    return await asyncio.to_thread(encode_step, job_path, group)
