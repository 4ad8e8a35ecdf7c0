"""Task: create the manifest of a job whose chunks are all in the store."""

from __future__ import annotations

import asyncio

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.persist import Committed, commit_job
from recpoint.tasks.persist_task import RETRIES, may_heal, run_name

__all__ = ["commit"]


@task(
    task_run_name=run_name,
    retry_condition_fn=may_heal,
    timeout_seconds=600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def commit(job_path: str) -> Committed:
    """Commit the checkpoint; its bytes, chunks and time."""
    return await asyncio.to_thread(commit_job, job_path)
