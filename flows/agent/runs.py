"""Keeps what an agent knows of each run: failures, waits for other ranks, ended trainings."""

from __future__ import annotations

import json
import logging
import math
import random
import secrets
import statistics
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple
from uuid import UUID

from recpoint.catalog.overview.overview import CAUSES, Histogram, cause_of, cause_of_name
from recpoint.catalog.persist.persist import PersistJob, reject_job
from recpoint.catalog.persist.ranks import ranks_text
from recpoint.catalog.staging import area, owned
from recpoint.catalog.staging.area import read_note, trainer_state
from recpoint.catalog.store import durable
from recpoint.catalog.store.contract import now_ms
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


# Jobs whose part is stored and that wait for other ranks, which other agents may serve.
#
# Nobody tells an agent when they are done: it looks, soon at first, then less and less often.


#: How long a job waits before the ranks that are missing are named.
NAME_AFTER_SECONDS: Final = 60.0

_FIRST_LOOK_SECONDS: Final = 0.25
_LONGEST_LOOK_SECONDS: Final = 4.0


class LateJob(NamedTuple):
    """A job that has waited for longer than one would expect, and for whom."""

    job: str
    ranks: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        return f"has waited {self.seconds:.0f} s for the part of {ranks_text(self.ranks)}"


@dataclass
class _Waiting:
    since: float
    next_look: float
    pause: float = _FIRST_LOOK_SECONDS
    ranks: tuple[int, ...] = ()
    named: tuple[int, ...] = ()


class WaitingJobs:
    """Those of one run. Changed by the thread that serves the run, read by any.

    Args:
        name_after_seconds: from then on a job is late.
    """

    def __init__(self, name_after_seconds: float = NAME_AFTER_SECONDS) -> None:
        self._name_after = name_after_seconds
        self._jobs: dict[Path, _Waiting] = {}

    def waits(self, job_file: Path, ranks: tuple[int, ...]) -> LateJob | None:
        """Note that a job waits for `ranks`; what to tell of it, once for each set of ranks."""
        now = time.monotonic()
        waiting = self._jobs.get(job_file)
        if waiting is None:
            waiting = self._jobs[job_file] = _Waiting(since=now, next_look=now)
        else:
            waiting.pause = min(2 * waiting.pause, _LONGEST_LOOK_SECONDS)
        waiting.next_look = now + waiting.pause
        waiting.ranks = ranks
        if now - waiting.since < self._name_after or waiting.named == ranks:
            return None
        waiting.named = ranks
        return LateJob(job_file.stem, ranks, now - waiting.since)

    def holds(self, job_file: Path) -> bool:
        """Whether a job waits."""
        return job_file in self._jobs

    def is_due(self, job_file: Path) -> bool:
        """Whether to look for the parts of the others again, or to begin with the job."""
        waiting = self._jobs.get(job_file)
        return waiting is None or time.monotonic() >= waiting.next_look

    def look_soon(self) -> None:
        """Something was committed: what waits may be, too."""
        for waiting in self._jobs.values():
            waiting.next_look, waiting.pause = 0.0, _FIRST_LOOK_SECONDS

    def keep(self, job_files: Collection[Path]) -> None:
        """Forget those that are not staged any more."""
        for gone in self._jobs.keys() - set(job_files):
            del self._jobs[gone]

    def late(self) -> list[LateJob]:
        """Those that wait for longer than one would expect, oldest first."""
        now = time.monotonic()
        found = [
            LateJob(path.stem, waiting.ranks, now - waiting.since)
            for path, waiting in list(self._jobs.items())
            if waiting.ranks and now - waiting.since >= self._name_after
        ]
        return sorted(found, key=lambda late: -late.seconds)


# What an agent knows about its runs: what it is doing, and what came of it, in numbers.


JobResult = Literal["committed", "cancelled", "rejected"]
RESULTS: tuple[JobResult, ...] = ("committed", "cancelled", "rejected")

#: Pauses before a job is tried again: doubled from the first on. What no waiting heals (a missing
#: permission) is asked for less often.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = {True: 60.0, False: 300.0}

#: Of a pause: so much of it is waited at least, since each is drawn from around it.
SHORTEST_SHARE: Final = 0.75

#: Gaps between checkpoints that are remembered; the median of a few is no outage's.
_GAPS = 5
_SHARE_OF_INTERVAL = 1 / 8

#: How long a run has had no job when it is looked at less often, and how often then.
_QUIET_AFTER_SECONDS = 60.0
_QUIET_PAUSE_SECONDS = 1.0


