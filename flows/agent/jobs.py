"""Persists the staged jobs of a host: each run's in order, as Prefect flows or without Prefect.

The queue: which job of a run is next, and when. A directory that cannot be read does not hold up
the others: the agent logs the error once, and treats the directory as empty until it can be read.

The jobs of one run: strictly in order, because each increment needs the one before it. The
exception: if a job's part is stored and it only waits for other ranks, the next jobs go on. An
error concerns its own run only: the job is tried again later, or rejected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from recpoint.catalog.persist.persist import PersistJob, classify, drive, persist_job
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.cancels import is_cancelled
from recpoint.errors import FormatError, RanksMissing, RecpointError, StagingError, StagingRefused
from recpoint.flows.agent.gate import PrefectGate
from recpoint.flows.agent.runs import Awaits, RunState, expect_end, postpone_or_reject
from recpoint.format.job import Job
from recpoint.tasks.job_name import job_log

__all__ = ["AgentJobs", "AgentPersist", "AgentQueue"]


_POLL_SECONDS: Final = 0.05


class AgentPersist:
    """Persists jobs; several threads may use it, each for another job.

    Args:
        gate: says when Prefect can be used, and is told when Prefect fails.
    """

    def __init__(self, gate: PrefectGate) -> None:
        self._gate = gate
        self._telling: list[threading.Thread] = []
        self._started = time.time()  # not monotonic: compared with times of files

    @property
    def telling(self) -> list[threading.Thread]:
        """Threads of flows whose jobs are answered, and which only report to Prefect."""
        return [thread for thread in self._telling if thread.is_alive()]

    def persist(
        self,
        job_file: Path,
        job: PersistJob | None,
        state: RunState,
        log: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        """Persist a job, or, if it needs other ranks' parts, as much of it as this host can.

        Args:
            job_file: the job file.
            job: the job; None: the file cannot be read, and is rejected here.
            state: the state of the job's run.
            log: gets the result of a job that is persisted without Prefect.

        Raises:
            RecpointError, OSError, MemoryError: the try failed; the job stays staged.
        """
        worth_a_flow = job is not None and state.is_worth_a_flow()
        call = self._gate.persist_flow() if worth_a_flow else None
        if job is not None and call is not None:
            failed = self._run_flow(call, job, state)
            if failed is None:
                return self._gate.worked()
            if isinstance(failed, RecpointError):
                raise failed
            self._gate.failed(f"{type(failed).__name__}: {failed}")
        outcome = persist_job(job_file) if job is None else drive(job).outcome
        log.info("%s", f"{outcome.result} without Prefect {outcome.error}".rstrip())

    def settle(self, state: RunState) -> None:
        """End, in the background, the flow run of a job that was answered outside that flow run."""
        awaits = state.awaits
        end = None if awaits is None or awaits.job_file.exists() else self._gate.end_flow_run()
        if awaits is None or end is None:
            return  # nothing to end; or Prefect is away, and a later call ends it
        state.awaits = None

        def tell() -> None:
            try:
                end(awaits.flow_run, job_files.answer_given(awaits.job_file))
            except Exception as error:  # only Prefect's display depends on this call
                _LOG.info("%s: its flow run still waits in Prefect: %s", awaits.job_file, error)

        thread = threading.Thread(target=tell, name="end flow run", daemon=True)
        thread.start()
        self._telling = [*self.telling, thread]

    def _run_flow(
        self, call: Callable[..., Any], job: PersistJob, state: RunState
    ) -> BaseException | None:
        """Run the flow for a job.

        Returns:
            None: the job is answered, or waits for other ranks. Otherwise the error: a
            `RecpointError` if the work failed, any other type if Prefect failed.
        """
        self.settle(state)  # the flow run of a job before this one
        results: list[Any] = []
        ended: list[Any] = []  # `flows.persist.Tried`, whose module imports Prefect
        awaits = state.awaits
        known_run = awaits.flow_run if awaits is not None and awaits.job_file == job.path else None
        # A job staged before this agent began may have a flow run that an earlier agent began.
        tried_before = known_run is None and staged_before(job.path, self._started)

        def run() -> None:
            try:
                tried = call(job, flow_run=known_run, tried_before=tried_before)
                ended.append(tried)
                if tried.error is None:
                    results.append(tried.state.result(raise_on_failure=False) or tried.state)
                else:
                    results.append(tried.error)
            except Exception as error:
                # Prefect, its client and its server raise many types.
                results.append(error)

        thread = threading.Thread(target=run, name=f"flow {job.path.stem}", daemon=True)
        thread.start()
        while thread.is_alive() and job.path.exists():
            thread.join(_POLL_SECONDS)
        if not job.path.exists():
            # The rest of the flow only reports to Prefect, whose API may hang: do not wait for it.
            state.awaits = None
            self._telling = [*self.telling, thread]
            return None
        if ended:  # else Prefect failed, and the flow run that is known still awaits its end
            flow_run = ended[0].flow_run
            is_tried_again = ended[0].error is not None and flow_run is not None
            state.awaits = Awaits(job.path, flow_run) if is_tried_again else None
        # No result: the thread exited or was cancelled, which is not the job's fault.
        failed = results[0] if results else "the flow ended without a state"
        if getattr(failed, "name", None) == "Waiting":
            return None
        return failed if isinstance(failed, BaseException) else RuntimeError(str(failed))


_LOG = logging.getLogger("recpoint.agent")


class AgentQueue:
    """Lists the jobs of a staging area; each run's thread may ask for the jobs of its run.

    Args:
        staging: the staging area.
    """

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._area_error: OSError | StagingRefused | None = None
        self._unreadable: dict[StagedRun, OSError | StagingRefused] = {}

    def staged_runs(self) -> list[StagedRun] | None:
        """Return all runs; None while the staging area cannot be read.

        Directories of other users are logged once, and left out.
        """
        foreign: set[StagedRun] = set()

        def refused(staged_run: StagedRun, error: StagingRefused) -> None:
            foreign.add(staged_run)
            if staged_run not in self._unreadable:
                _LOG.warning("%s: left alone: %s", staged_run.name, error)
            self._unreadable[staged_run] = error

        try:
            found_runs = staged_runs(self._staging, refused=refused)
        except (OSError, StagingRefused) as error:
            if self._area_error is None:
                _LOG.warning("cannot look into %s: %s", self._staging, error)
            self._area_error = error
            return None
        self._area_error = None
        for ended_run in self._unreadable.keys() - foreign.union(found_runs):
            self._unreadable.pop(ended_run, None)
        return found_runs

    def jobs(self, staged_run: StagedRun) -> list[Path]:
        """Return the run's job files; none while its directory cannot be read."""
        try:
            jobs = staged_run.staged_jobs()
        except (OSError, StagingRefused) as error:
            if staged_run not in self._unreadable:
                _LOG.warning("%s: its jobs cannot be read: %s", staged_run.name, error)
            self._unreadable[staged_run] = error
            return []
        self._unreadable.pop(staged_run, None)
        return jobs

    def forget(self, staged_run: StagedRun) -> None:
        """Forget a run whose directory is gone."""
        self._unreadable.pop(staged_run, None)

    def due_job(self, staged_run: StagedRun, state: RunState) -> Path | None:
        """Return the job for which to start a thread now; None: there is none."""
        if state.works or not state.is_to_be_looked_at():
            return None
        job_file = self.next_job(staged_run, state)
        if job_file is None:
            return None
        due = time.monotonic() >= state.retry_at or is_dropped(job_file)
        return job_file if due else None

    def next_job(self, staged_run: StagedRun, state: RunState) -> Path | None:
        """Return the first job to be done, or whose missing parts are to be looked for, now."""
        jobs = self.jobs(staged_run)
        if jobs:
            state.jobs_seen = time.monotonic()
        for job_file in jobs:
            if state.waiting.is_due(job_file) or is_dropped(job_file):
                return job_file
        return None

    def has_untried(self, runs: Mapping[StagedRun, RunState]) -> bool:
        """Whether a run has jobs for which a drain must go on.

        A drain does not go on for a run whose last try failed, or whose jobs all wait for other
        ranks.
        """
        return any(
            state.failures == 0 and not all(map(state.waiting.holds, self.jobs(staged_run)))
            for staged_run, state in runs.items()
        )

    def left(self, *, all_must_be_known: bool) -> int:
        """Return how many jobs are still staged in the directories that can be read.

        Raises:
            StagingError: with `all_must_be_known`, some directory cannot be read.
        """
        staged_count = sum(len(self.jobs(staged_run)) for staged_run in self.staged_runs() or ())
        if all_must_be_known:
            for path, error in list(self._unreadable.items()):  # reports the first only
                subject, failure = str(path), str(error)
                if isinstance(error, StagingRefused):
                    subject, failure = error.subject, error.found
                raise StagingError(
                    subject,
                    found=f"{failure}; {staged_count} checkpoints are still staged in other "
                    "directories",
                    expected="a directory whose jobs can be read",
                    next_step="repair or remove it; then run recpoint agent --once again",
                )
        return staged_count


