"""Runs the agent of a host: takes its lock, serves all runs in a loop, and ends on a signal.

Returning freed memory to the system. glibc keeps freed memory for later use, in an arena for each
of a few threads, and returns only the part behind the last block in use. So the agent's resident
memory would grow a little with each checkpoint, although the amount it uses stays the same.

The lock of an agent. It waits for a sweep or drain, which ends by itself, but not for an agent. If
it did not wait for a sweep, the host's runs would have no agent until somebody starts one. The lock
may be lost while the agent serves (`locks.is_lost`). Trainers would then see no agent, and a second
one could start.

The resident agent of a host: persists staged jobs, also while Prefect is away. The agent decides
which run is next. Runs do not wait for each other, because each has its own thread (`jobs.py`). A
job stays staged until it is committed or can never be committed: a store that is away for a week
costs retries, not checkpoints.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
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
from recpoint.catalog.staging.agent_lock import AGENT, DRAIN, AgentLock, AtWork
from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.free import free_slots_of_ended, left_behind
from recpoint.catalog.staging.notes import write_status
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import StagingError, StagingRefused
from recpoint.flows.agent.consolidations import BackgroundConsolidation, Which
from recpoint.flows.agent.ended_trainings import tell_ended_trainings
from recpoint.flows.agent.failed_jobs import postpone
from recpoint.flows.agent.gate import PrefectGate
from recpoint.flows.agent.jobs import AgentJobs
from recpoint.flows.agent.observation import AgentObservation, observe_agent
from recpoint.flows.agent.persist import AgentPersist
from recpoint.flows.agent.queue import AgentQueue
from recpoint.flows.agent.runs import RunState
from recpoint.flows.agent.sweeps import SWEEP_EVERY_SECONDS, BackgroundSweep, require_sweep_period
from recpoint.flows.agent.waiting_jobs import NAME_AFTER_SECONDS, WaitingJobs
from recpoint.tasks.job_name import job_log
from recpoint.units import bytes_text

__all__ = ["Agent", "FreedMemory", "run_agent"]


_LEAVE_SECONDS: Final = 3.0


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT call `stop`; outside the main thread, do nothing.

    Args:
        stop: called between any two steps of the main thread, which may hold any lock at that
            moment. So it must not take a lock, nor set a `threading.Event`, which contains one.
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

    A normal exit waits for upload threads, which may take hours, and for Prefect, whose API may
    hang. Both may be stopped anywhere: a job that is not committed stays staged.

    Args:
        at_once: end the process in this call, because a thread is still at work. Python's normal
            exit would tear down modules under that thread, and its job would seem to be at fault.
        status: the exit status if this function ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    leave = threading.Timer(_LEAVE_SECONDS, os._exit, (status,))
    leave.daemon = True
    try:
        leave.start()
    except RuntimeError:  # the host has no thread left
        os._exit(status)
    if at_once:
        logging.shutdown()  # may block; the timer limits that
        sys.stdout.flush()
        os._exit(status)


#: Rarely, because a call takes milliseconds in which allocating threads wait.
_EVERY_SECONDS: Final = 60.0


class FreedMemory:
    """Returns memory that this process has freed to the system.

    Args:
        every_seconds: the least time between two calls of `malloc_trim`.
    """

    def __init__(self, *, every_seconds: float = _EVERY_SECONDS) -> None:
        # Only glibc has it. Other libraries return memory by themselves, or offer no such call.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._every_seconds = every_seconds
        self._given_at = time.monotonic()
        self._done = 0

    def give_back(self, done: int) -> bool:
        """Return freed memory to the system if work was done and the last call is long enough ago.

        Args:
            done: the amount of work done so far, in any unit that only grows.

        Returns:
            Whether memory was returned.
        """
        now = time.monotonic()
        if self._trim is None or done == self._done or now - self._given_at < self._every_seconds:
            return False
        self._given_at, self._done = now, done
        self._trim(ctypes.c_size_t(0))
        return True


_LOG = logging.getLogger("recpoint.agent")


def free_ended_slots(runs: Mapping[StagedRun, RunState]) -> None:
    """Remove the slots of runs that have ended; cheap if there are none.

    Args:
        runs: the state of each run.
    """
    for staged_run, state in runs.items():
        if state.works:
            continue
        try:
            freed = free_slots_of_ended(staged_run)
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: its slots cannot be removed: %s", staged_run.name, error)
            continue
        if freed:
            size = sum(slot.size_bytes for slot in freed)
            _LOG.info("%s has ended: %d bytes of slots are free again", staged_run.name, size)


_POLL_SECONDS = 0.2


class Turn:
    """Keeps the lock of an agent while it serves.

    Args:
        lock: the lock, which the agent holds.
    """

    def __init__(self, lock: AgentLock) -> None:
        self._lock = lock
        self._lost_to: AtWork | None = None
        self._told = ""

    def keep(self) -> bool:
        """Take the lock again if its file was removed; False: another agent has taken it.

        If a sweep or drain holds the lock meanwhile, or its directory is gone, the next call tries
        again.
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
        """Raise if another agent has taken the lock.

        Raises:
            StagingError: names the other agent.
        """
        if self._lost_to is not None:
            raise self._lock.refused(self._lost_to)