class RunFacts:
    """Counters of one run since the agent started.

    Changed by the thread that serves the run, read by any. No dictionary grows, so that who reads
    needs no lock.

    Attributes:
        jobs: how many were answered, by result.
        failures: attempts at a job that did not commit it, by cause; retries count each time, jobs
            that their trainer cancelled do not.
        stored_bytes: bytes of chunks of the committed that were stored here, by kind.
        full_bytes: what full, exact checkpoints would have taken instead.
        commit_lag: seconds from the cut to the commit.
        last_commit_ms: when the newest was committed, on this host's clock; None: none was.
        links_to_read: manifests that a restore of it reads; None: none was.
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
        """A job is done with; `job` None: it could not be read."""
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
        """An attempt at a job failed; the job is tried again."""
        self.failures[cause_of(error)] += 1


class Awaits(NamedTuple):
    """A job whose last try failed, and the flow run with which the next try goes on."""

    job_file: Path
    flow_run: UUID


@dataclass
class RunState:
    """What the agent is doing with one run.

    Attributes:
        opened: jobs that wait for other ranks, each opened once.
        awaits: the flow run of a job that is tried again later, if Prefect has one.
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
        """Whether its jobs are to be listed now: after a minute without any once a second is often.

        A host keeps the directory of each run that it ever had, and a thousand of them would be
        listed thousands of times a second.
        """
        now = time.monotonic()
        quiet = now - self.jobs_seen >= _QUIET_AFTER_SECONDS
        if quiet and now - self.looked_at < _QUIET_PAUSE_SECONDS:
            return False
        self.looked_at = now
        return True

    def answered(self, job_file: Path, job: Job | None) -> str | None:
        """Count what became of a job; why it was rejected, if it was.

        Args:
            job_file: the job.
            job: what it was; None: it could not be read.
        """
        outcome = area.answer_given(job_file)
        if outcome is None:
            return None
        self.facts.answered(job, outcome)
        return outcome.error or None

    def saw_cut(self, generation: int, step: int, snapshot_ms: int) -> None:
        """Note when a checkpoint was cut, and how long after the one before it.

        Once for all its ranks: they are cut milliseconds apart.
        """
        cut, cut_ms = (generation, step), self.newest_cut_ms
        if self.newest_cut is not None:
            if cut <= self.newest_cut:
                return
            if snapshot_ms > cut_ms:
                self.gaps_seconds.append((snapshot_ms - cut_ms) / 1000)
        self.newest_cut, self.newest_cut_ms = cut, snapshot_ms

    def is_worth_a_flow(self) -> bool:
        """Whether Prefect is to have a flow run of the try that begins now.

        Every first try; after a failure as often as with long intervals, in the end once a minute:
        the states and task runs of each stay in Prefect's database.
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
        """How long to wait after one more failure: doubled each time; for what may heal no longer
        than a part of an interval, so that a store that is back is used long before one is over."""
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
        """What its status file says of it."""
        pause = self.retry_at - time.monotonic()
        return {
            "job": self.job,
            "jobs_done": self.jobs_done,
            "failures": self.failures,
            "next_try_seconds": round(pause, 1) if pause > 0 else 0,
            "last_error": self.last_error,
            "last_error_ms": self.last_error_ms,
            "missing_ranks": [
                {"job": late.job, "ranks": list(late.ranks), "seconds": round(late.seconds)}
                for late in self.waiting.late()
            ],
        }


# What becomes of a job that failed: it is tried again later, or rejected once that is in vain.
#
# What is wrong with the job itself persisting has found, and rejected it. All that comes here is
# the store's or the host's, which may pass, or something that nobody foresaw.


_Log = logging.LoggerAdapter[logging.Logger]

#: So often in a row a job may fail in a way that nobody foresaw, before it is rejected.
_TRIES_UNFORESEEN: Final = 5
#: What Python and torch say as a RuntimeError where the host has no thread or no memory left.
_SHORTAGES: Final = ("can't start new thread", "can't allocate memory")


def postpone(state: RunState, error: BaseException, log: _Log) -> None:
    """Have the run wait before its next try, and say why."""
    heals = not isinstance(error, RecpointError) or error.retryable
    pause = state.pause_seconds(heals=heals)
    if isinstance(error, StoreThrottled):
        pause *= 2
    pause *= random.uniform(SHORTEST_SHARE, 2 - SHORTEST_SHARE)
    state.failures += 1
    state.facts.failed(error)
    state.retry_at = time.monotonic() + pause
    # The kind of error says what to do about it: docs/how-to goes by its name.
    state.last_error = f"{type(error).__name__}: {error}"
    state.last_error_ms = now_ms()
    log.warning("stays staged, next try in %.0f s: %s", pause, state.last_error)


def postpone_or_reject(state: RunState, job_file: Path, error: Exception, log: _Log) -> bool:
    """As `postpone`, but reject what fails each time in a way that nobody foresaw.

    Once, it may be the host's doing. Each time, it is the job's, and keeps all that is staged after
    it.

    Returns:
        Whether the job was rejected.
    """
    if _may_pass(error):
        state.unforeseen = 0
        postpone(state, error, log)
        return False
    state.unforeseen += 1
    log.error("fails in a way that nobody foresaw", exc_info=error)
    if state.unforeseen < _TRIES_UNFORESEEN:
        postpone(state, error, log)
        return False
    try:
        _reject(job_file, error)
    except OSError as failed:
        postpone(state, failed, log)
        return False
    log.error("rejected, since it has failed so %d times in a row", state.unforeseen)
    state.unforeseen = 0
    return True


def _may_pass(error: Exception) -> bool:
    """Whether it is the store's, or that of a host which is short of something."""
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


