"""Flow: a staged job to a committed checkpoint, with every step to be seen in Prefect's UI.

It does what `recpoint.catalog.persist.persist_job` does, through the same functions. It is async,
because Prefect keeps a sync flow for a second after its end; what blocks runs in threads.
"""

from __future__ import annotations

import asyncio
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

from prefect import State, flow, tags
from prefect.context import SyncClientContext, TagsContext
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from recpoint.catalog.persist import (
    Committed,
    already_committed,
    classify,
    finish_committed,
    forget_stores,
    groups_of,
    open_target,
    reject_job,
    verify_step,
)
from recpoint.catalog.persist_plan import Group
from recpoint.catalog.staged import read_job
from recpoint.errors import RecpointError
from recpoint.tasks.commit import commit
from recpoint.tasks.encode import encode
from recpoint.tasks.job_name import job_log, job_name
from recpoint.tasks.quantize import quantize
from recpoint.tasks.report import checkpoint_of, report
from recpoint.tasks.upload import upload

__all__ = ["persist", "run_persist"]

#: Groups that are worked on at once: one is prepared while the ones before it are uploaded.
_GROUPS_IN_FLIGHT = 2

#: Verifications that were begun before their flow run was created, by job file.
_verifying: dict[str, Future[None]] = {}
_verifiers = ThreadPoolExecutor(4, thread_name_prefix="verify")


def _run_name() -> str:
    return f"persist {job_name(flow_run.get_parameters()['job_path'])}"


@flow(
    name="persist",
    flow_run_name=_run_name,
    timeout_seconds=4 * 3600,
    persist_result=False,
    # Nothing is stored there; without it each run asks the server twice where it would be.
    result_storage=Path(tempfile.gettempdir()),
    validate_parameters=False,
)
async def persist(job_path: str) -> State[Any]:
    """Take a staged job to its end.

    Args:
        job_path: the job file.

    Returns:
        Completed when it is committed, Failed when it was rejected for good.

    Raises:
        RecpointError: not now; the job stays staged.
    """
    log = job_log(job_path)
    # The run has its tags by now. Those of a task are names of concurrency limits, which the server
    # would be asked for before each of them.
    with TagsContext(current_tags=set()):
        return await _persist(job_path, log)


async def _persist(job_path: str, log: LoggerAdapter[Logger]) -> State[Any]:
    try:
        job = read_job(job_path)
        target = await asyncio.to_thread(open_target, job_path)
        committed = await asyncio.to_thread(already_committed, target, job_path)
        if committed is None:
            committed = await _persist_groups(job_path)
    except RecpointError as error:
        if classify(error) == "deferred":
            forget_stores()
            log.warning("not now: %s", error)
            raise
        await asyncio.to_thread(reject_job, job_path, error)
        log.error("rejected: %s", error)
        return Failed(message=f"{type(error).__name__}: {error}")
    await asyncio.to_thread(finish_committed, job_path, committed)
    log.info("committed, %d bytes in %d chunks", committed.stored_bytes, committed.chunks)
    # Prefect's types do not know that the state of an async call has to be awaited.
    reporting: Any = report(job_path, checkpoint_of(job, committed), return_state=True)
    told: State[Any] = await reporting
    if not told.is_completed():
        log.warning("committed, but not reported: %s", told.message)
    return Completed(message=f"{committed.stored_bytes} bytes in {committed.chunks} chunks")


def run_persist(job_path: str) -> State[Any]:
    """Call the flow, tagged with run, step and rank, and wait for its final state."""
    name = job_name(job_path)

    async def call() -> State[Any]:
        with tags(f"run:{name.run}", f"step:{name.step}", f"rank:{name.rank}"):
            called: Any = persist(job_path, return_state=True)
            state: State[Any] = await called
            return state

    # Reading everything once for its digests needs no answer from the server, which takes a tenth
    # of a second to create a flow run.
    _verifying[job_path] = _verifiers.submit(verify_step, job_path)
    try:
        # One client for all that Prefect does synchronously: each loads the CA certificates anew.
        with SyncClientContext.get_or_create():
            return asyncio.run(call())
    finally:
        _verifying.pop(job_path, None)


async def _persist_groups(job_path: str) -> Committed:
    groups = await asyncio.to_thread(groups_of, job_path)
    in_flight = asyncio.Semaphore(_GROUPS_IN_FLIGHT)
    preparing = asyncio.Lock()

    async def one(group: Group) -> None:
        async with in_flight:
            async with preparing:
                if group.quantized:
                    await quantize(job_path, group.index)
                await encode(job_path, group.index)
            await upload(job_path, group.index)

    verifying = _verifying.get(job_path) or _verifiers.submit(verify_step, job_path)
    steps: list[asyncio.Future[None]] = [asyncio.wrap_future(verifying)]
    steps.extend(asyncio.ensure_future(one(group)) for group in groups)
    try:
        await asyncio.gather(*steps)
    finally:
        for step in steps:
            step.cancel()
        # Nothing of the job may still be at work when it is answered, or tried again.
        await asyncio.gather(*steps, return_exceptions=True)
    return await commit(job_path)
