"""Flow: a staged job to a committed checkpoint, with every step to be seen in Prefect's UI.

It does what `catalog.persisting.persist.persist_job` does, through the same functions. It is async,
because Prefect keeps a sync flow for a second after its end; what blocks runs in threads.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, NamedTuple

from prefect import State, flow, tags
from prefect.context import SyncClientContext, TagsContext
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from recpoint.catalog.persisting.answers import finish_committed, reject_job
from recpoint.catalog.persisting.persist import (
    already_committed,
    classify,
    encode_step,
    groups_of,
    is_stored,
    open_target,
    quantize_step,
    verify_step,
)
from recpoint.catalog.persisting.persist_plan import Group
from recpoint.catalog.runs.committed import Committed
from recpoint.catalog.staging.agent_lock import AgentLock, sweep_of
from recpoint.catalog.staging.cancel import raise_if_cancelled
from recpoint.catalog.staging.job_store import forget_stores
from recpoint.catalog.staging.staged import read_job
from recpoint.errors import CheckpointCancelled, RecpointError, SettingsError
from recpoint.flows.no_results import NO_RESULTS
from recpoint.flows.parameters import JobPath
from recpoint.format.job import Job
from recpoint.tasks.artifact_key import artifact_key
from recpoint.tasks.commit import Waiting, commit
from recpoint.tasks.encode import encode
from recpoint.tasks.events import TAG, emit
from recpoint.tasks.job_name import job_log, job_name
from recpoint.tasks.progress import ProgressBar
from recpoint.tasks.quantize import quantize
from recpoint.tasks.report import checkpoint_of, report
from recpoint.tasks.upload import upload

__all__ = ["persist", "run_persist"]

#: Groups that are worked on at once: one is prepared while the ones before it are uploaded.
_GROUPS_IN_FLIGHT = 2


class _Begun(NamedTuple):
    """What needs no answer from the server, begun before the flow run was created.

    Attributes:
        verified: everything staged, once for its digests.
        checked: whether it only waits for other ranks; what has been committed of it already.
        prepared: the first group is encoded, if that went well; its tasks then find it done.
    """

    verified: Future[None]
    checked: Future[tuple[bool, Committed | None]]
    prepared: Future[None]

    @classmethod
    def of(cls, job_path: str) -> _Begun:
        begin = _beginners.submit
        return cls(
            begin(verify_step, job_path), begin(_check, job_path), begin(_prepare_first, job_path)
        )

    async def settle(self) -> None:
        """Wait until nothing of it is at work on the job's files."""
        await asyncio.wait([asyncio.wrap_future(self.prepared)])


#: By job file, while its flow runs.
_begun: dict[str, _Begun] = {}
_beginners = ThreadPoolExecutor(12, thread_name_prefix="begin")


def _check(job_path: str) -> tuple[bool, Committed | None]:
    raise_if_cancelled(job_path)
    target = open_target(job_path)
    stored = is_stored(target, job_path)  # before the other, which says why
    return stored, already_committed(target, job_path)


def _prepare_first(job_path: str) -> None:
    # What goes wrong here goes wrong in the tasks of the group again, and is told there.
    with suppress(Exception):
        first = groups_of(job_path)[0]
        if first.quantized:
            quantize_step(job_path, first.index)
        encode_step(job_path, first.index)


def _run_name() -> str:
    path = str(flow_run.get_parameters()["job_path"])
    try:
        return f"persist {job_name(path)}"
    except ValueError:  # the flow says so; raised here, the run would have crashed for no reason
        return f"persist {path[-200:]}"


@flow(
    name="persist",
    flow_run_name=_run_name,
    timeout_seconds=4 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
    validate_parameters=False,
)
async def persist(job_path: JobPath) -> State[Any]:
    """Take a staged job to its end.

    Args:
        job_path: the job file, in `jobs` of its run's directory in this host's staging area.

    Returns:
        Completed when it is committed, dropped as the trainer asked, or waits for other ranks (then
        the job stays staged); Failed when it was rejected for good.

    Raises:
        SettingsError: that is not the path of a job file.
        StagingError: an agent, a drain or a sweep does the jobs of this staging area.
        RecpointError: not now; the job stays staged.
    """
    try:
        log = job_log(job_path)
    except ValueError as error:
        raise SettingsError(
            "job_path",
            found=f"{error}: {job_path!r:.200}",
            expected="the path of a staged job's file",
            next_step="recpoint sweep URL --dry-run on the trainer's host lists what is staged; "
            "the deployment drain does all of it",
        ) from None
    # The run has its tags by now. Those of a task are names of concurrency limits, which the server
    # would be asked for before each of them.
    with TagsContext(current_tags=set()), _alone(job_path):
        return await _persist(job_path, log)


def _alone(job_path: str) -> AbstractContextManager[object]:
    """The lock of the staging area, unless an agent calls the flow, which holds it.

    Of two that do one job, each would remove what the other has encoded.
    """
    run_dir = Path(job_path).parent.parent
    if job_path in _begun or not run_dir.is_dir():
        return nullcontext()
    return AgentLock(run_dir.parent, sweep_of(run_dir))


