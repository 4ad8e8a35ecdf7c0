"""What is staged on a host, as its agent sees it: which job of a run is next, and when.

A directory that cannot be read holds up nothing but itself: its trouble is told of once, and it
counts as one without jobs until it can be read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from recpoint.catalog.staging import staged
from recpoint.catalog.staging.cancel import is_cancelled
from recpoint.errors import FormatError, StagingError, StagingRefused
from recpoint.flows.agent_runs import RunState

__all__ = ["AgentQueue", "is_dropped"]

_LOG = logging.getLogger("recpoint.agent")


class AgentQueue:
    """The jobs of a staging area; the threads of its runs may ask for theirs.

    Args:
        staging: the staging area.
    """

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._unreadable: dict[Path, OSError | StagingRefused] = {}

    def run_directories(self) -> list[Path] | None:
        """Those of all runs; None while the staging area cannot be read.

        Those of other users are named once, and left alone.
        """
        foreign: set[Path] = set()

        def refused(run_dir: Path, error: StagingRefused) -> None:
            foreign.add(run_dir)
            if run_dir not in self._unreadable:
                _LOG.warning("%s: left alone: %s", run_dir.name, error)
            self._unreadable[run_dir] = error

        try:
            run_dirs = staged.run_directories(self._staging, refused=refused)
        except (OSError, StagingRefused) as error:
            if self._staging not in self._unreadable:
                _LOG.warning("cannot look into %s: %s", self._staging, error)
            self._unreadable[self._staging] = error
            return None
        self._unreadable.pop(self._staging, None)
        still_there = foreign.union(run_dirs)
        for path in list(self._unreadable):
            if path not in still_there:
                self._unreadable.pop(path, None)
        return run_dirs

    def jobs(self, run_dir: Path) -> list[Path]:
        """The run's jobs; none while its directory cannot be read: others must not wait for it."""
        try:
            jobs = staged.staged_jobs(run_dir)
        except (OSError, StagingRefused) as error:
            if run_dir not in self._unreadable:
                _LOG.warning("%s: its jobs cannot be read: %s", run_dir.name, error)
            self._unreadable[run_dir] = error
            return []
        self._unreadable.pop(run_dir, None)
        return jobs

    def forget(self, run_dir: Path) -> None:
        """The run's directory is gone."""
        self._unreadable.pop(run_dir, None)

    def due_job(self, run_dir: Path, state: RunState) -> Path | None:
        """The job that a thread is to be started for now."""
        if state.works or not state.is_to_be_looked_at():
            return None
        job_file = self.next_job(run_dir, state)
        if job_file is None:
            return None
        due = time.monotonic() >= state.retry_at or is_dropped(job_file)
        return job_file if due else None

    def next_job(self, run_dir: Path, state: RunState) -> Path | None:
        """The first job that something can be done about now, as far as one knows."""
        jobs = self.jobs(run_dir)
        if jobs:
            state.jobs_seen = time.monotonic()
        for job_file in jobs:
            if state.waiting.is_due(job_file) or is_dropped(job_file):
                return job_file
        return None

    def has_untried(self, runs: Mapping[Path, RunState]) -> bool:
        """Whether a run has jobs that a drain stays for: not where the last try has failed, nor
        where all wait for other ranks."""
        return any(
            state.failures == 0 and not all(map(state.waiting.holds, self.jobs(run_dir)))
            for run_dir, state in runs.items()
        )

    def left(self, *, all_must_be_known: bool) -> int:
        """How many jobs are still staged, of those that can be read.

        Raises:
            StagingError: with `all_must_be_known`, some cannot.
        """
        left = sum(len(self.jobs(run_dir)) for run_dir in self.run_directories() or ())
        if all_must_be_known:
            for path, error in list(self._unreadable.items()):  # one is enough to mend
                subject, found = str(path), str(error)
                if isinstance(error, StagingRefused):
                    subject, found = error.subject, error.found
                raise StagingError(
                    subject,
                    found=f"{found}; {left} checkpoints are still staged elsewhere here",
                    expected="a directory whose jobs can be read",
                    next_step="mend it, or take it away; then recpoint agent --once again",
                )
        return left


def is_dropped(job_file: Path) -> bool:
    """Whether a job is to be dropped, so that it need not wait for the store to come back."""
    try:
        return is_cancelled(job_file)
    except (FormatError, OSError, StagingRefused):
        return False  # what is wrong with it is told when its turn comes
