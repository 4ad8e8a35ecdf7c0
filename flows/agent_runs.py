"""What an agent knows about its runs: what it is doing, and what came of it, in numbers."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from recpoint.catalog.failure_causes import CAUSES, cause_of, cause_of_name
from recpoint.catalog.histogram import Histogram
from recpoint.errors import CheckpointCancelled
from recpoint.flows.agent_waiting import WaitingJobs
from recpoint.flows.pauses import growing_pause
from recpoint.format.job import Job, Outcome
from recpoint.format.manifest import Kind

__all__ = ["RESULTS", "JobResult", "RunFacts", "RunState"]

JobResult = Literal["committed", "cancelled", "rejected"]
RESULTS: tuple[JobResult, ...] = ("committed", "cancelled", "rejected")

#: Pauses before a job is tried again: doubled from the first on. What no waiting heals (a missing
#: permission) is asked for less often.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = {True: 60.0, False: 300.0}

#: Gaps between checkpoints that are remembered; the median of a few is no outage's.
_GAPS = 5
_SHARE_OF_INTERVAL = 1 / 8


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
    """What the agent is doing with one run."""

    thread: threading.Thread | None = None
    job: str | None = None
    jobs_done: int = 0
    failures: int = 0
    retry_at: float = 0.0
    last_error: str | None = None
    last_error_ms: int | None = None
    run_url: str | None = None
    run_id: str | None = None
    end_told_ms: int | None = None
    facts: RunFacts = field(default_factory=RunFacts)
    waiting: WaitingJobs = field(default_factory=WaitingJobs)
    newest_cut_ms: int | None = None
    gaps_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS))

    def saw_cut(self, snapshot_ms: int) -> None:
        """Note when a job was cut, and how long after the one before it."""
        before, self.newest_cut_ms = self.newest_cut_ms, snapshot_ms
        if before is not None and snapshot_ms > before:
            self.gaps_seconds.append((snapshot_ms - before) / 1000)

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