# Telling Prefect that a training has ended, so that its silence raises no alert.
#
# A trainer never talks to Prefect: it leaves a note in the staging area, which the agent finds.
# Whose id that run has, only its jobs say: the agent keeps it there, for those that come after it.


_LOG = logging.getLogger("recpoint.agent")

_FILE: Final = "silence.json"
_MOST_BYTES: Final = 65_536


class _Expected(NamedTuple):
    """A run whose commits Prefect may have been told of; `told_ms`: the end that it was told of."""

    run_id: str
    run_url: str
    told_ms: int | None = None


def expect_end(run_dir: Path, job: Job) -> None:
    """Keep in the run's directory whose jobs are done there; the agent may be another by the end.

    A directory that cannot be written costs only that.
    """
    there = _expected(run_dir)
    if there is None or (there.run_id, there.run_url) != (job.run, job.run_url):
        _write_expected(run_dir, _Expected(job.run, job.run_url))


def tell_ended_trainings(runs: Mapping[Path, RunState]) -> None:
    """Send an event for each training that said goodbye, once; returns at once.

    Only of runs that an agent has persisted something of: of others nobody expects a commit. Called
    while Prefect answers.

    Args:
        runs: the runs by directory.
    """
    for run_dir, state in runs.items():
        if state.works:
            continue
        note = read_note(run_dir)
        if note is None or note.state != "ended" or state.end_told_ms == note.at_ms:
            continue
        # After its last commit, or that one would begin a new silence.
        try:
            if trainer_state(run_dir, note) != "ended" or area.staged_jobs(run_dir):
                continue
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: whether it has ended cannot be told: %s", run_dir.name, error)
            continue
        expected = _expected(run_dir)
        if expected is None and state.run_id is not None and state.run_url is not None:
            expected = _Expected(state.run_id, state.run_url)  # it could not be written
        if expected is None:
            continue
        if expected.told_ms != note.at_ms:
            # Imported by now: Prefect takes seconds; the agent does without it where it is away.
            from recpoint.tasks.reports import emit

            emit("ended", expected.run_id, expected.run_url)
            _write_expected(run_dir, expected._replace(told_ms=note.at_ms))
        state.end_told_ms = note.at_ms


def _expected(run_dir: Path) -> _Expected | None:
    """What was kept; None: nothing was, or it is damaged."""
    try:
        found = json.loads(owned.read(run_dir.parent, run_dir / _FILE, _MOST_BYTES))
        run_id, run_url, told_ms = found["run"], found["run_url"], found.get("told_ms")
    except (
        OSError,
        StagingRefused,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return None
    if not isinstance(run_id, str) or not isinstance(run_url, str):
        return None
    return _Expected(run_id, run_url, told_ms if type(told_ms) is int else None)


def _write_expected(run_dir: Path, expected: _Expected) -> None:
    """Replace what was kept; whole at every moment, but not made durable: it is for people."""
    document: dict[str, object] = {"run": expected.run_id, "run_url": expected.run_url}
    if expected.told_ms is not None:
        document["told_ms"] = expected.told_ms
    try:
        owned.replace(
            run_dir.parent,
            run_dir / _FILE,
            (json.dumps(document) + "\n").encode(),
            temporary=f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}",
        )
    except (OSError, StagingRefused) as error:
        _LOG.warning("%s: %s cannot be written: %s", run_dir.name, _FILE, error)
