"""Keeps what an agent knows of each run: failures, waits for other ranks, ended trainings.

Jobs whose part is stored, and which wait for other ranks, whose jobs other agents may serve. Nobody
tells an agent when those parts are stored: it looks, soon at first, then less often.

Failed jobs: each is tried again later, or rejected if it always fails. Persisting has already
rejected jobs that are themselves broken. The errors that arrive here are faults of the store or the
host, which may pass, or unexpected errors.

Telling Prefect that a training has ended, so that its silence raises no alert. A trainer never
talks to Prefect: it leaves a note in the staging area, which the agent finds. The event needs the
run's id, which only jobs contain, so the agent keeps the id for later agents in the run's
directory.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple
from uuid import UUID

from recpoint.catalog.persist.persist import PersistJob, reject_job
from recpoint.catalog.persist.ranks import parts_text
from recpoint.catalog.staging import job_files
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import read_note, write_note
from recpoint.catalog.staging.trainer_note import read_trainer_note, trainer_state
from recpoint.catalog.store.contract import now_ms
from recpoint.counting import CAUSES, Histogram, cause_of, cause_of_name
from recpoint.errors import (
    CheckpointCancelled,
    RecpointError,
    StagingError,
    StagingRefused,
    StoreThrottled,
)
from recpoint.flows.agent.gate import growing_pause
from recpoint.format.job import Job, Outcome
from recpoint.format.manifest import Kind
from recpoint.format.notes import NEWEST_RUN_NOTE, NewestRunNote

__all__ = [
    "NAME_AFTER_SECONDS",
    "RunFacts",
    "RunState",
    "SHORTEST_SHARE",
    "WaitingJobs",
    "expect_end",
    "postpone",
    "postpone_or_reject",
    "tell_ended_trainings",
]


#: How long a job waits before status, log and metrics name the missing ranks.
NAME_AFTER_SECONDS: Final = 60.0

_FIRST_LOOK_SECONDS: Final = 0.25
_LONGEST_LOOK_SECONDS: Final = 4.0


class LateJob(NamedTuple):
    """A job that has waited too long for other parts of its checkpoint.

    Attributes:
        job: stem of the job's file.
        missing: numbers of the missing parts.
        of: how many ranks the checkpoint has; parts of embedding servers count on after them.
        seconds: how long it has waited.
    """

    job: str
    missing: tuple[int, ...]
    of: int
    seconds: float

    def __str__(self) -> str:
        text = parts_text(self.missing, self.of)
        return f"has waited {self.seconds:.0f} s for the part of {text}"

    def status(self) -> Mapping[str, object]:
        """Return the job's entry in a status file; servers are numbered from 1, as in texts."""
        return {
            "job": self.job,
            "ranks": [number for number in self.missing if number < self.of],
            "servers": [number - self.of + 1 for number in self.missing if number >= self.of],
            "seconds": round(self.seconds),
        }


@dataclass
class _Waiting:
    since: float
    next_look: float
    pause: float = _FIRST_LOOK_SECONDS
    missing: tuple[int, ...] = ()
    of: int = 1
    named: tuple[int, ...] = ()


class WaitingJobs:
    """Keeps one run's jobs that wait for other parts of their checkpoints.

    Only the thread that serves the run may change it; any thread may read it.

    Args:
        name_after_seconds: a job is late when it has waited for so long.
    """

    def __init__(self, name_after_seconds: float = NAME_AFTER_SECONDS) -> None:
        self._name_after = name_after_seconds
        self._jobs: dict[Path, _Waiting] = {}

    def waits(self, job_file: Path, missing: tuple[int, ...], *, of: int) -> LateJob | None:
        """Note that a job waits for the parts `missing` of a checkpoint of `of` ranks.

        Returns:
            The job if it is late and these parts were not reported before; otherwise None.
        """
        now = time.monotonic()
        waiting = self._jobs.get(job_file)
        if waiting is None:
            waiting = self._jobs[job_file] = _Waiting(since=now, next_look=now)
        else:
            waiting.pause = min(2 * waiting.pause, _LONGEST_LOOK_SECONDS)
        waiting.next_look = now + waiting.pause
        waiting.missing, waiting.of = missing, of
        if now - waiting.since < self._name_after or waiting.named == missing:
            return None
        waiting.named = missing
        return LateJob(job_file.stem, missing, of, now - waiting.since)

    def holds(self, job_file: Path) -> bool:
        """Whether a job waits for other ranks."""
        return job_file in self._jobs

    def is_due(self, job_file: Path) -> bool:
        """Whether a job does not wait, or its missing parts are to be looked for now."""
        waiting = self._jobs.get(job_file)
        return waiting is None or time.monotonic() >= waiting.next_look

    def look_soon(self) -> None:
        """Look for all missing parts now: a commit makes others likely."""
        for waiting in self._jobs.values():
            waiting.next_look, waiting.pause = 0.0, _FIRST_LOOK_SECONDS

    def keep(self, job_files: Collection[Path]) -> None:
        """Forget all jobs but `job_files`, the ones that are still staged."""
        for ended_run in self._jobs.keys() - set(job_files):
            del self._jobs[ended_run]

    def late(self) -> list[LateJob]:
        """Return the late jobs, the longest wait first."""
        now = time.monotonic()
        late_jobs = [
            LateJob(path.stem, waiting.missing, waiting.of, now - waiting.since)
            for path, waiting in list(self._jobs.items())
            if waiting.missing and now - waiting.since >= self._name_after
        ]
        return sorted(late_jobs, key=lambda late: -late.seconds)