def staged_before(job_file: Path, moment: float) -> bool:
    """Whether a job was staged before `moment` (seconds since the epoch); False if it is gone."""
    try:
        return job_file.stat().st_mtime < moment
    except OSError:
        return False


def is_dropped(job_file: Path) -> bool:
    """Whether the trainer has cancelled a job; dropping it needs no store, so it does not wait."""
    try:
        return is_cancelled(job_file)
    except (FormatError, OSError, StagingRefused):
        return False  # the error is reported when the job is tried


_Log = logging.LoggerAdapter[logging.Logger]


class AgentJobs:
    """Does the jobs of runs; several threads may use it, each for another run.

    Args:
        queue: lists the jobs.
        persist: persists one job.
        ends: whether no further job may be begun.
        tell: called with the run when its status has changed.
        committed: called with the run and the job when a job of rank 0 was committed.
    """

    def __init__(
        self,
        queue: AgentQueue,
        persist: AgentPersist,
        *,
        ends: Callable[[], bool],
        tell: Callable[[StagedRun], None],
        committed: Callable[[StagedRun, Job], None],
    ) -> None:
        self._queue = queue
        self._persist = persist
        self._ends = ends
        self._tell = tell
        self._committed = committed

    def serve_run(self, staged_run: StagedRun, state: RunState) -> None:
        """Do a run's jobs until none is left or the rest must wait."""
        try:
            while not self._ends():
                job_file = self._queue.next_job(staged_run, state)
                if job_file is None or not self._serve_job(staged_run, state, job_file):
                    break
            self._persist.settle(state)
            jobs = self._queue.jobs(staged_run)
            state.waiting.keep(jobs)
            for finished in state.opened.keys() - set(jobs):
                del state.opened[finished]
        finally:
            state.job = None

    def _serve_job(self, staged_run: StagedRun, state: RunState, job_file: Path) -> bool:
        """Do one job; False if it is to be tried again later, and the run must wait."""
        log = job_log(str(job_file))
        opened: PersistJob | None = None
        job: Job | None = None
        try:
            # Only a job that waits for other ranks stays open; after a failure it is opened again.
            opened = state.opened.pop(job_file, None) or _opened(job_file)
            if opened is not None and state.waiting.holds(job_file) and not is_dropped(job_file):
                ranks = _ranks_awaited(opened)
                if ranks:
                    _wait(state, opened, ranks, log)
                    return True
            state.job = job_file.stem
            self._tell(staged_run)
            if opened is not None:
                job = opened.job
                if state.run_id != job.run:
                    expect_end(staged_run, job)
                state.run_url, state.run_id = job.run_url, job.run
                state.saw_cut(job.generation, job.step, job.snapshot_ms)
            if not job_files.finish_answered(job_file):
                self._persist.persist(job_file, opened, state, log)
            state.failures = state.unforeseen = 0
            if opened is not None and job_file.exists():
                # The part is stored, but the job is not answered: it waits for other ranks.
                _wait(state, opened, opened.ranks_awaited(), log)
                return True
            state.jobs_done += 1
            state.waiting.look_soon()
            state.last_error = state.answered(job_file, job)
            if job is not None and job.rank == 0 and state.last_error is None:
                self._committed(staged_run, job)
            return True
        except Exception as error:
            # No error of one job may end the agent, which serves the other runs too.
            if not job_file.exists():
                state.unforeseen = 0
                state.answered(job_file, job)
                return True
            if isinstance(error, RanksMissing) and opened is not None:
                state.failures = state.unforeseen = 0
                _wait(state, opened, error.ranks, log)
                return True
            if self._ends() and not isinstance(error, RecpointError):
                return False  # caused by stopping in the middle of the job, not by the job
            if not postpone_or_reject(state, job_file, error, log):
                return False
            state.answered(job_file, None)
            return True


def _wait(state: RunState, job: PersistJob, ranks: tuple[int, ...], log: _Log) -> None:
    state.opened[job.path] = job
    late = state.waiting.waits(job.path, ranks, of=job.job.ranks)
    if late is not None:
        log.warning("%s", late)


def _opened(job_file: Path) -> PersistJob | None:
    try:
        return PersistJob.open(job_file)
    except FormatError:
        return None  # `persist_job` rejects it


def _ranks_awaited(job: PersistJob) -> tuple[int, ...]:
    """Return the ranks a job still waits for; none too if it is broken: persisting it reports that.

    Raises:
        RecpointError: the store cannot be asked now.
    """
    try:
        return job.ranks_awaited()
    except RecpointError as error:
        if classify(error) == "deferred":
            raise
        return ()
