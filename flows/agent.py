"""The resident agent of a host: takes staged jobs to the store, whatever Prefect is doing.

Jobs of one run are done strictly in order, since each increment needs the one before it; runs do
not wait for each other. A job that waits for other ranks has done its part: those after it go on.
A job stays staged until it is committed or can never be: a store that is away for a week costs
retries, not checkpoints.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal

from recpoint.catalog.consolidation.consolidate_plan import ConsolidationTriggers
from recpoint.catalog.persisting import persist
from recpoint.catalog.staging import staged
from recpoint.catalog.staging.agent_lock import AGENT, DRAIN
from recpoint.catalog.staging.cancel import is_cancelled
from recpoint.errors import FormatError, RanksMissing, RecpointError, StagingError
from recpoint.flows.agent_end import leave_soon, stopped_by_signals
from recpoint.flows.agent_failures import postpone, postpone_or_reject
from recpoint.flows.agent_memory import FreedMemory
from recpoint.flows.agent_observation import AgentObservation, observe_agent
from recpoint.flows.agent_persist import AgentPersist
from recpoint.flows.agent_runs import RunState
from recpoint.flows.agent_turn import turn_of
from recpoint.flows.agent_waiting import NAME_AFTER_SECONDS, WaitingJobs
from recpoint.flows.background import BackgroundConsolidation, Which
from recpoint.flows.background_sweep import (
    SWEEP_EVERY_SECONDS,
    BackgroundSweep,
    require_sweep_period,
)
from recpoint.flows.ended_slots import free_ended_slots
from recpoint.flows.prefect_gate import PrefectGate
from recpoint.flows.training_ends import expect_end, tell_ended_trainings
from recpoint.format.job import Job
from recpoint.tasks.job_name import job_log

__all__ = ["Agent", "run_agent"]

_LOG = logging.getLogger("recpoint.agent")

_POLL_SECONDS = 0.2
_STATUS_SECONDS = 5.0
_DRAIN_SECONDS = 25.0
_TELL_SECONDS = 5.0
_RUNS_AT_ONCE = 4


def run_agent(
    staging: Path | str | None = None,
    *,
    once: bool = False,
    prefect: Literal["auto", "off"] = "auto",
    consolidate: Which = "auto",
    consolidate_when: ConsolidationTriggers | None = None,
    name_ranks_after: float = NAME_AFTER_SECONDS,
    sweep_every: float | None = SWEEP_EVERY_SECONDS,
    watch: Callable[[Agent], AbstractContextManager[object]] | None = None,
) -> int:
    """Serve a staging area until SIGTERM or SIGINT, or, with `once`, until it is drained.

    On a signal the jobs at work are finished within 25 seconds, or stay staged for the next agent.
    Where a sweep or drain is at work there, it is waited for.

    Args:
        staging: the staging area; the default one if None.
        once: return when nothing is left that can be done now.
        prefect: `auto`: run flows when an API answers, and start a local server when none is
            configured; `off`: never.
        consolidate: merge chains in the background, when nothing is staged: of runs of policy
            `continuous` (`auto`), of all, or of none (`off`).
        consolidate_when: from when on; the defaults if None.
        name_ranks_after: seconds that a checkpoint of several ranks waits for the others' parts
            before status, log and metrics name them.
        sweep_every: seconds between sweeps of a run, in the background, and not with `once`;
            None: never.
        watch: entered with the agent while it serves, for who exports what it observes.

    Returns:
        Number of jobs that are still staged.

    Raises:
        StagingError: another agent serves this staging area; or, with `once` and after all else is
            done, jobs cannot be read.
        SettingsError: `sweep_every` is less than a second.
    """
    require_sweep_period(sweep_every)
    root = staged.default_staging_root() if staging is None else Path(staging)
    with turn_of(DRAIN if once else AGENT, root) as may_serve:
        if not may_serve:
            return sum(len(staged.staged_jobs(run)) for run in staged.run_directories(root))
        gate = PrefectGate(enabled=prefect == "auto")
        agent = Agent(
            root,
            gate=gate,
            consolidate=consolidate,
            consolidate_when=consolidate_when,
            name_ranks_after=name_ranks_after,
            sweep_every=None if once else sweep_every,
        )
        watched = nullcontext() if watch is None else watch(agent)
        with watched, stopped_by_signals(agent.stop):
            left = agent.serve(once=once)
            if agent.was_stopped:
                leave_soon(at_once=agent.works)
            return left


class Agent:
    """The agent of a staging area that is already locked.

    Args:
        staging: the staging area.
        gate: says when Prefect can be used.
        consolidate, consolidate_when, name_ranks_after, sweep_every: as for `run_agent`.
    """

    def __init__(
        self,
        staging: Path,
        *,
        gate: PrefectGate,
        consolidate: Which = "auto",
        consolidate_when: ConsolidationTriggers | None = None,
        name_ranks_after: float = NAME_AFTER_SECONDS,
        sweep_every: float | None = None,
    ) -> None:
        self._staging = staging
        self._name_ranks_after = name_ranks_after
        self._gate = gate
        self.was_stopped = False
        self._ended = False
        self._runs: dict[Path, RunState] = {}
        self._persist = AgentPersist(gate)
        self._unreadable: dict[Path, OSError] = {}
        self._places = threading.BoundedSemaphore(_RUNS_AT_ONCE)
        self._freed = FreedMemory()
        self._background = BackgroundConsolidation(
            which=consolidate,
            triggers=consolidate_when,
            prefect_url=lambda: gate.api_url,
            tell=self._tell,
        )
        self._sweeps = BackgroundSweep(
            staging,
            every_seconds=sweep_every,
            prefect_url=lambda: gate.api_url,
            tell=self._tell,
        )

    def stop(self) -> None:
        """Take no further job; `serve` returns when those at work are done.

        Takes no lock: a signal may call it wherever the main thread is.
        """
        self.was_stopped = True

    @property
    def _ends(self) -> bool:
        return self.was_stopped or self._ended

    @property
    def works(self) -> bool:
        """Whether a thread is at work on a job, or tells of one, also after `serve` has ended."""
        return self._working() or bool(self._persist.telling)

    def observe(self) -> AgentObservation:
        """What there is to be seen of it now; any thread may ask, and nothing waits."""
        return observe_agent(
            self._staging,
            dict(self._runs),
            prefect=self._gate.api_url is not None,
            consolidations=self._background.done,
        )

    def serve(self, *, once: bool = False) -> int:
        """Work until stopped, or until nothing is left to do now; number of jobs still staged.

        Raises:
            StagingError: with `once`, jobs cannot be read, so that nobody knows how many there are.
        """
        run_dirs = staged.run_directories(self._staging)
        for run_dir in run_dirs:
            try:
                staged.clean(run_dir)
            except OSError as error:
                _LOG.warning("%s: cannot be cleaned: %s", run_dir.name, error)
        self._gate.start()
        self._background.start(run_dirs)
        self._sweeps.start()
        _LOG.info("serving %s", self._staging)
        told = 0.0
        try:
            while not self._ends:
                busy = self._look() or self._working()
                self._background.give_way(busy)
                self._sweeps.give_way(busy)
                if once and not busy and not self._due() and self._background.idle:
                    break
                if time.monotonic() - told >= _STATUS_SECONDS:
                    told = time.monotonic()
                    for run_dir in list(self._runs):
                        self._tell(run_dir)
                    free_ended_slots(self._runs)
                    self._freed.give_back(self._tries())
                    if self._gate.api_url is not None:
                        tell_ended_trainings(self._runs)
                time.sleep(_POLL_SECONDS)
        finally:
            self._ended = True
            self._gate.stop()
            self._background.stop()
            self._sweeps.stop()
            self._drain()
            free_ended_slots(self._runs)
        return self._left(once=once)

    # --- which run is next ---------------------------------------------------------------------

    def _look(self) -> bool:
        """Start a thread for each run that has something to do and nobody who does it.

        Returns:
            Whether there is such a run, also where no further thread may be started.
        """
        run_dirs = self._run_directories()
        if run_dirs is None:
            return False
        for gone in self._runs.keys() - set(run_dirs):
            if not self._runs[gone].works:
                del self._runs[gone]
                self._unreadable.pop(gone, None)
                self._background.forget(gone)
        found = False
        for run_dir in run_dirs:
            state = self._runs.get(run_dir)
            if state is None:
                state = RunState(waiting=WaitingJobs(self._name_ranks_after))
                self._runs[run_dir] = state
            job_file = self._due_job(run_dir, state)
            found = found or job_file is not None
            if job_file is not None and self._places.acquire(blocking=False):
                self._begin(run_dir, state, job_file)
        return found

    def _begin(self, run_dir: Path, state: RunState, job_file: Path) -> None:
        """Start the thread of a run, whose place is taken; later where the host has none left."""
        thread = threading.Thread(
            target=self._serve_run, args=(run_dir, state), name=run_dir.name, daemon=True
        )
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._places.release()
            postpone(state, error, job_log(str(job_file)))
            self._tell(run_dir)
            return
        state.thread = thread

    def _jobs(self, run_dir: Path) -> list[Path]:
        """The run's jobs; none while its directory cannot be read: others must not wait for it."""
        try:
            jobs = staged.staged_jobs(run_dir)
        except OSError as error:
            if run_dir not in self._unreadable:
                _LOG.warning("%s: its jobs cannot be read: %s", run_dir.name, error)
            self._unreadable[run_dir] = error
            return []
        self._unreadable.pop(run_dir, None)
        return jobs

    def _run_directories(self) -> list[Path] | None:
        """Those of all runs; None while the staging area cannot be read."""
        try:
            run_dirs = staged.run_directories(self._staging)
        except OSError as error:
            if self._staging not in self._unreadable:
                _LOG.warning("cannot look into %s: %s", self._staging, error)
            self._unreadable[self._staging] = error
            return None
        self._unreadable.pop(self._staging, None)
        return run_dirs

    def _left(self, *, once: bool) -> int:
        """How many jobs are still staged; with `once` an error where nobody can say."""
        left = sum(len(self._jobs(run_dir)) for run_dir in self._run_directories() or ())
        if once and not self.was_stopped:
            for path, error in list(self._unreadable.items()):  # one is enough to mend
                raise StagingError(
                    str(path),
                    found=f"{error}; {left} checkpoints are still staged elsewhere here",
                    expected="a directory whose jobs can be read",
                    next_step="mend it, or take it away; then recpoint agent --once again",
                )
        return left

    def _due_job(self, run_dir: Path, state: RunState) -> Path | None:
        """The job that a thread is to be started for now."""
        if state.works or not state.is_to_be_looked_at():
            return None
        job_file = self._next_job(run_dir, state)
        if job_file is None:
            return None
        due = time.monotonic() >= state.retry_at or _is_cancelled(job_file)
        return job_file if due else None

    def _next_job(self, run_dir: Path, state: RunState) -> Path | None:
        """The first job that something can be done about now, as far as one knows."""
        jobs = self._jobs(run_dir)
        if jobs:
            state.jobs_seen = time.monotonic()
        for job_file in jobs:
            if state.waiting.is_due(job_file) or _is_cancelled(job_file):
                return job_file
        return None

    def _working(self) -> bool:
        return any(state.works for state in self._runs.values())

    def _tries(self) -> int:
        """How often anything was done for any job, whatever came of it."""
        return sum(
            state.jobs_done + sum(state.facts.failures.values()) for state in self._runs.values()
        )

    def _due(self) -> bool:
        """Whether a run has jobs that have not failed yet (`once` does not wait for what has, nor
        for other ranks)."""
        return any(
            state.failures == 0 and not all(map(state.waiting.holds, self._jobs(run_dir)))
            for run_dir, state in self._runs.items()
        )

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        for state in self._runs.values():
            if state.thread is not None:
                state.thread.join(max(0.0, deadline - time.monotonic()))
        deadline = min(deadline, time.monotonic() + _TELL_SECONDS)
        for thread in self._persist.telling:
            thread.join(max(0.0, deadline - time.monotonic()))
        for run_dir, state in self._runs.items():
            if state.works:
                _LOG.warning("%s: %s stays staged", run_dir.name, state.job)
            self._tell(run_dir)

    # --- one run -------------------------------------------------------------------------------

    def _serve_run(self, run_dir: Path, state: RunState) -> None:
        try:
            while not self._ends:
                job_file = self._next_job(run_dir, state)
                if job_file is None or not self._serve_job(run_dir, state, job_file):
                    break
            state.waiting.keep(self._jobs(run_dir))
        finally:
            state.job = None
            self._places.release()
        self._tell(run_dir)

    def _serve_job(self, run_dir: Path, state: RunState, job_file: Path) -> bool:
        """Do one job; False if it has to wait, and with it the run."""
        log = job_log(str(job_file))
        job: Job | None = None
        try:
            if state.waiting.holds(job_file) and not _is_cancelled(job_file):
                ranks = _ranks_awaited(job_file)
                if ranks:
                    self._wait(state, job_file, ranks, log)
                    return True
            state.job = job_file.stem
            self._tell(run_dir)
            job = self._readable(job_file)
            if job is not None:
                if state.run_id != job.run:
                    expect_end(run_dir, job)
                state.run_url, state.run_id = job.run_url, job.run
                state.saw_cut(job.generation, job.step, job.snapshot_ms)
            if not staged.finish_answered(job_file):
                self._persist.persist(job_file, state, log)
            state.failures = state.unforeseen = 0
            if job_file.exists():  # a flow has ended without an answer: its part is stored
                self._wait(state, job_file, persist.look_again(job_file), log)
                return True
            state.jobs_done += 1
            state.waiting.look_soon()
            state.last_error = state.answered(job_file, job)
            if job is not None and job.rank == 0 and state.last_error is None:
                self._background.committed(run_dir, job)
            return True
        except Exception as error:
            # Whatever it is, it is this job's: the agent goes on with the other runs.
            if not job_file.exists():
                state.unforeseen = 0
                state.answered(job_file, job)
                return True
            if isinstance(error, RanksMissing):
                state.failures = state.unforeseen = 0
                self._wait(state, job_file, error.ranks, log)
                return True
            if self._ends and not isinstance(error, RecpointError):
                return False  # of an end in the middle of it, which says nothing of the job
            if not postpone_or_reject(state, job_file, error, log):
                return False
            state.answered(job_file, None)
            return True

    def _wait(
        self,
        state: RunState,
        job_file: Path,
        ranks: tuple[int, ...],
        log: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        late = state.waiting.waits(job_file, ranks)
        if late is not None:
            log.warning("%s", late)

    def _readable(self, job_file: Path) -> Job | None:
        try:
            return staged.read_job(job_file)
        except (OSError, FormatError):
            return None  # it is rejected, or tried again, by who persists it

    def _tell(self, run_dir: Path) -> None:
        state = self._runs.get(run_dir)
        if state is None:
            return
        try:
            staged.write_status(
                run_dir,
                {
                    "pid": os.getpid(),
                    "alive_ms": _now_ms(),
                    **state.status(),
                    "prefect_ui": self._gate.ui_url,
                    "consolidation": self._background.status(run_dir),
                    "sweep": self._sweeps.status(run_dir),
                },
            )
        except OSError as error:
            _LOG.warning("%s: no status could be written: %s", run_dir.name, error)


def _ranks_awaited(job_file: Path) -> tuple[int, ...]:
    """Ranks that a job still waits for; none also where persisting it is to find what is wrong."""
    try:
        return persist.look_again(job_file)
    except RecpointError as error:
        if persist.classify(error) == "deferred":
            raise
        return ()


def _is_cancelled(job_file: Path) -> bool:
    """Whether a job is to be dropped, so that it need not wait for the store to come back."""
    try:
        return is_cancelled(job_file)
    except (FormatError, OSError):
        return False  # what is wrong with it is told when its turn comes


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
