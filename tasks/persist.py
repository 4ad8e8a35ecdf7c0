"""Tasks: the steps of a persist that can be tried again by themselves, and what they are called.

Tasks: the steps of a persist that can be tried again by themselves. A task gets the `PersistJob`
itself, since it runs in the process that has opened it, and a try again calls the same step of the
same object.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.run.committed import Committed
from recpoint.errors import RanksMissing, RecpointError
from recpoint.tasks.job_name import job_name

__all__ = [
    "RETRIES",
    "AwaitedRanks",
    "commit",
    "encode",
    "may_heal",
    "quantize",
    "run_name",
    "upload",
]


#: Tries again of a task, after about 1, 1 and 2 seconds; what takes longer to heal is for the
#: agent, which keeps the job staged and starts the whole flow again, sooner for short intervals.
RETRIES: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [1, 1, 2],
    "retry_jitter_factor": 0.5,
}


def may_heal(task: Any, run: Any, state: Any) -> bool:
    """Whether to run a failed task again: Prefect's `retry_condition_fn`."""
    error = state.data
    return isinstance(error, RecpointError) and error.retryable


def run_name() -> str:
    """A task run's name: what it does, to which group, of which checkpoint."""
    parameters = task_run.get_parameters()
    group = f" group {parameters['group']}" if "group" in parameters else ""
    return f"{task_run.get_task_name()}{group} of {job_name(str(parameters['job'].path))}"


_OPTIONS: dict[str, Any] = {
    "task_run_name": run_name,
    "retry_condition_fn": may_heal,
    "cache_policy": NO_CACHE,
    "persist_result": False,
    **RETRIES,
}


class AwaitedRanks(NamedTuple):
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
async def commit(job: PersistJob) -> Committed | AwaitedRanks:
    """Commit the checkpoint; its bytes, chunks and time."""
    try:
        return await asyncio.to_thread(job.commit)
    except RanksMissing as error:
        # Nothing has failed: with several ranks all but one come here.
        return AwaitedRanks(error.ranks)