JobResult = Literal["committed", "cancelled", "rejected"]
RESULTS: tuple[JobResult, ...] = ("committed", "cancelled", "rejected")

#: Pauses before a job is tried again; each failure in a row doubles the pause. The limit is higher
#: (False) for an error that waiting does not repair, such as a missing permission.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = {True: 60.0, False: 300.0}

#: The shortest wait, as a share of the computed pause, around which each wait is drawn at random.
SHORTEST_SHARE: Final = 0.75

#: How many gaps between checkpoints are remembered; one long outage does not change their median.
_GAPS = 5
_SHARE_OF_INTERVAL = 1 / 8

#: After how long without a job a run is looked at less often, and how often then.
_QUIET_AFTER_SECONDS = 60.0
_QUIET_PAUSE_SECONDS = 1.0


class RunFacts:
    """Counts what became of one run's jobs since the agent started.

    Only the thread that serves the run may change it; any thread may read it. No dictionary grows,
    so readers need no lock.

    Attributes:
        jobs: number of answered jobs, by result.
        failures: number of tries that failed, by cause. Each retry counts; a job that its trainer
            cancelled does not.
        stored_bytes: bytes of chunks that this host stored for committed checkpoints, by kind.
        full_bytes: bytes that full, exact checkpoints would have taken instead.
        commit_lag: seconds from cut to commit of each checkpoint.
        last_commit_ms: time of the newest commit on this host's clock, in milliseconds since the
            epoch; None: no commit.
        links_to_read: number of manifests that a restore of that checkpoint reads; None: no commit.
    """

    def __init__(self) -> None:
        self.jobs: dict[JobResult, int] = dict.fromkeys(RESULTS, 0)
        self.failures = dict.fromkeys(CAUSES, 0)
        self.stored_bytes: dict[Kind, int] = {"full": 0, "increment": 0}
        self.full_bytes = 0
        self.commit_lag = Histogram()
        self.last_commit_ms: int | None = None
        self.links_to_read: int | None = None

    def answered(self, job: Job | None, outcome: Outcome) -> None:
        """Count the outcome of a job; `job` None: it could not be read."""
        if outcome.result == "rejected":
            cancelled = outcome.error_type == CheckpointCancelled.__name__
            self.jobs["cancelled" if cancelled else "rejected"] += 1
            if not cancelled:
                self.failures[cause_of_name(outcome.error_type)] += 1
            return
        self.jobs["committed"] += 1
        self.last_commit_ms = outcome.finished_ms
        self.links_to_read = outcome.links_to_read
        if job is not None:
            self.stored_bytes[job.kind] += outcome.rank_bytes
            self.full_bytes += job.full_bytes
            self.commit_lag.add(max(0, outcome.finished_ms - job.snapshot_ms) / 1000)

    def failed(self, error: BaseException) -> None:
        """Count a failed try of a job that is tried again."""
        self.failures[cause_of(error)] += 1


class Awaits(NamedTuple):
    """A job whose last try failed, and the flow run with which the next try goes on."""

    job_file: Path
    flow_run: UUID


