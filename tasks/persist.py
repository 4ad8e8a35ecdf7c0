"""Tasks: the steps of a persist that can be tried again by themselves.

A task gets the `PersistJob` itself, since it runs in the process that has opened it, and a try
again calls the same step of the same object.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.runs.committed import Committed
from recpoint.errors import RanksMissing
from recpoint.tasks.persist_task import RETRIES, may_heal, run_name

__all__ = ["Waiting", "commit", "encode", "quantize", "upload"]

_OPTIONS: dict[str, Any] = {
    "task_run_name": run_name,
    "retry_condition_fn": may_heal,
    "cache_policy": NO_CACHE,
    "persist_result": False,
    **RETRIES,
}


class Waiting(NamedTuple):
    """Its part is stored; the checkpoint is not committed, since parts of `ranks` are missing."""

    ranks: tuple[int, ...]


@task(timeout_seconds=1800, **_OPTIONS)
async def quantize(job: PersistJob, group: int) -> None:
    """Quantize and pack the rows of group `group` into the spool."""
    await asyncio.to_thread(job.quantize, job.groups[group])


@task(timeout_seconds=1800, **_OPTIONS)
async def encode(job: PersistJob, group: int) -> None:
    """Write the recipes of the chunks of group `group`."""
    await asyncio.to_thread(job.encode, job.groups[group])


@task(timeout_seconds=3600, **_OPTIONS)
async def upload(job: PersistJob, group: int) -> int:
    """Write the chunks of group `group` to the store; their bytes."""
    return await asyncio.to_thread(job.upload, job.groups[group])


@task(timeout_seconds=600, **_OPTIONS)
async def commit(job: PersistJob) -> Committed | Waiting:
    """Commit the checkpoint; its bytes, chunks and time."""
    try:
        return await asyncio.to_thread(job.commit)
    except RanksMissing as error:
        # Nothing has failed: with several ranks all but one come here.
        return Waiting(error.ranks)