@contextmanager
def turn_of(who: AtWork, staging: Path) -> Iterator[Turn | None]:
    """Take the lock of a staging area, after waiting for a sweep or drain that holds it.

    Yields:
        The lock, held; None: SIGTERM or SIGINT ended the wait.

    Raises:
        StagingError: another agent holds the lock, or the staging area may not be used.
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


_STATUS_SECONDS = 5.0
_DRAIN_SECONDS = 25.0
_TELL_SECONDS = 5.0
_RUNS_AT_ONCE = 4
#: Exit status of a process that ends with a StagingError (`cli.reporting.EXIT_CODES`).
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

    On a signal, jobs at work have 25 seconds to finish; the others stay staged for the next agent.
    If a sweep or drain is at work in the staging area, the agent waits for its end first.

    Args:
        staging: the staging area; the default one if None.
        once: return when no job is left that can be done now.
        prefect: `auto`: run flows when an API answers, and start a local server when none is
            configured; `off`: never use Prefect.
        consolidate: whose chains to merge in the background, while nothing is staged: `auto`: runs
            with policy `continuous`; `all`: all runs; `off`: none.
        consolidate_when: the chain length, restore cost and dead share from which on merging pays;
            the defaults if None.
        name_ranks_after: seconds that a checkpoint waits for other ranks' parts before status, log
            and metrics name the missing ranks.
        sweep_every: seconds between background sweeps of a run; None: never. With `once`, there are
            no sweeps.
        watch: called with the agent; the agent serves inside the context manager it returns. For
            exporting what the agent observes.

    Returns:
        Number of jobs that are still staged.

    Raises:
        StagingError: another agent serves this staging area, or took over after the lock file of
            this one was removed; or, with `once`, some jobs cannot be read (raised at the end).
        SettingsError: `sweep_every` is less than a second.
    """
    require_sweep_period(sweep_every)
    root = area.default_staging_root() if staging is None else Path(staging)
    with turn_of(DRAIN if once else AGENT, root) as turn:
        if turn is None:
            return sum(len(run.staged_jobs()) for run in staged_runs(root))
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
                if agent.works:  # `leave_soon` ends the process, so the error is logged here
                    _LOG.error("%s", error)
                    leave_soon(at_once=True, status=_STATUS_REFUSED)
                raise
            if agent.was_stopped:
                leave_soon(at_once=agent.works)
            return left