@dataclass
class RunState:
    """The state of one run in the agent.

    Attributes:
        thread: the thread that serves the run, or the last one that did.
        job: the name of the job at work.
        failures: failed tries in a row.
        unforeseen: how many of the last tries in a row failed with an unexpected error.
        retry_at: no job is tried before this time (`time.monotonic()`).
        opened: jobs that wait for other ranks, each opened once.
        newest_cut: generation and step of the newest checkpoint; `newest_cut_ms` is its time.
        flow_at: when the last try with a flow run began.
        awaits: the flow run of a job that is tried again later, if Prefect has one.
        gaps_seconds: the last gaps between checkpoints.
    """

    thread: threading.Thread | None = None
    job: str | None = None
    jobs_done: int = 0
    failures: int = 0
    unforeseen: int = 0
    retry_at: float = 0.0
    last_error: str | None = None
    last_error_ms: int | None = None
    run_url: str | None = None
    run_id: str | None = None
    end_told_ms: int | None = None
    facts: RunFacts = field(default_factory=RunFacts)
    waiting: WaitingJobs = field(default_factory=WaitingJobs)
    opened: dict[Path, PersistJob] = field(default_factory=dict)
    newest_cut: tuple[int, int] | None = None
    newest_cut_ms: int = 0
    flow_at: float | None = None
    awaits: Awaits | None = None
    gaps_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS))
    jobs_seen: float = field(default_factory=time.monotonic)
    looked_at: float = -math.inf

    def is_to_be_looked_at(self) -> bool:
        """Whether to list its jobs now: after a minute without a job only once a second.

        A host keeps the directory of each run that it ever had. Without this limit, a thousand of
        them would be listed thousands of times a second.
        """
        now = time.monotonic()
        quiet = now - self.jobs_seen >= _QUIET_AFTER_SECONDS
        if quiet and now - self.looked_at < _QUIET_PAUSE_SECONDS:
            return False
        self.looked_at = now
        return True

    def answered(self, job_file: Path, job: Job | None) -> str | None:
        """Count the outcome of an answered job.

        Args:
            job_file: the job file.
            job: the job; None: it could not be read.

        Returns:
            Why the job was rejected; None: it was not.
        """
        outcome = job_files.answer_given(job_file)
        if outcome is None:
            return None
        self.facts.answered(job, outcome)
        return outcome.error or None

    def saw_cut(self, generation: int, step: int, snapshot_ms: int) -> None:
        """Note when a checkpoint was cut, and how long after the previous checkpoint.

        Only the first call for a checkpoint counts: its ranks are cut milliseconds apart.

        Args:
            generation, step: the checkpoint.
            snapshot_ms: time of the cut, in milliseconds since the epoch.
        """
        cut, cut_ms = (generation, step), self.newest_cut_ms
        if self.newest_cut is not None:
            if cut <= self.newest_cut:
                return
            if snapshot_ms > cut_ms:
                self.gaps_seconds.append((snapshot_ms - cut_ms) / 1000)
        self.newest_cut, self.newest_cut_ms = cut, snapshot_ms

    def is_worth_a_flow(self) -> bool:
        """Whether to run the try that begins now as a flow in Prefect.

        The first try of a job always is. After a failure, the time between two such tries doubles
        up to a minute, also if the job is tried more often, because the states and task runs of
        each stay in Prefect's database.
        """
        now = time.monotonic()
        if self.failures and self.flow_at is not None:
            pause = growing_pause(
                self.failures - 1, first=_FIRST_PAUSE_SECONDS, longest=_LONGEST_PAUSE_SECONDS[True]
            )
            if now - self.flow_at < SHORTEST_SHARE * pause:
                return False
        self.flow_at = now
        return True

    def pause_seconds(self, *, heals: bool) -> float:
        """Return how long to wait after one more failure; each failure in a row doubles the pause.

        Args:
            heals: whether the error may pass by itself. The pause is then limited to a part of the
                checkpoint interval, so that a store that is back is used soon.
        """
        longest = _LONGEST_PAUSE_SECONDS[heals]
        if heals and self.gaps_seconds:
            interval = statistics.median_low(self.gaps_seconds)
            longest = min(longest, max(_FIRST_PAUSE_SECONDS, interval * _SHARE_OF_INTERVAL))
        return growing_pause(self.failures, first=_FIRST_PAUSE_SECONDS, longest=longest)

    @property
    def works(self) -> bool:
        """Whether a thread serves the run."""
        return self.thread is not None and self.thread.is_alive()

    def status(self) -> Mapping[str, object]:
        """Return the run's entries in its status file."""
        pause = self.retry_at - time.monotonic()
        return {
            "job": self.job,
            "jobs_done": self.jobs_done,
            "failures": self.failures,
            "next_try_seconds": round(pause, 1) if pause > 0 else 0,
            "last_error": self.last_error,
            "last_error_ms": self.last_error_ms,
            "missing_ranks": [late.status() for late in self.waiting.late()],
        }


_Log = logging.LoggerAdapter[logging.Logger]

