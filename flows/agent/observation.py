"""Collects an agent's state for metrics: its queue, its runs and the results of their jobs.

Nothing here asks the store or Prefect, so the metrics are right while those are away.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.trainer_note import TrainerState, read_trainer_note, trainer_state
from recpoint.catalog.store.run_url import parse_run_url
from recpoint.errors import SettingsError, StagingRefused
from recpoint.flows.agent.runs import RunFacts, RunState

__all__ = ["AgentObservation", "RunObservation", "observe_agent"]


#: How long a run is still shown after its training has ended: long enough to see its last values,
#: but limited, so that a host does not show all runs it ever trained.
_SHOWN_AFTER_END_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class RunObservation:
    """One run of a staging area.

    Attributes:
        run: the run URL, or the name of the run's directory if no trainer or job has given the URL.
        has_url: whether `run` is a URL.
        staged_jobs: number of jobs that wait or are at work.
        queue_age_seconds: seconds since the oldest of them was staged; 0: there is none.
        trainer: the state of the newest trainer on this host.
        facts: counters since the agent started.
        consolidations: number of background consolidations since the agent started.
        missing_ranks: number of other parts for which checkpoints have waited too long.
    """

    run: str
    has_url: bool
    staged_jobs: int
    queue_age_seconds: float
    trainer: TrainerState
    facts: RunFacts
    consolidations: int
    missing_ranks: int


@dataclass(frozen=True, kw_only=True)
class AgentObservation:
    """An agent at one moment.

    Attributes:
        prefect: whether Prefect can be used.
        staging_free_bytes, staging_size_bytes: free and total bytes of the file system with the
            staging area; None: unknown, because the system call failed.
        runs: runs that have staged jobs here, are trained here, or were until an hour ago.
    """

    prefect: bool
    staging_free_bytes: int | None
    staging_size_bytes: int | None
    runs: tuple[RunObservation, ...]


def observe_agent(
    staging: Path,
    runs: Mapping[StagedRun, RunState],
    *,
    prefect: bool,
    consolidations: Callable[[StagedRun], int],
) -> AgentObservation:
    """Return the state of a staging area and of its agent's runs.

    Args:
        staging: the staging area.
        runs: the state of each run.
        prefect: see `AgentObservation`.
        consolidations: returns the number of consolidations of the run in a directory.
    """
    free, size = _space(staging)
    observed = (
        _observe_run(staged_run, state, consolidations) for staged_run, state in runs.items()
    )
    return AgentObservation(
        prefect=prefect,
        staging_free_bytes=free,
        staging_size_bytes=size,
        runs=tuple(run for run in observed if run is not None),
    )


def _space(staging: Path) -> tuple[int | None, int | None]:
    """Return the free and total bytes of a file system; None, None if it cannot be asked."""
    try:
        system = os.statvfs(staging)
    except OSError:
        return None, None
    return system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize


def _observe_run(
    staged_run: StagedRun, state: RunState, consolidations: Callable[[StagedRun], int]
) -> RunObservation | None:
    note = read_trainer_note(staged_run)
    trainer = trainer_state(staged_run, note)
    staged_at = _staged_at(staged_run)
    now = time.time()
    noted_seconds = 0.0 if note is None else note.at_ms / 1000
    ended = trainer in ("ended", "unknown") and now - noted_seconds > _SHOWN_AFTER_END_SECONDS
    if ended and not staged_at and not state.works:
        return None
    url = _url(state) if note is None else note.run_url
    return RunObservation(
        run=url or staged_run.name,
        has_url=url is not None,
        staged_jobs=len(staged_at),
        queue_age_seconds=max(0.0, now - min(staged_at)) if staged_at else 0.0,
        trainer=trainer,
        facts=state.facts,
        consolidations=consolidations(staged_run),
        missing_ranks=len({part for late in state.waiting.late() for part in late.missing}),
    )


def _url(state: RunState) -> str | None:
    """Return the run URL of the jobs in its normal form, which is safe to show."""
    try:
        return None if state.run_url is None else parse_run_url(state.run_url).url
    except SettingsError:
        return None


def _staged_at(staged_run: StagedRun) -> list[float]:
    """Return when each staged job was staged, in seconds since the epoch on this host's clock."""
    staged_times = []
    try:
        for path in staged_run.staged_jobs():
            try:
                staged_times.append(path.stat().st_mtime)
            except FileNotFoundError:
                continue  # the job was answered in the meantime
    except (OSError, StagingRefused):
        return staged_times  # the agent logs this error
    return staged_times
