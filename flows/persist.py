"""Flow: a staged job to a committed checkpoint, with every step to be seen in Prefect's UI.

It has `catalog.persist.persist.drive` do what the agent does without Prefect, and runs the steps
as tasks. It is async, because Prefect keeps a sync flow for a second after its end; `drive` and all
that blocks runs in threads.
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
    Found,
    PersistJob,
    classify,
    drive,
    reject_job,
)
from recpoint.catalog.persist.plan import Group
from recpoint.catalog.persist.ranks import ranks_missing, ranks_text
from recpoint.catalog.staging.agent import AgentLock, sweep_of
from recpoint.errors import CheckpointCancelled, RanksMissing, RecpointError, SettingsError
from recpoint.flows.parameters import NO_RESULTS, JobPath
from recpoint.format.job import Job, Outcome
from recpoint.tasks.job_name import job_log, job_name, run_tag
from recpoint.tasks.persist import Waiting, commit, encode, quantize, upload
from recpoint.tasks.reports import TAG, ProgressBar, artifact_key, emit, report
from recpoint.units import bytes_text, counted

__all__ = ["Tried", "end_flow_run", "persist", "run_persist"]


#: The name of the state of a flow run whose agent tries again later.
_AWAITS: Final = "AwaitingRetry"


class Tried(NamedTuple):
    """One try at a job, by the agent that called the flow.

    Attributes:
        state: of the flow run.
        flow_run: the flow run, with which the next try goes on.
        error: why the job stays staged; None: it is answered, or waits for other ranks.
    """

    state: State[Any]
    flow_run: UUID | None
    error: RecpointError | None


class _Begun(NamedTuple):
    """What needs no answer from the server, begun before the flow run was created.

    Attributes:
        job: what it is begun of.
        verified: everything staged, once for its digests.
        looked: what the store has of the job.
        prepared: the first group is encoded, if that went well; its tasks then find it done.
        deferred: takes the error for which the job stays staged.
    """

    job: PersistJob
    verified: Future[None]
    looked: Future[Found]
    prepared: Future[None]
    deferred: list[RecpointError]

    @classmethod
    def of(cls, job: PersistJob) -> _Begun:
        begin = _beginners.submit
        return cls(job, begin(job.verify), begin(job.find_done), begin(_prepare_first, job), [])

    def end(self) -> None:
        """Wait until nothing of it is at work: whoever takes the job up now writes the same."""
        futures: list[Future[Any]] = [self.verified, self.looked, self.prepared]
        wait(futures)


#: Of the flow that is called in this context, where `run_persist` calls it.
_begun: ContextVar[_Begun | None] = ContextVar("_begun", default=None)
_beginners = ThreadPoolExecutor(12, thread_name_prefix="begin")


def _prepare_first(job: PersistJob) -> None:
    # What goes wrong here goes wrong in the tasks of the group again, and is told there.
    with suppress(Exception):
        first = job.groups[0]
        if first.quantized:
            job.quantize(first)
        job.encode(first)


class _Tasks:
    """Steps of a job (`Steps`), each a task of the flow run that this is made in.

    `drive` calls them from its threads; the tasks run in the loop of the flow.
    """

    def __init__(self, begun: _Begun) -> None:
        self._begun = begun
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # which flow run this is
        self._bar = _bar(begun.job.job)
        self._running: set[asyncio.Task[Any] | None] = set()
        self._ended = False

    def find_done(self) -> Found:
        # Whatever comes next may write, or remove, what is being prepared.
        wait([self._begun.prepared])
        return self._begun.looked.result()

    def verify(self) -> None:
        self._begun.verified.result()

    def quantize(self, group: Group) -> None:
        self._run(quantize, group.index)

    def encode(self, group: Group) -> None:
        self._run(encode, group.index)

    def upload(self, group: Group) -> None:
        self._run(upload, group.index)

    def commit(self) -> Committed:
        done: Committed | Waiting = self._run(commit)
        if isinstance(done, Waiting):
            raise ranks_missing(self._begun.job.job, done.ranks)
        return done

    def advanced(self, done_bytes: int, total_bytes: int) -> None:
        self._bar.show_meanwhile(done_bytes, total_bytes)

    def end(self) -> None:
        """The flow is over: a task that still runs is cancelled, and none is begun any more."""
        self._ended = True
        for task in filter(None, self._running):
            task.cancel()

    def _run(self, task: Callable[..., Any], *group: int) -> Any:
        async def step() -> Any:
            if self._ended:
                raise asyncio.CancelledError
            self._running.add(running := asyncio.current_task())
            try:
                return await task(self._begun.job, *group)
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
    """Take a staged job to its end.

    Args:
        job_path: the job file, in `jobs` of its run's directory in this host's staging area.

    Returns:
        Completed when it is committed, dropped as the trainer asked, or waits for other ranks (then
        the job stays staged); Failed when it was rejected for good; AwaitingRetry when an agent
        tries again later, with this flow run.

    Raises:
        SettingsError: that is not the path of a job file.
        StagingError: an agent, a drain or a sweep does the jobs of this staging area.
        RecpointError: not now; the job stays staged, and no agent tries it again.
    """
    begun = _begun.get()
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
    with TagsContext(current_tags=set()):
        if begun is not None:
            try:
                return await _persist(begun, log)
            except RecpointError as error:
                begun.deferred.append(error)  # the agent says it in its log, with the next try
                return AwaitingRetry(message=f"not now: {error}")
        with _alone(job_path):
            try:
                begun = _Begun.of(await asyncio.to_thread(PersistJob.open, job_path))
            except RecpointError as error:
                if classify(error) == "deferred":
                    log.warning("not now: %s", error)
                    raise
                return _tell_rejected(None, reject_job(job_path, error), log)
            try:
                return await _persist(begun, log)
            except RecpointError as error:
                log.warning("not now: %s", error)
                raise
            finally:
                await asyncio.to_thread(begun.end)


def _alone(job_path: str) -> AbstractContextManager[object]:
    """The lock of the staging area, which an agent that calls the flow holds already.

    Of two that do one job, each would remove what the other has encoded.
    """
    run_dir = Path(job_path).parent.parent
    return AgentLock(run_dir.parent, sweep_of(run_dir)) if run_dir.is_dir() else nullcontext()


async def _persist(begun: _Begun, log: LoggerAdapter[Logger]) -> State[Any]:
    job = begun.job.job
    tasks = _Tasks(begun)
    try:
        outcome, committed = await asyncio.to_thread(drive, begun.job, tasks)
    except RanksMissing as error:
        text = f"stored, waits for {ranks_text(error.ranks)}"
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
    reporting: Any = report(begun.job, committed, return_state=True)
    told: State[Any] = await reporting
    if not told.is_completed():
        log.warning("committed, but not reported: %s", told.message)
    return Completed(
        message=f"{bytes_text(committed.stored_bytes)} in {counted(committed.chunks, 'chunk')}"
    )


def _tell_rejected(job: Job | None, outcome: Outcome, log: LoggerAdapter[Logger]) -> State[Any]:
    """`job` None: it could not be read, so that nobody knows whose it is."""
    if outcome.error_type == CheckpointCancelled.__name__:
        log.info("dropped, as the trainer asked")
        return Completed(name="Dropped", message="the trainer asked for it to be dropped")
    log.error("rejected: %s", outcome.error)
    if job is not None:
        why = {"error_type": outcome.error_type, "error": outcome.error}
        emit("failed", job.run, job.run_url, step=job.step, rank=job.rank, **why)
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
    """Call the flow, tagged with run, step and rank, and wait until the try has ended.

    Whoever calls it holds the lock of the staging area.

    Args:
        job: the job.
        flow_run: the flow run of the try before, which this one goes on with.
        tried_before: an agent that has ended may have tried it: look for its flow run.
    """

    async def call() -> State[Any]:
        wanted = _tags_of(job)
        known = None
        if flow_run is not None or tried_before:
            async with get_client() as client:
                known = await _flow_run(client, job, flow_run)
        with tags(*wanted):
            if known is None:
                called: Any = persist(str(job.path), return_state=True)
            else:
                parameters = {"job_path": str(job.path)}
                called = run_flow(
                    persist, flow_run=known, parameters=parameters, return_type="state"
                )
            state: State[Any] = await called
            return state

    # The server takes a tenth of a second to create a flow run.
    begun = _Begun.of(job)
    before = _begun.set(begun)
    try:
        # One client for all that Prefect does synchronously: each loads the CA certificates anew.
        with SyncClientContext.get_or_create():
            state = asyncio.run(call())
            error = begun.deferred[0] if begun.deferred else None
            return Tried(state, state.state_details.flow_run_id, error)
    finally:
        _begun.reset(before)
        begun.end()


def _tags_of(job: PersistJob) -> list[str]:
    name = job_name(str(job.path))
    return [TAG, run_tag(job.job.run_url), f"step:{name.step}", f"rank:{name.rank}"]


async def _flow_run(client: PrefectClient, job: PersistJob, known: UUID | None) -> FlowRun | None:
    """The flow run that waits for the next try of a job; None: there is none (any more)."""
    if known is not None:
        try:
            there = await client.read_flow_run(known)
        except ObjectNotFound:
            return None  # somebody has deleted it
        return there if there.state_name == _AWAITS else None
    found = await client.read_flow_runs(
        flow_run_filter=FlowRunFilter(
            tags=FlowRunFilterTags(all_=_tags_of(job)),
            state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[_AWAITS])),
        )
    )
    path = str(job.path)
    return next((one for one in found if one.parameters.get("job_path") == path), None)


def end_flow_run(flow_run: UUID, outcome: Outcome | None) -> None:
    """End a flow run that awaited a try, and whose job was answered without it.

    Args:
        flow_run: the flow run.
        outcome: the answer; None: nobody knows it any more.
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
    words = f"Staged bytes that are stored of step {job.step}"
    return ProgressBar(artifact_key(job.run_url, job.run, key), words)
