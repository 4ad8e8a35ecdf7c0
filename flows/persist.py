"""Persists a staged job as a flow, with one task for each step.

The flow calls `catalog.persist.persist.drive`, as the agent does without Prefect, and runs its
steps as tasks. It is async, because Prefect keeps a sync flow for a second after its end; `drive`
and all other blocking calls run in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import UUID

from prefect import State, flow, tags
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun
from prefect.context import SyncClientContext, TagsContext
from prefect.exceptions import ObjectNotFound
from prefect.flow_engine import run_flow
from prefect.runtime import flow_run as current
from prefect.states import AwaitingRetry, Completed, Failed

from recpoint.catalog.persist.persist import (
    Committed,
    PersistJob,
    StoredJob,
    classify,
    drive,
    reject_job,
)
from recpoint.catalog.persist.plan import ChunkGroup
from recpoint.catalog.persist.ranks import parts_text, ranks_missing
from recpoint.catalog.staging.agent_lock import AgentLock, sweep_of
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import CheckpointCancelled, RanksMissing, RecpointError, SettingsError
from recpoint.flows.parameters import NO_RESULTS, JobPath
from recpoint.format.job import Job, Outcome
from recpoint.tasks.job_name import job_log, job_name, run_tag
from recpoint.tasks.persist import AwaitedRanks, commit, encode, quantize, upload
from recpoint.tasks.reports import TAG, ProgressBar, artifact_key, emit, report
from recpoint.tasks.run_tags import tag_flow_run
from recpoint.units import bytes_text, counted

__all__ = ["Tried", "end_flow_run", "persist", "run_persist"]


#: The name of the state of a flow run whose agent tries again later.
_AWAITS: Final = "AwaitingRetry"


class Tried(NamedTuple):
    """One try at a job, by the agent that called the flow.

    Attributes:
        state: of the flow run.
        flow_run: the flow run's id; the next try continues this flow run.
        error: why the job stays staged; None: it is answered, or waits for other ranks.
    """

    state: State[Any]
    flow_run: UUID | None
    error: RecpointError | None


class _OpenJob(NamedTuple):
    """Work that needs no answer from Prefect's server, begun before the flow run is created.

    Attributes:
        job: the job.
        verified: done when all staged data is checked against its digests.
        looked: done when it is known what the store already has of the job.
        prepared: done when the first group is encoded, so that its tasks find it done; it also ends
            if that failed.
        deferred: receives the error for which the job stays staged.
    """

    job: PersistJob
    verified: Future[None]
    looked: Future[StoredJob]
    prepared: Future[None]
    deferred: list[RecpointError]

    @classmethod
    def of(cls, job: PersistJob) -> _OpenJob:
        begin = _beginners.submit
        return cls(job, begin(job.verify), begin(job.find_done), begin(_prepare_first, job), [])

    def end(self) -> None:
        """Wait until all of it has ended, because the next try of the job writes the same files."""
        futures: list[Future[Any]] = [self.verified, self.looked, self.prepared]
        wait(futures)


#: What `run_persist` has begun for the flow that it calls; None: the flow was not called by it.
_begun: ContextVar[_OpenJob | None] = ContextVar("_begun", default=None)
_beginners = ThreadPoolExecutor(12, thread_name_prefix="begin")


def _prepare_first(job: PersistJob) -> None:
    # An error here occurs again in the tasks of the group, and is reported there.
    with suppress(Exception):
        first = job.groups[0]
        if first.quantized:
            job.quantize(first)
        job.encode(first)


class _Tasks:
    """Runs the steps of a job (`Steps`) as tasks of the current flow run.

    `drive` calls the steps from its threads; the tasks run in the event loop of the flow.
    """

    def __init__(self, open_job: _OpenJob) -> None:
        self._open_job = open_job
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # which flow run this is
        self._bar = _bar(open_job.job.job)
        self._running: set[asyncio.Task[Any] | None] = set()
        self._ended = False

    def find_done(self) -> StoredJob:
        # The next steps may write or remove the files that are being prepared.
        wait([self._open_job.prepared])
        return self._open_job.looked.result()

    def verify(self) -> None:
        self._open_job.verified.result()

    def quantize(self, group: ChunkGroup) -> None:
        self._run(quantize, group.index)

    def encode(self, group: ChunkGroup) -> None:
        self._run(encode, group.index)

    def upload(self, group: ChunkGroup) -> None:
        self._run(upload, group.index)

    def commit(self) -> Committed:
        committed: Committed | AwaitedRanks = self._run(commit)
        if isinstance(committed, AwaitedRanks):
            raise ranks_missing(self._open_job.job.job, committed.ranks)
        return committed

    def advanced(self, done_bytes: int, total_bytes: int) -> None:
        self._bar.show_meanwhile(done_bytes, total_bytes)

    def end(self) -> None:
        """Cancel tasks that still run, and begin no more, because the flow is over."""
        self._ended = True
        for task in filter(None, self._running):
            task.cancel()

    def _run(self, task: Callable[..., Any], *group: int) -> Any:
        async def step() -> Any:
            if self._ended:
                raise asyncio.CancelledError
            self._running.add(running := asyncio.current_task())
            try:
                return await task(self._open_job.job, *group)
            finally:
                self._running.discard(running)

        begin = asyncio.run_coroutine_threadsafe
        return self._context.copy().run(begin, step(), self._loop).result()


def _run_name() -> str:
    path = str(current.get_parameters()["job_path"])
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
    """Store one staged checkpoint (one part of it), and commit it if all parts are stored.

    Args:
        job_path: path of the job file, in `jobs` of its run's directory in this host's staging
            area.

    Returns:
        Completed if the checkpoint is committed, if its trainer asked to drop it, or if it waits
        for other ranks (the job then stays staged). Failed if the job was rejected for good.
        AwaitingRetry if the agent tries again later, with this flow run.

    Raises:
        SettingsError: `job_path` is not the path of a job file.
        StagingError: an agent, a drain or a sweep is at work in this staging area.
        RecpointError: the try failed; the job stays staged, and this flow does not try it again.
    """
    begun_job = _begun.get()
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
    # The flow run already has its tags. Prefect takes a task's tags for names of concurrency limits
    # and asks the server for them before each task.
    with TagsContext(current_tags=set()):
        if begun_job is not None:
            try:
                return await _persist(begun_job, log)
            except RecpointError as error:
                begun_job.deferred.append(error)  # the agent logs it, with the time of the next try
                return AwaitingRetry(message=f"not now: {error}")
        with _alone(job_path):
            try:
                begun_job = _OpenJob.of(await asyncio.to_thread(PersistJob.open, job_path))
            except RecpointError as error:
                if classify(error) == "deferred":
                    log.warning("not now: %s", error)
                    raise
                return _tell_rejected(None, reject_job(job_path, error), log)
            await tag_flow_run(begun_job.job.job.run_url)
            try:
                return await _persist(begun_job, log)
            except RecpointError as error:
                log.warning("not now: %s", error)
                raise
            finally:
                await asyncio.to_thread(begun_job.end)


def _alone(job_path: str) -> AbstractContextManager[object]:
    """Return the lock of the staging area; an agent that calls the flow already holds it.

    If two processes did one job, each would remove the files that the other has encoded.
    """
    staged_run = StagedRun.of_job(Path(job_path))
    return (
        AgentLock(staged_run.staging, sweep_of(staged_run))
        if staged_run.exists()
        else nullcontext()
    )


async def _persist(open_job: _OpenJob, log: LoggerAdapter[Logger]) -> State[Any]:
    job = open_job.job.job
    tasks = _Tasks(open_job)
    try:
        outcome, committed = await asyncio.to_thread(drive, open_job.job, tasks)
    except RanksMissing as error:
        text = f"stored, waits for {parts_text(error.ranks, job.ranks)}"
        log.info("%s", text)
        return Completed(name="Waiting", message=text)
    except RecpointError as error:
        _tell_lag(job, error)
        raise
    finally:
        tasks.end()
    if committed is None:
        return _tell_rejected(job, outcome, log)
    log.info("committed, %d bytes in %d chunks", committed.stored_bytes, committed.chunks)
    _tell_committed(job, committed)
    # Prefect's types do not know that the state of an async call has to be awaited.
    reporting: Any = report(open_job.job, committed, return_state=True)
    report_state: State[Any] = await reporting
    if not report_state.is_completed():
        log.warning("committed, but its report task failed: %s", report_state.message)
    return Completed(
        message=f"{bytes_text(committed.stored_bytes)} in {counted(committed.chunks, 'chunk')}"
    )


def _tell_rejected(job: Job | None, outcome: Outcome, log: LoggerAdapter[Logger]) -> State[Any]:
    """Log and report a rejected job; `job` None: it could not be read, so there is no event."""
    if outcome.error_type == CheckpointCancelled.__name__:
        log.info("dropped, as the trainer asked")
        return Completed(name="Dropped", message="the trainer asked for it to be dropped")
    log.error("rejected: %s", outcome.error)
    if job is not None:
        failure = {"error_type": outcome.error_type, "error": outcome.error}
        emit("failed", job.run, job.run_url, step=job.step, rank=job.rank, **failure)
    return Failed(message=f"{outcome.error_type}: {outcome.error}")


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


def _tell_lag(job: Job, error: RecpointError) -> None:
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


def run_persist(
    job: PersistJob, *, flow_run: UUID | None = None, tried_before: bool = False
) -> Tried:
    """Run the flow for one try of a job, tagged with run, step and rank.

    The caller must hold the lock of the staging area.

    Args:
        job: the job.
        flow_run: the flow run of the previous try, which this try continues; None: unknown.
        tried_before: whether an earlier agent may have tried the job: look for its flow run.
    """

    async def call() -> State[Any]:
        job_tags = _tags_of(job)
        known_run = None
        if flow_run is not None or tried_before:
            async with get_client() as client:
                known_run = await _flow_run(client, job, flow_run)
        with tags(*job_tags):
            if known_run is None:
                called: Any = persist(str(job.path), return_state=True)
            else:
                parameters = {"job_path": str(job.path)}
                called = run_flow(
                    persist, flow_run=known_run, parameters=parameters, return_type="state"
                )
            state: State[Any] = await called
            return state

    # Begun first, because the server takes a tenth of a second to create a flow run.
    begun_job = _OpenJob.of(job)
    token = _begun.set(begun_job)
    try:
        # One client for all of Prefect's sync calls, because each client loads the CA certificates.
        with SyncClientContext.get_or_create():
            state = asyncio.run(call())
            error = begun_job.deferred[0] if begun_job.deferred else None
            return Tried(state, state.state_details.flow_run_id, error)
    finally:
        _begun.reset(token)
        begun_job.end()


def _tags_of(job: PersistJob) -> list[str]:
    name = job_name(str(job.path))
    return [TAG, run_tag(job.job.run_url), f"step:{name.step}", f"rank:{name.rank}"]


async def _flow_run(
    client: PrefectClient, job: PersistJob, known_run: UUID | None
) -> FlowRun | None:
    """Return the flow run that waits for the next try of a job; None: there is none."""
    if known_run is not None:
        try:
            run = await client.read_flow_run(known_run)
        except ObjectNotFound:
            return None  # somebody has deleted it
        return run if run.state_name == _AWAITS else None
    runs = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=_tags_of(job)),
            state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[_AWAITS])),
        )
    )
    path = str(job.path)
    return next((run for run in runs if run.parameters.get("job_path") == path), None)


def end_flow_run(flow_run: UUID, outcome: Outcome | None) -> None:
    """End a flow run that awaited another try, after its job was answered outside it.

    Args:
        flow_run: the flow run's id.
        outcome: the job's outcome; None: unknown.
    """
    state: State[Any] = Completed(message="the job was answered without this flow run")
    if outcome is not None and outcome.result == "rejected":
        dropped = outcome.error_type == CheckpointCancelled.__name__
        text = f"{outcome.error_type}: {outcome.error}"
        state = Completed(name="Dropped", message=text) if dropped else Failed(message=text)
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, state, force=True)


def _bar(job: Job) -> ProgressBar:
    key = f"g{job.generation}-step-{job.step}-r{job.rank}-persist-progress"
    words = f"Step {job.step}, rank {job.rank}: staged bytes that are stored"
    return ProgressBar(artifact_key(job.run_url, job.run, key), words)