async def _persist(job_path: str, log: LoggerAdapter[Logger]) -> State[Any]:
    job: Job | None = None
    begun = _begun.get(job_path) or _Begun.of(job_path)
    try:
        job = read_job(job_path)
        raise_if_cancelled(job_path)
        stored, committed = await asyncio.wrap_future(begun.checked)
        if committed is None:
            if stored:
                await begun.settle()  # a commit may empty the spool
            done = await (commit(job_path) if stored else _persist_groups(job_path, job, begun))
            if isinstance(done, Waiting):
                await begun.settle()
                log.info("stored, %s", done.text)
                return Completed(name="Waiting", message=f"stored, {done.text}")
            committed = done
        await begun.settle()
    except RecpointError as error:
        await begun.settle()
        if classify(error) == "deferred":
            forget_stores()
            log.warning("not now: %s", error)
            _tell_lag(job, error)
            raise
        await asyncio.to_thread(reject_job, job_path, error)
        if isinstance(error, CheckpointCancelled):
            log.info("dropped, as the trainer asked")
            return Completed(name="Dropped", message="the trainer asked for it to be dropped")
        log.error("rejected: %s", error)
        if job is not None:
            why = {"error_type": type(error).__name__, "error": str(error)}
            emit("failed", job.run, job.run_url, step=job.step, rank=job.rank, **why)
        return Failed(message=f"{type(error).__name__}: {error}")
    await asyncio.to_thread(finish_committed, job_path, committed)
    log.info("committed, %d bytes in %d chunks", committed.stored_bytes, committed.chunks)
    _tell_committed(job, committed)
    # Prefect's types do not know that the state of an async call has to be awaited.
    reporting: Any = report(job_path, checkpoint_of(job, committed), return_state=True)
    told: State[Any] = await reporting
    if not told.is_completed():
        log.warning("committed, but not reported: %s", told.message)
    return Completed(message=f"{committed.stored_bytes} bytes in {committed.chunks} chunks")


def _tell_committed(job: Job, committed: Committed) -> None:
    emit(
        "committed",
        job.run,
        job.run_url,
        step=job.step,
        generation=job.generation,
        rank=job.rank,
        kind=job.kind,
        policy=job.policy,
        stored_bytes=committed.stored_bytes,
        links_to_read=committed.links_to_read,
        lag_seconds=max(0, committed.committed_ms - job.snapshot_ms) / 1000,
    )


def _tell_lag(job: Job | None, error: RecpointError) -> None:
    if job is None:
        return  # it could not be read, so that nobody knows whose it is
    lag_seconds = max(0.0, time.time() - job.snapshot_ms / 1000)
    emit(
        "lagging",
        job.run,
        job.run_url,
        step=job.step,
        generation=job.generation,
        rank=job.rank,
        lag_seconds=lag_seconds,
        error_type=type(error).__name__,
        error=str(error),
    )


def run_persist(job_path: str) -> State[Any]:
    """Call the flow, tagged with run, step and rank, and wait for its final state."""
    name = job_name(job_path)

    async def call() -> State[Any]:
        with tags(TAG, f"run:{name.run}", f"step:{name.step}", f"rank:{name.rank}"):
            called: Any = persist(job_path, return_state=True)
            state: State[Any] = await called
            return state

    # The server takes a tenth of a second to create a flow run.
    begun = _begun[job_path] = _Begun.of(job_path)
    try:
        # One client for all that Prefect does synchronously: each loads the CA certificates anew.
        with SyncClientContext.get_or_create():
            return asyncio.run(call())
    finally:
        # Whoever takes the job up now, without Prefect or again, writes the same files.
        futures: list[Future[Any]] = [begun.verified, begun.checked, begun.prepared]
        wait(futures)
        del _begun[job_path]


def _bar(job: Job) -> ProgressBar:
    key = f"g{job.generation}-step-{job.step}-r{job.rank}-persist-progress"
    words = f"Staged bytes that are stored of step {job.step}"
    return ProgressBar(artifact_key(job.run_url, job.run, key), words)


async def _persist_groups(job_path: str, job: Job, begun: _Begun) -> Committed | Waiting:
    groups = await asyncio.to_thread(groups_of, job_path)
    in_flight = asyncio.Semaphore(_GROUPS_IN_FLIGHT)
    preparing = asyncio.Lock()
    bar = _bar(job)
    stored_bytes = 0

    async def one(group: Group) -> None:
        nonlocal stored_bytes
        async with in_flight:
            async with preparing:
                await begun.settle()
                if group.quantized:
                    await quantize(job_path, group.index)
                await encode(job_path, group.index)
            await upload(job_path, group.index)
        stored_bytes += group.staged_bytes
        bar.show_meanwhile(stored_bytes, sum(group.staged_bytes for group in groups))

    steps: list[asyncio.Future[None]] = [asyncio.wrap_future(begun.verified)]
    steps.extend(asyncio.ensure_future(one(group)) for group in groups)
    try:
        await asyncio.gather(*steps)
    finally:
        for step in steps:
            step.cancel()
        # Nothing of the job may still be at work when it is answered, or tried again.
        await asyncio.gather(*steps, return_exceptions=True)
    return await commit(job_path)