class Agent:
    """Serves a staging area that the caller has locked.

    Args:
        staging: the staging area.
        gate: says when Prefect can be used.
        consolidate, consolidate_when, name_ranks_after, sweep_every: as for `run_agent`.
        keep_turn: called every few seconds to keep the lock; False: another agent has taken it.
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
        self._runs: dict[StagedRun, RunState] = {}
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
        """Begin no further job; `serve` returns when the jobs at work are done.

        Takes no lock, because a signal handler may call it anywhere in the main thread.
        """
        self.was_stopped = True

    @property
    def _ends(self) -> bool:
        return self.was_stopped or self._ended

    @property
    def works(self) -> bool:
        """Whether a thread is at work on a job or reports one to Prefect, even after `serve`."""
        return self._working() or bool(self._persist.telling)

    def observe(self) -> AgentObservation:
        """Return the agent's present state for metrics; any thread may call it; it never waits."""
        return observe_agent(
            self._staging,
            dict(self._runs),
            prefect=self._gate.api_url is not None,
            consolidations=self._background.done,
        )

    def serve(self, *, once: bool = False) -> int:
        """Persist jobs until stopped, or, with `once`, until no job can be done now.

        Returns:
            Number of jobs that are still staged.

        Raises:
            StagingError: with `once`, some jobs cannot be read, so their number is unknown.
        """
        found_runs = staged_runs(self._staging)
        for staged_run in found_runs:
            try:
                staged_run.clean()
            except (OSError, StagingRefused) as error:
                _LOG.warning("%s: cannot be cleaned: %s", staged_run.name, error)
        self._gate.start()
        self._background.start(found_runs)
        self._sweeps.start()
        _LOG.info("serving %s", self._staging)
        self._log_left_behind()
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
                    for staged_run in list(self._runs):
                        self._write_status(staged_run)
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

    def _log_left_behind(self) -> None:
        """Log in one line what killed trainers left here: many runs may share the area."""
        left = left_behind(self._staging)
        if len(left) == 1:
            _LOG.info("%s", left[0])
        elif left:
            _LOG.info(
                "%s of slots of %d runs wait for new starts, and their trainers are gone: "
                "RECPOINT_STAGING=%s recpoint info names them, and what frees them",
                bytes_text(sum(one.size_bytes for one in left)),
                len(left),
                shlex.quote(str(self._staging)),
            )

    def _begin_due_runs(self) -> bool:
        """Start a thread for each run that has a due job and no thread.

        Returns:
            Whether there is such a run, even if no further thread may be started.
        """
        found_runs = self._queue.staged_runs()
        if found_runs is None:
            return False
        for gone in self._runs.keys() - set(found_runs):
            if not self._runs[gone].works:
                del self._runs[gone]
                self._queue.forget(gone)
                self._background.forget(gone)
        found = False
        for staged_run in found_runs:
            state = self._runs.get(staged_run)
            if state is None:
                state = RunState(waiting=WaitingJobs(self._name_ranks_after))
                self._runs[staged_run] = state
            job_file = self._queue.due_job(staged_run, state)
            found = found or job_file is not None
            if job_file is not None and self._places.acquire(blocking=False):
                self._begin(staged_run, state, job_file)
        return found

    def _begin(self, staged_run: StagedRun, state: RunState, job_file: Path) -> None:
        """Start the thread of a run, for which `_places` was acquired; if that fails, try later."""
        thread = threading.Thread(
            target=self._serve_run, args=(staged_run, state), name=staged_run.name, daemon=True
        )
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            self._places.release()
            postpone(state, error, job_log(str(job_file)))
            self._write_status(staged_run)
            return
        state.thread = thread

    def _serve_run(self, staged_run: StagedRun, state: RunState) -> None:
        try:
            self._jobs.serve_run(staged_run, state)
        finally:
            self._places.release()
        self._write_status(staged_run)

    def _is_drained(self) -> bool:
        return not self._queue.has_untried(self._runs) and self._background.idle

    def _working(self) -> bool:
        return any(state.works for state in self._runs.values())

    def _tries(self) -> int:
        """Return the number of tries of all jobs, whatever their result."""
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
        for staged_run, state in self._runs.items():
            if state.works:
                _LOG.warning("%s: %s stays staged", staged_run.name, state.job)
            self._write_status(staged_run)

    def _write_status(self, staged_run: StagedRun) -> None:
        state = self._runs.get(staged_run)
        if state is None:
            return
        try:
            write_status(
                staged_run,
                {
                    "pid": os.getpid(),
                    "alive_ms": now_ms(),
                    **state.status(),
                    "prefect_ui": self._gate.ui_url,
                    "consolidation": self._background.status(staged_run),
                    "sweep": self._sweeps.status(staged_run),
                },
            )
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: no status could be written: %s", staged_run.name, error)
