"""The resident agent of a host: takes staged jobs to the store, whatever Prefect is doing.

It decides which run is next. Runs do not wait for each other: the jobs of each are done by a thread
of its own (`agent_jobs.py`). A job stays staged until it is committed or can never be: a store that
is away for a week costs retries, not checkpoints.
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
from recpoint.catalog.staging import staged
from recpoint.catalog.staging.agent_lock import AGENT, DRAIN
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.errors import StagingError, StagingRefused
from recpoint.flows.agent_end import leave_soon, stopped_by_signals
from recpoint.flows.agent_failures import postpone
from recpoint.flows.agent_jobs import AgentJobs
from recpoint.flows.agent_memory import FreedMemory
from recpoint.flows.agent_observation import AgentObservation, observe_agent
from recpoint.flows.agent_persist import AgentPersist
from recpoint.flows.agent_queue import AgentQueue
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
from recpoint.flows.training_ends import tell_ended_trainings
from recpoint.tasks.job_name import job_log

__all__ = ["Agent", "run_agent"]

_LOG = logging.getLogger("recpoint.agent")

_POLL_SECONDS = 0.2
_STATUS_SECONDS = 5.0
_DRAIN_SECONDS = 25.0
_TELL_SECONDS = 5.0
_RUNS_AT_ONCE = 4
#: Of a process that ends with a StagingError (`cli.reporting.EXIT_CODES`).
_STATUS_REFUSED = 2


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
        StagingError: another agent serves this staging area, or has begun to after the lock of this
            one was removed; or, with `once` and after all else is done, jobs cannot be read.
        SettingsError: `sweep_every` is less than a second.
    """
    require_sweep_period(sweep_every)
    root = staged.default_staging_root() if staging is None else Path(staging)
    with turn_of(DRAIN if once else AGENT, root) as turn:
        if turn is None:
            return sum(len(staged.staged_jobs(run)) for run in staged.run_directories(root))
        gate = PrefectGate(enabled=prefect == "auto")
        agent = Agent(
            root,
            gate=gate,
            consolidate=consolidate,
            consolidate_when=consolidate_when,
            name_ranks_after=name_ranks_after,
            sweep_every=None if once else sweep_every,
            keep_turn=turn.keep,
        )
        watched = nullcontext() if watch is None else watch(agent)
        with watched, stopped_by_signals(agent.stop):
            left = agent.serve(once=once)
            try:
                turn.require_kept()
            except StagingError as error:
                if agent.works:  # nothing could be said after that
                    _LOG.error("%s", error)
                    leave_soon(at_once=True, status=_STATUS_REFUSED)
                raise
            if agent.was_stopped:
                leave_soon(at_once=agent.works)
            return left


class Agent:
    """The agent of a staging area that is already locked.

    Args:
        staging: the staging area.
        gate: says when Prefect can be used.
        consolidate, consolidate_when, name_ranks_after, sweep_every: as for `run_agent`.
        keep_turn: makes sure now and then that it is locked still; False: by another agent.
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
        keep_turn: Callable[[], bool] = lambda: True,
    ) -> None:
        self._staging = staging
        self._keep_turn = keep_turn
        self._name_ranks_after = name_ranks_after
        self._gate = gate
        self.was_stopped = False
        self._ended = False
        self._runs: dict[Path, RunState] = {}
        self._persist = AgentPersist(gate)
        self._queue = AgentQueue(staging)
        self._places = threading.BoundedSemaphore(_RUNS_AT_ONCE)
        self._freed = FreedMemory()
        self._background = BackgroundConsolidation(
            which=consolidate,
            triggers=consolidate_when,
            prefect_url=lambda: gate.api_url,
            tell=self._write_status,
        )
        self._sweeps = BackgroundSweep(
            staging,
            every_seconds=sweep_every,
            prefect_url=lambda: gate.api_url,
            tell=self._write_status,
        )
        self._jobs = AgentJobs(
            self._queue,
            self._persist,
            ends=lambda: self._ends,
            tell=self._write_status,
            committed=self._background.committed,
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
            except (OSError, StagingRefused) as error:
                _LOG.warning("%s: cannot be cleaned: %s", run_dir.name, error)
        self._gate.start()
        self._background.start(run_dirs)
        self._sweeps.start()
        _LOG.info("serving %s", self._staging)
        written_at = 0.0
        try:
            while not self._ends:
                busy = self._begin_due_runs() or self._working()
                self._background.give_way(busy)
                self._sweeps.give_way(busy)
                if once and not busy and self._is_drained():
                    break
                if time.monotonic() - written_at >= _STATUS_SECONDS:
                    written_at = time.monotonic()
                    if not self._keep_turn():
                        self.stop()
                        break
                    for run_dir in list(self._runs):
                        self._write_status(run_dir)
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
        return self._queue.left(all_must_be_known=once and not self.was_stopped)

    def _begin_due_runs(self) -> bool:
        """Start a thread for each run that has something to do and nobody who does it.

        Returns:
            Whether there is such a run, also where no further thread may be started.
        """
        run_dirs = self._queue.run_directories()
        if run_dirs is None:
            return False
        for gone in self._runs.keys() - set(run_dirs):
            if not self._runs[gone].works:
                del self._runs[gone]
                self._queue.forget(gone)
                self._background.forget(gone)
        found = False
        for run_dir in run_dirs:
            state = self._runs.get(run_dir)
            if state is None:
                state = RunState(waiting=WaitingJobs(self._name_ranks_after))
                self._runs[run_dir] = state
            job_file = self._queue.due_job(run_dir, state)
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
            self._write_status(run_dir)
            return
        state.thread = thread

    def _serve_run(self, run_dir: Path, state: RunState) -> None:
        try:
            self._jobs.serve_run(run_dir, state)
        finally:
            self._places.release()
        self._write_status(run_dir)

    def _is_drained(self) -> bool:
        return not self._queue.has_untried(self._runs) and self._background.idle

    def _working(self) -> bool:
        return any(state.works for state in self._runs.values())

    def _tries(self) -> int:
        """How often anything was done for any job, whatever came of it."""
        return sum(
            state.jobs_done + sum(state.facts.failures.values()) for state in self._runs.values()
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
            self._write_status(run_dir)

    def _write_status(self, run_dir: Path) -> None:
        state = self._runs.get(run_dir)
        if state is None:
            return
        try:
            staged.write_status(
                run_dir,
                {
                    "pid": os.getpid(),
                    "alive_ms": now_ms(),
                    **state.status(),
                    "prefect_ui": self._gate.ui_url,
                    "consolidation": self._background.status(run_dir),
                    "sweep": self._sweeps.status(run_dir),
                },
            )
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: no status could be written: %s", run_dir.name, error)
