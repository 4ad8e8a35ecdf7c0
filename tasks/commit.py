"""Task: create the manifest of a job whose chunks are all in the store."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.persisting.persist import commit_job
from recpoint.catalog.persisting.ranks_text import ranks_text
from recpoint.catalog.runs.committed import Committed
from recpoint.errors import RanksMissing
from recpoint.tasks.persist_task import RETRIES, may_heal, run_name

__all__ = ["Waiting", "commit"]


class Waiting(NamedTuple):
    """Its part is stored; the checkpoint is not committed, since other ranks' are missing."""

    text: str


@task(
    task_run_name=run_name,
    retry_condition_fn=may_heal,
    timeout_seconds=600,
    cache_policy=NO_CACHE,
    persist_result=False,
    **RETRIES,
)
async def commit(job_path: str) -> Committed | Waiting:
    """Commit the checkpoint; its bytes, chunks and time."""
    try:
        return await asyncio.to_thread(commit_job, job_path)
    except RanksMissing as error:
        # Nothing has failed: with several ranks all but one come here.
        return Waiting(f"waits for {ranks_text(error.ranks)}")
