"""The resident agent of a host: takes staged jobs to the store, whatever Prefect is doing.

Jobs of one run are done strictly in order, since each increment needs the one before it; runs do
not wait for each other. A job stays staged until it is committed or can never be: a store that is
away for a week costs retries, not checkpoints.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from recpoint.catalog import persist, staged
from recpoint.errors import FormatError, RecpointError, StagingError, StoreThrottled
from recpoint.flows.prefect_gate import PrefectGate
from recpoint.tasks.job_name import job_log

__all__ = ["Agent", "run_agent"]

_LOG = logging.getLogger("recpoint.agent")

_POLL_SECONDS = 0.2
_STATUS_SECONDS = 5.0
_DRAIN_SECONDS = 25.0
_TELL_SECONDS = 5.0
_LEAVE_SECONDS = 3.0
_RUNS_AT_ONCE = 4

#: Pauses before a job is tried again: doubled from the first on. What no waiting heals (a missing
#: permission) is asked for less often.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = {True: 60.0, False: 300.0}


def run_agent(
    staging: Path | str | None = None,
    *,
    once: bool = False,
    prefect: Literal["auto", "off"] = "auto",
) -> int:
    """Serve a staging area until SIGTERM or SIGINT, or, with `once`, until it is drained.

    On a signal the jobs at work are finished within 25 seconds, or stay staged for the next agent.

    Args:
        staging: the staging area; the default one if None.
        once: return when nothing is left that can be done now.
        prefect: `auto`: run flows when an API answers, and start a local server when none is
            configured; `off`: never.

    Returns:
        Number of jobs that are still staged.

    Raises:
        StagingError: another agent serves this staging area.
    """
    root = staged.default_staging_root() if staging is None else Path(staging)
    with staged.AgentLock(root):
        agent = Agent(root, gate=PrefectGate(enabled=prefect == "auto"))
        with _stopped_by_signals(agent):
            left = agent.serve(once=once)
            if agent.was_stopped:
                _leave_soon()
            return left


@dataclass
class _RunState:
    """What the agent knows about one run."""

    thread: threading.Thread | None = None
    job: str | None = None
    jobs_done: int = 0
    failures: int = 0
    retry_at: float = 0.0
    last_error: str | None = None
    last_error_ms: int | None = None


class Agent:
    """The agent of a staging area that is already locked.

    Args:
        staging: the staging area.
        gate: says when Prefect can be used.
    """

    def __init__(self, staging: Path, *, gate: PrefectGate) -> None:
        self._staging = staging
        self._gate = gate
        self.was_stopped = False
        self._stop = threading.Event()
        self._runs: dict[Path, _RunState] = {}
        self._telling: list[threading.Thread] = []
        self._unreadable: set[Path] = set()
        self._places = threading.BoundedSemaphore(_RUNS_AT_ONCE)

    def stop(self) -> None:
        """Take no further job; `serve` returns when those at work are done."""
        self.was_stopped = True
        self._stop.set()

    def serve(self, *, once: bool = False) -> int:
        """Work until stopped, or until nothing is left to do now; number of jobs still staged."""
        for run_dir in staged.run_directories(self._staging):
            try:
                staged.clean(run_dir)
            except OSError as error:
                _LOG.warning("%s: cannot be cleaned: %s", run_dir.name, error)
        self._gate.start()
        _LOG.info("serving %s", self._staging)
        told = 0.0
        try:
            while not self._stop.is_set():
                self._look()
                if once and not self._working() and not self._due():
                    break
                if time.monotonic() - told >= _STATUS_SECONDS:
                    told = time.monotonic()
                    for run_dir in list(self._runs):
                        self._tell(run_dir)
                self._stop.wait(_POLL_SECONDS)
        finally:
            self._stop.set()
            self._gate.stop()
            self._drain()
        return sum(len(self._jobs(run)) for run in staged.run_directories(self._staging))

    # --- which run is next ---------------------------------------------------------------------

    def _look(self) -> None:
        """Start a thread for each run that has something to do and nobody who does it."""
        try:
            run_dirs = staged.run_directories(self._staging)
        except OSError as error:
            _LOG.warning("cannot look into %s: %s", self._staging, error)
            return
        for gone in self._runs.keys() - set(run_dirs):
            if not self._works(self._runs[gone]):
                del self._runs[gone]
        for run_dir in run_dirs:
            state = self._runs.setdefault(run_dir, _RunState())
            if self._is_due(run_dir, state) and self._places.acquire(blocking=False):
                state.thread = threading.Thread(
                    target=self._serve_run, args=(run_dir, state), name=run_dir.name, daemon=True
                )
                state.thread.start()

    def _jobs(self, run_dir: Path) -> list[Path]:
        """The run's jobs; none while its directory cannot be read: others must not wait for it."""
        try:
            jobs = staged.staged_jobs(run_dir)
        except OSError as error:
            if run_dir not in self._unreadable:
                _LOG.warning("%s: its jobs cannot be read: %s", run_dir.name, error)
            self._unreadable.add(run_dir)
            return []
        self._unreadable.discard(run_dir)
        return jobs

    def _works(self, state: _RunState) -> bool:
        return state.thread is not None and state.thread.is_alive()

    def _is_due(self, run_dir: Path, state: _RunState) -> bool:
        return (
            not self._works(state)
            and time.monotonic() >= state.retry_at
            and bool(self._jobs(run_dir))
        )

    def _working(self) -> bool:
        return any(self._works(state) for state in self._runs.values())

    def _due(self) -> bool:
        """Whether a run has jobs that have not failed yet (`once` does not wait for what has)."""
        return any(
            state.failures == 0 and self._jobs(run_dir) for run_dir, state in self._runs.items()
        )

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        for state in self._runs.values():
            if state.thread is not None:
                state.thread.join(max(0.0, deadline - time.monotonic()))
        deadline = min(deadline, time.monotonic() + _TELL_SECONDS)
        for thread in self._telling:
            thread.join(max(0.0, deadline - time.monotonic()))
        for run_dir, state in self._runs.items():
            if self._works(state):
                _LOG.warning("%s: %s stays staged", run_dir.name, state.job)
            self._tell(run_dir)

    # --- one run -------------------------------------------------------------------------------

    def _serve_run(self, run_dir: Path, state: _RunState) -> None:
        try:
            while not self._stop.is_set():
                jobs = self._jobs(run_dir)
                if not jobs or not self._serve_job(run_dir, state, jobs[0]):
                    break
        finally:
            state.job = None
            self._places.release()
        self._tell(run_dir)

    def _serve_job(self, run_dir: Path, state: _RunState, job_file: Path) -> bool:
        """Do one job; False if it has to wait, and with it the run."""
        log = job_log(str(job_file))
        state.job = job_file.stem
        self._tell(run_dir)
        try:
            if not staged.finish_answered(job_file):
                self._persist(job_file, log)
            state.failures = 0
            state.jobs_done += 1
            state.last_error = self._rejection(job_file) or None
            return True
        except Exception as error:
            # Whatever it is, it is this job's: the agent goes on with the other runs.
            if not job_file.exists():
                return True
            if isinstance(error, RecpointError | OSError | MemoryError):
                self._postpone(state, error, log)
                return False
            log.exception("rejected, since it fails in a way that nobody foresaw")
            return self._reject(state, job_file, error, log)

    def _persist(self, job_file: Path, log: logging.LoggerAdapter[logging.Logger]) -> None:
        call = self._gate.persist_flow()
        if call is not None:
            failed = self._persist_with_prefect(call, job_file)
            if failed is None:
                return self._gate.worked()
            if isinstance(failed, RecpointError):
                raise failed
            self._gate.failed(f"{type(failed).__name__}: {failed}")
        outcome = persist.persist_job(job_file)
        log.info("%s", f"{outcome.result} without Prefect {outcome.error}".rstrip())

    def _persist_with_prefect(
        self, call: Callable[[str], Any], job_file: Path
    ) -> BaseException | None:
        """Run the flow; None if the job has been answered, else what kept it from that."""
        results: list[Any] = []

        def run() -> None:
            try:
                state = call(str(job_file))
                results.append(state.result(raise_on_failure=False) or state)
            except Exception as error:
                # Of Prefect, its client or its server, in a hundred forms.
                results.append(error)

        thread = threading.Thread(target=run, name=f"flow {job_file.stem}", daemon=True)
        thread.start()
        while thread.is_alive() and job_file.exists():
            thread.join(_POLL_SECONDS / 4)
        if not job_file.exists():
            # The rest of the flow only tells about it, which an API that hangs drags out.
            self._telling = [other for other in self._telling if other.is_alive()] + [thread]
            return None
        # None: an exit, or a cancellation, which is none of the job's faults.
        failed = results[0] if results else "the flow ended without a state"
        return failed if isinstance(failed, BaseException) else RuntimeError(str(failed))

    def _postpone(
        self, state: _RunState, error: BaseException, log: logging.LoggerAdapter[logging.Logger]
    ) -> None:
        heals = not isinstance(error, RecpointError) or error.retryable
        pause = min(_FIRST_PAUSE_SECONDS * 2.0**state.failures, _LONGEST_PAUSE_SECONDS[heals])
        if isinstance(error, StoreThrottled):
            pause *= 2
        pause *= random.uniform(0.75, 1.25)
        state.failures += 1
        state.retry_at = time.monotonic() + pause
        state.last_error = str(error)
        state.last_error_ms = _now_ms()
        log.warning("stays staged, next try in %.0f s: %s", pause, error)

    def _reject(
        self,
        state: _RunState,
        job_file: Path,
        error: Exception,
        log: logging.LoggerAdapter[logging.Logger],
    ) -> bool:
        try:
            persist.reject_job(
                job_file,
                StagingError(
                    str(job_file),
                    found=f"{type(error).__name__}: {error}",
                    expected="a job that can be persisted",
                    next_step="report it, with the agent's log",
                ),
            )
        except OSError as failed:
            self._postpone(state, failed, log)
            return False
        return True

    def _rejection(self, job_file: Path) -> str:
        """Why the job was rejected; empty if it was not, or the trainer has read it already."""
        answer = staged.outcomes_directory(job_file.parent.parent) / job_file.name
        try:
            return staged.read_outcome(answer).error
        except (OSError, FormatError):
            return ""

    def _tell(self, run_dir: Path) -> None:
        state = self._runs.get(run_dir)
        if state is None:
            return
        pause = state.retry_at - time.monotonic()
        try:
            staged.write_status(
                run_dir,
                {
                    "pid": os.getpid(),
                    "alive_ms": _now_ms(),
                    "job": state.job,
                    "jobs_done": state.jobs_done,
                    "failures": state.failures,
                    "next_try_seconds": round(pause, 1) if pause > 0 else 0,
                    "last_error": state.last_error,
                    "last_error_ms": state.last_error_ms,
                    "prefect_ui": self._gate.ui_url,
                },
            )
        except OSError as error:
            _LOG.warning("%s: no status could be written: %s", run_dir.name, error)


@contextmanager
def _stopped_by_signals(agent: Agent) -> Iterator[None]:
    """Have SIGTERM and SIGINT stop the agent; only the main thread can be told of signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        agent.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave_soon() -> None:
    """End the process in a few seconds, unless it ends by itself.

    Python waits at its end for the threads of an upload, which may take hours, and Prefect for an
    API that hangs. Both may be stopped anywhere: what is not committed stays staged.
    """
    if threading.current_thread() is threading.main_thread():
        leave = threading.Timer(_LEAVE_SECONDS, os._exit, (0,))
        leave.daemon = True
        leave.start()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
