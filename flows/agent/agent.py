"""Runs the agent of a host: its turn, its loop, its end, and the memory it gives back."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Final, Literal

from recpoint.catalog.consolidate.plan import ConsolidationTriggers
from recpoint.catalog.staging import area
from recpoint.catalog.staging.agent import AGENT, DRAIN, AgentLock, AtWork
from recpoint.catalog.staging.free import free_slots_of_ended
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import StagingError, StagingRefused
from recpoint.flows.agent.consolidations import BackgroundConsolidation, Which
from recpoint.flows.agent.gate import PrefectGate
from recpoint.flows.agent.jobs import AgentJobs, AgentPersist, AgentQueue
from recpoint.flows.agent.observation import AgentObservation, observe_agent
from recpoint.flows.agent.runs import (
    NAME_AFTER_SECONDS,
    RunState,
    WaitingJobs,
    postpone,
    tell_ended_trainings,
)
from recpoint.flows.agent.sweeps import SWEEP_EVERY_SECONDS, BackgroundSweep, require_sweep_period
from recpoint.tasks.job_name import job_log

__all__ = ["Agent", "FreedMemory", "run_agent"]


# How an agent ends: on a signal, and then soon.


_LEAVE_SECONDS: Final = 3.0


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop`; only the main thread can be told of signals.

    Args:
        stop: called between any two steps of the main thread, which may hold any lock there: it
            must take none, nor set a `threading.Event`, which has one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def call_stop(number: int, frame: FrameType | None) -> None:
        stop()

    before = {
        number: signal.signal(number, call_stop) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_soon(*, at_once: bool, status: int = 0) -> None:
    """End the process in a few seconds, unless it ends by itself.

    Python waits at its end for the threads of an upload, which may take hours, and Prefect for an
    API that hangs. Both may be stopped anywhere: what is not committed stays staged.

    Args:
        at_once: end it here, since a thread still works. Python's own end takes from it what it
            works with, piece by piece, and what that leads to would look like a fault of its job.
        status: of the process, where this ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    leave = threading.Timer(_LEAVE_SECONDS, os._exit, (status,))
    leave.daemon = True
    try:
        leave.start()
    except RuntimeError:  # no thread is left on this host
        os._exit(status)
    if at_once:
        logging.shutdown()  # which may wait, for no longer than the timer
        sys.stdout.flush()
        os._exit(status)


# Giving back to the system what an agent has freed.
#
# glibc keeps what is freed for who asks next, in an arena for each of a few threads, and gives back
# only what lies behind the last block that is still used. So an agent whose blocks in use stay the
# same grows nevertheless, a little with each checkpoint, for as long as it lives.


#: It takes milliseconds, in which threads that allocate wait for each other.
_EVERY_SECONDS: Final = 60.0


class FreedMemory:
    """What this process has freed and not given back.

    Args:
        every_seconds: not more often than that.
    """

    def __init__(self, *, every_seconds: float = _EVERY_SECONDS) -> None:
        # Of glibc alone: others give back by themselves, or cannot be asked.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._every_seconds = every_seconds
        self._given_at = time.monotonic()
        self._done = 0

    def give_back(self, done: int) -> bool:
        """Give it back if something was done since the last time.

        Args:
            done: how much was done so far, in any unit that only grows.

        Returns:
            Whether it was time, and the system's library can do it.
        """
        now = time.monotonic()
        if self._trim is None or done == self._done or now - self._given_at < self._every_seconds:
            return False
        self._given_at, self._done = now, done
        self._trim(ctypes.c_size_t(0))
        return True


# Giving back this host's memory, once a training that ended by itself has nothing staged.


_LOG = logging.getLogger("recpoint.agent")


def free_ended_slots(runs: Mapping[Path, RunState]) -> None:
    """Remove the slots of runs that have ended; cheap where there is nothing to do.

    Args:
        runs: the runs by directory.
    """
    for run_dir, state in runs.items():
        if state.works:
            continue
        try:
            freed = free_slots_of_ended(run_dir)
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: its slots cannot be removed: %s", run_dir.name, error)
            continue
        if freed:
            size = sum(slot.size_bytes for slot in freed)
            _LOG.info("%s has ended: %d bytes of slots are free again", run_dir.name, size)


# The turn of an agent: after a sweep or drain, which end by themselves, and beside no other agent.
#
# An agent that ended instead would leave all runs of its host without one until somebody starts it.
# Its lock may be lost while it serves (`locks.is_lost`). Then nothing would tell trainers that
# there is an agent, nor keep another one from starting.


_POLL_SECONDS = 0.2


class Turn:
    """The lock of an agent that serves.

    Args:
        lock: which it holds.
    """

    def __init__(self, lock: AgentLock) -> None:
        self._lock = lock
        self._lost_to: AtWork | None = None
        self._told = ""

    def keep(self) -> bool:
        """Take the lock anew where its file was removed; False: another agent has it by now.

        Beside a sweep or drain that has come meanwhile, and ends by itself, it is tried again, as
        where there is no directory to make it in.
        """
        try:
            other = self._lock.keep()
        except StagingError as error:
            if str(error) != self._told:
                self._told = str(error)
                _LOG.warning("the lock of this agent is lost: %s", error)
            return True
        self._told = ""
        if other is None or other.ends_by_itself:
            return True
        self._lost_to = other
        return False

    def require_kept(self) -> None:
        """Raise where another agent has it.

        Raises:
            StagingError: naming it.
        """
        if self._lost_to is not None:
            raise self._lock.refused(self._lost_to)


@contextmanager
def turn_of(who: AtWork, staging: Path) -> Iterator[Turn | None]:
    """Hold the lock of a staging area once no sweep or drain does.

    Yields:
        The turn; None: SIGTERM or SIGINT has ended the waiting.

    Raises:
        StagingError: another agent holds it, or the staging area may not be used.
    """
    lock = AgentLock(staging, who)
    try:
        yield Turn(lock) if _wait_for(lock) else None
    finally:
        lock.release()


def _wait_for(lock: AgentLock) -> bool:
    stopped = False
    told: AtWork | None = None

    def stop() -> None:
        nonlocal stopped
        stopped = True

    with stopped_by_signals(stop):
        while not stopped and (other := lock.take()) is not None:
            if not other.ends_by_itself:
                raise lock.refused(other)
            if other != told:
                told = other
                _LOG.info("waiting for process %s, %s, which ends by itself", other.process, other)
            time.sleep(_POLL_SECONDS)
    return not stopped


# The resident agent of a host: takes staged jobs to the store, whatever Prefect is doing.
#
# It decides which run is next. Runs do not wait for each other: the jobs of each are done by a
# thread of its own (`jobs.py`). A job stays staged until it is committed or can never be: a
# store that is away for a week costs retries, not checkpoints.


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
    root = area.default_staging_root() if staging is None else Path(staging)
    with turn_of(DRAIN if once else AGENT, root) as turn:
        if turn is None:
            return sum(len(area.staged_jobs(run)) for run in area.run_directories(root))
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
        run_dirs = area.run_directories(self._staging)
        for run_dir in run_dirs:
            try:
                area.clean(run_dir)
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
            area.write_status(
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
