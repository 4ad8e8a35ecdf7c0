"""Persists the staged jobs of a host: each run's in order, as Prefect flows or without Prefect.

The queue: which job of a run is next, and when. A directory that cannot be read does not hold up
the others: the agent logs the error once, and treats the directory as empty until it can be read.

The jobs of one run: strictly in order, because each increment needs the one before it. The
exception: if a job's part is stored and it only waits for other ranks, the next jobs go on. An
error concerns its own run only: the job is tried again later, or rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from recpoint.catalog.persist.persist import PersistJob, classify
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.errors import FormatError, RanksMissing, RecpointError
from recpoint.flows.agent.ended_trainings import expect_end
from recpoint.flows.agent.failed_jobs import postpone_or_reject
from recpoint.flows.agent.persist import AgentPersist
from recpoint.flows.agent.queue import AgentQueue, is_dropped
from recpoint.flows.agent.runs import RunState
from recpoint.format.job import Job
from recpoint.tasks.job_name import job_log

__all__ = [
    "AgentJobs",
]


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
            self._persist.end_answered_run(state)
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
                if opened.waits_for_commit and state.waiting.gives_way(job_file, opened.job.parts):
                    state.opened[job_file] = opened
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
