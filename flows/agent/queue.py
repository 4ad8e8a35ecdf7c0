"""Says which job of a run is next, and when.

A directory that cannot be read is logged once, not at each look.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from recpoint.catalog.staging.area import StagedRun, staged_runs
from recpoint.catalog.staging.cancels import is_cancelled
from recpoint.errors import FormatError, StagingError, StagingRefused
from recpoint.flows.agent.runs import RunState

__all__ = [
    "AgentQueue",
    "LOG",
    "is_dropped",
    "staged_before",
]


LOG = logging.getLogger("recpoint.agent")


class AgentQueue:
    """Lists the jobs of a staging area; each run's thread may ask for the jobs of its run.

    Args:
        staging: the staging area.
    """

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._area_error: OSError | StagingRefused | None = None
        self._unreadable: dict[StagedRun, OSError | StagingRefused] = {}

    def staged_runs(self) -> list[StagedRun] | None:
        """Return all runs; None while the staging area cannot be read.

        Directories of other users are logged once, and left out.
        """
        foreign: set[StagedRun] = set()

        def refused(staged_run: StagedRun, error: StagingRefused) -> None:
            foreign.add(staged_run)
            if staged_run not in self._unreadable:
                LOG.warning("%s: left alone: %s", staged_run.name, error)
            self._unreadable[staged_run] = error

        try:
            found_runs = staged_runs(self._staging, refused=refused)
        except (OSError, StagingRefused) as error:
            if self._area_error is None:
                LOG.warning("cannot look into %s: %s", self._staging, error)
            self._area_error = error
            return None
        self._area_error = None
        for ended_run in self._unreadable.keys() - foreign.union(found_runs):
            self._unreadable.pop(ended_run, None)
        return found_runs

    def jobs(self, staged_run: StagedRun) -> list[Path]:
        """Return the run's job files; none while its directory cannot be read."""
        try:
            jobs = staged_run.staged_jobs()
        except (OSError, StagingRefused) as error:
            if staged_run not in self._unreadable:
                LOG.warning("%s: its jobs cannot be read: %s", staged_run.name, error)
            self._unreadable[staged_run] = error
            return []
        self._unreadable.pop(staged_run, None)
        return jobs

    def forget(self, staged_run: StagedRun) -> None:
        """Forget a run whose directory is gone."""
        self._unreadable.pop(staged_run, None)

    def due_job(self, staged_run: StagedRun, state: RunState) -> Path | None:
        """Return the job for which to start a thread now; None: there is none."""
        if state.works or not state.is_to_be_looked_at():
            return None
        job_file = self.next_job(staged_run, state)
        if job_file is None:
            return None
        due = time.monotonic() >= state.retry_at or is_dropped(job_file)
        return job_file if due else None

    def next_job(self, staged_run: StagedRun, state: RunState) -> Path | None:
        """Return the first job to be done, or whose missing parts are to be looked for, now."""
        jobs = self.jobs(staged_run)
        if jobs:
            state.jobs_seen = time.monotonic()
        for job_file in jobs:
            if state.waiting.is_due(job_file) or is_dropped(job_file):
                return job_file
        return None

    def has_untried(self, runs: Mapping[StagedRun, RunState]) -> bool:
        """Whether a run has jobs for which a drain must go on.

        A drain does not go on for a run whose last try failed, or whose jobs all wait for other
        ranks.
        """
        return any(
            state.failures == 0 and not all(map(state.waiting.holds, self.jobs(staged_run)))
            for staged_run, state in runs.items()
        )

    def left(self, *, all_must_be_known: bool) -> int:
        """Return how many jobs are still staged in the directories that can be read.

        Raises:
            StagingError: with `all_must_be_known`, some directory cannot be read.
        """
        staged_count = sum(len(self.jobs(staged_run)) for staged_run in self.staged_runs() or ())
        if all_must_be_known:
            unreadable = [(str(run.path), error) for run, error in list(self._unreadable.items())]
            if self._area_error is not None:
                unreadable.insert(0, (str(self._staging), self._area_error))
            for subject, error in unreadable:  # reports the first only
                failure = str(error)
                if isinstance(error, StagingRefused):
                    subject, failure = error.subject, error.found
                raise StagingError(
                    subject,
                    found=f"{failure}; {staged_count} checkpoints are still staged in other "
                    "directories",
                    expected="a directory whose jobs can be read",
                    next_step="repair or remove it; then run recpoint agent --once again",
                )
        return staged_count


def staged_before(job_file: Path, moment: float) -> bool:
    """Whether a job was staged before `moment` (seconds since the epoch); False if it is gone."""
    try:
        return job_file.stat().st_mtime < moment
    except OSError:
        return False


def is_dropped(job_file: Path) -> bool:
    """Whether the trainer has cancelled a job; dropping it needs no store, so it does not wait."""
    try:
        return is_cancelled(job_file)
    except (FormatError, OSError, StagingRefused):
        return False  # the error is reported when the job is tried
