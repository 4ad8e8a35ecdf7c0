"""How an agent does the jobs of one run: strictly in order, since each increment needs the last.

A job that waits for other ranks has done its part: those after it go on. Whatever goes wrong is
that job's, and of no concern to other runs: it is tried again later, or rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from recpoint.catalog.persist.persist import PersistJob, classify
from recpoint.catalog.staging import staged
from recpoint.errors import FormatError, RanksMissing, RecpointError
from recpoint.flows.agent_failures import postpone_or_reject
from recpoint.flows.agent_persist import AgentPersist
from recpoint.flows.agent_queue import AgentQueue, is_dropped
from recpoint.flows.agent_runs import RunState
from recpoint.flows.training_ends import expect_end
from recpoint.format.job import Job
from recpoint.tasks.job_name import job_log

__all__ = ["AgentJobs"]

_Log = logging.LoggerAdapter[logging.Logger]


class AgentJobs:
    """Does jobs; any number of threads may, each those of another run.

    Args:
        queue: where they are.
        persist: takes one of them to the store.
        ends: whether no further job is to be begun.
        tell: called with the run's directory when its status has changed.
        committed: called with the run's directory and a job of its first rank that was committed.
    """

    def __init__(
        self,
        queue: AgentQueue,
        persist: AgentPersist,
        *,
        ends: Callable[[], bool],
        tell: Callable[[Path], None],
        committed: Callable[[Path, Job], None],
    ) -> None:
        self._queue = queue
        self._persist = persist
        self._ends = ends
        self._tell = tell
        self._committed = committed

    def serve_run(self, run_dir: Path, state: RunState) -> None:
        """Do what can be done now of the jobs of a run; returns when the rest has to wait."""
        try:
            while not self._ends():
                job_file = self._queue.next_job(run_dir, state)
                if job_file is None or not self._serve_job(run_dir, state, job_file):
                    break
            jobs = self._queue.jobs(run_dir)
            state.waiting.keep(jobs)
            for gone in state.opened.keys() - set(jobs):
                del state.opened[gone]
        finally:
            state.job = None

    def _serve_job(self, run_dir: Path, state: RunState, job_file: Path) -> bool:
        """Do one job; False if it has to wait, and with it the run."""
        log = job_log(str(job_file))
        opened: PersistJob | None = None
        job: Job | None = None
        try:
            # Kept only if it waits for other ranks: a try again opens all of it anew.
            opened = state.opened.pop(job_file, None) or _opened(job_file)
            if opened is not None and state.waiting.holds(job_file) and not is_dropped(job_file):
                ranks = _ranks_awaited(opened)
                if ranks:
                    _wait(state, opened, ranks, log)
                    return True
            state.job = job_file.stem
            self._tell(run_dir)
            if opened is not None:
                job = opened.job
                if state.run_id != job.run:
                    expect_end(run_dir, job)
                state.run_url, state.run_id = job.run_url, job.run
                state.saw_cut(job.generation, job.step, job.snapshot_ms)
            if not staged.finish_answered(job_file):
                self._persist.persist(job_file, opened, state, log)
            state.failures = state.unforeseen = 0
            if opened is not None and job_file.exists():
                # A flow has ended without an answer: its part is stored.
                _wait(state, opened, opened.ranks_awaited(), log)
                return True
            state.jobs_done += 1
            state.waiting.look_soon()
            state.last_error = state.answered(job_file, job)
            if job is not None and job.rank == 0 and state.last_error is None:
                self._committed(run_dir, job)
            return True
        except Exception as error:
            # Whatever it is, it is this job's: the agent goes on with the other runs.
            if not job_file.exists():
                state.unforeseen = 0
                state.answered(job_file, job)
                return True
            if isinstance(error, RanksMissing) and opened is not None:
                state.failures = state.unforeseen = 0
                _wait(state, opened, error.ranks, log)
                return True
            if self._ends() and not isinstance(error, RecpointError):
                return False  # of an end in the middle of it, which says nothing of the job
            if not postpone_or_reject(state, job_file, error, log):
                return False
            state.answered(job_file, None)
            return True


def _wait(state: RunState, job: PersistJob, ranks: tuple[int, ...], log: _Log) -> None:
    state.opened[job.path] = job
    late = state.waiting.waits(job.path, ranks)
    if late is not None:
        log.warning("%s", late)


def _opened(job_file: Path) -> PersistJob | None:
    try:
        return PersistJob.open(job_file)
    except FormatError:
        return None  # whoever persists it rejects it


def _ranks_awaited(job: PersistJob) -> tuple[int, ...]:
    """Ranks that a job still waits for; none also where persisting it is to find what is wrong."""
    try:
        return job.ranks_awaited()
    except RecpointError as error:
        if classify(error) == "deferred":
            raise
        return ()
