"""Finishes the jobs staged on this host as a flow, if no agent is there to do it.

A trainer or an agent that died may leave staged jobs. Each is committed, or rejected if it can
never be committed; a job that has to wait stays staged.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.states import Completed

from recpoint.catalog.staging import area, job_files
from recpoint.catalog.staging.agent_lock import AtWork, at_work
from recpoint.catalog.staging.area import staged_runs
from recpoint.errors import RecpointError, StagingError
from recpoint.flows.agent.agent import run_agent
from recpoint.flows.parameters import NO_RESULTS, StagingArea
from recpoint.tasks.run_tags import tag_flow_run

__all__ = ["drain"]


@flow(
    name="drain",
    timeout_seconds=9 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def drain(staging: StagingArea | None = None) -> State[Any]:
    """Store the checkpoints staged on this host, if no agent or other drain is doing it.

    Does all jobs of the staging area that can be done now. If a sweep is at work there, the flow
    waits for its end.

    Args:
        staging: the staging area of this host; the default one if None.

    Returns:
        Completed; its message says how many jobs were done, and how many are still staged.

    Raises:
        StagingError: the staging area may not be used.
        OSError: the staging area cannot be read.
    """
    root = area.default_staging_root() if staging is None else Path(staging)
    await tag_flow_run(*await asyncio.to_thread(_runs_with_jobs, root))
    return Completed(message=await asyncio.to_thread(_drain, root))


def _drain(root: Path) -> str:
    staged_before = _count(root)
    if not staged_before:
        return "nothing is staged"
    if (worker := at_work(root)) is not None and not worker.run:
        return _left_to(worker, root, staged_before)
    try:
        # Without a flow run for each job: this flow run already shows the work.
        still_staged = run_agent(root, once=True, prefect="off")
    except StagingError:
        if (worker := at_work(root)) is not None and not worker.ends_by_itself:
            return _left_to(worker, root, staged_before)  # an agent has just started
        raise
    return f"{max(0, staged_before - still_staged)} jobs done, {still_staged} still staged"


def _left_to(worker: AtWork, root: Path, jobs: int) -> str:
    return f"left to the {worker.kind} that serves {root}: {jobs} jobs"


def _runs_with_jobs(root: Path) -> list[str]:
    """Return the URLs of the runs with staged jobs; jobs that cannot be read name no run."""
    urls: set[str] = set()
    for staged_run in staged_runs(root):
        for job_file in staged_run.staged_jobs():
            with suppress(RecpointError, OSError):
                urls.add(job_files.read_job(job_file).run_url)
                break
    return sorted(urls)


def _count(root: Path) -> int:
    return sum(len(staged_run.staged_jobs()) for staged_run in staged_runs(root))