#: A job is rejected when it has failed with an unexpected error so often in a row.
_TRIES_UNFORESEEN: Final = 5
#: Texts of the RuntimeErrors of Python and torch when the host has no thread or no memory left.
_SHORTAGES: Final = ("can't start new thread", "can't allocate memory")


def postpone(state: RunState, error: BaseException, log: _Log) -> None:
    """Have the run wait before its next try, and log and note the error."""
    heals = not isinstance(error, RecpointError) or error.retryable
    pause = state.pause_seconds(heals=heals)
    if isinstance(error, StoreThrottled):
        pause *= 2
    pause *= random.uniform(SHORTEST_SHARE, 2 - SHORTEST_SHARE)
    state.failures += 1
    state.facts.failed(error)
    state.retry_at = time.monotonic() + pause
    # With the error's type, by which docs/how-to says what to do.
    state.last_error = f"{type(error).__name__}: {error}"
    state.last_error_ms = now_ms()
    log.warning("stays staged, next try in %.0f s: %s", pause, state.last_error)


def postpone_or_reject(state: RunState, job_file: Path, error: Exception, log: _Log) -> bool:
    """Postpone a job, or reject it after several unexpected errors in a row.

    One unexpected error may be due to the host. If each try ends with one, the job is at fault, and
    it would block all jobs that are staged after it.

    Returns:
        Whether the job was rejected.
    """
    if _may_pass(error):
        state.unforeseen = 0
        postpone(state, error, log)
        return False
    state.unforeseen += 1
    log.error("failed with an unexpected error", exc_info=error)
    if state.unforeseen < _TRIES_UNFORESEEN:
        postpone(state, error, log)
        return False
    try:
        _reject(job_file, error)
    except OSError as failed:
        postpone(state, failed, log)
        return False
    log.error("rejected after %d unexpected errors in a row", state.unforeseen)
    state.unforeseen = 0
    return True


def _may_pass(error: Exception) -> bool:
    """Whether an error may pass: a fault of the store, or a shortage on this host."""
    if isinstance(error, RecpointError | OSError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(says in str(error) for says in _SHORTAGES)


def _reject(job_file: Path, error: Exception) -> None:
    reject_job(
        job_file,
        StagingError(
            str(job_file),
            found=f"{type(error).__name__}: {error}",
            expected="a job that can be persisted",
            next_step="report it, with the agent's log",
        ),
    )


_LOG = logging.getLogger("recpoint.agent")


def expect_end(staged_run: StagedRun, job: Job) -> None:
    """Keep the run's id and URL in the run's directory, for the agent that sees the training end.

    If the directory cannot be written, a later agent cannot tell Prefect of the end.
    """
    expected = read_note(staged_run, NEWEST_RUN_NOTE)
    if expected is None or (expected.run, expected.run_url) != (job.run, job.run_url):
        _keep(staged_run, NewestRunNote(run=job.run, run_url=job.run_url))


def tell_ended_trainings(runs: Mapping[StagedRun, RunState]) -> None:
    """Send one event for each training that ended by itself; does not wait for Prefect.

    Leaves out runs of which no agent has persisted a job: nobody expects a commit of those. Call it
    while Prefect answers.

    Args:
        runs: the state of each run.
    """
    for staged_run, state in runs.items():
        if state.works:
            continue
        note = read_trainer_note(staged_run)
        if note is None or note.state != "ended" or state.end_told_ms == note.at_ms:
            continue
        # The event must follow the last commit, because a commit starts the wait for the next one.
        try:
            if trainer_state(staged_run, note) != "ended" or staged_run.staged_jobs():
                continue
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: cannot check whether training ended: %s", staged_run.name, error)
            continue
        expected = read_note(staged_run, NEWEST_RUN_NOTE)
        if expected is None and state.run_id is not None and state.run_url is not None:
            # Its file could not be written.
            expected = NewestRunNote(run=state.run_id, run_url=state.run_url)
        if expected is None:
            continue
        if expected.told_ms != note.at_ms:
            # Imported only here: the import takes seconds, and an agent without Prefect never needs
            # it. The gate has already done it.
            from recpoint.tasks.reports import emit

            emit("ended", expected.run, expected.run_url)
            _keep(staged_run, expected.model_copy(update={"told_ms": note.at_ms}))
        state.end_told_ms = note.at_ms


def _keep(staged_run: StagedRun, note: NewestRunNote) -> None:
    """Replace the note atomically, but without fsync, because only an alert depends on it."""
    try:
        write_note(staged_run, NEWEST_RUN_NOTE, note)
    except (OSError, StagingRefused) as error:
        _LOG.warning("%s: %s cannot be written: %s", staged_run.name, NEWEST_RUN_NOTE.file, error)
