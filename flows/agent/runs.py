"""Keeps the state of a run in its agent, and its counters."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple
from uuid import UUID

from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.staging import job_files
from recpoint.counting import CAUSES, Histogram, cause_of, cause_of_name
from recpoint.errors import CheckpointCancelled
from recpoint.flows.agent.gate import growing_pause
from recpoint.flows.agent.waiting_jobs import WaitingJobs
from recpoint.format.job import Job, Outcome
from recpoint.format.manifest import Kind

__all__ = [
    "RunFacts",
    "RunState",
    "SHORTEST_SHARE",
]


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
