"""What an agent knows about its runs: what it is doing, and what came of it, in numbers."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from recpoint.catalog.overview.failure_causes import CAUSES, cause_of, cause_of_name
from recpoint.catalog.overview.histogram import Histogram
from recpoint.catalog.persist.persist import PersistJob
from recpoint.catalog.staging import staged
from recpoint.errors import CheckpointCancelled
from recpoint.flows.agent_waiting import WaitingJobs
from recpoint.flows.pauses import growing_pause
from recpoint.format.job import Job, Outcome
from recpoint.format.manifest import Kind

__all__ = ["RESULTS", "SHORTEST_SHARE", "JobResult", "RunFacts", "RunState"]

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


@dataclass
class RunState:
    """What the agent is doing with one run.

    Attributes:
        opened: jobs that wait for other ranks, each opened once.
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
        outcome = staged.answer_given(job_file)
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

        Of every first try; of those after a failure as often as of a run with long intervals, in
        the end once a minute: each stays in Prefect's database, and there may be one a second.
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
