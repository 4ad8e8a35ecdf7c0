"""Flow: finish what is staged on this host when no agent is there to do it.

A trainer that died may leave a staged job, and so does an agent that dies. The job is committed, or
rejected if it can never be; what only has to wait stays staged.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prefect import State, flow
from prefect.states import Completed

from recpoint.catalog.staging import area
from recpoint.catalog.staging.agent import AtWork, at_work
from recpoint.errors import StagingError
from recpoint.flows.agent.agent import run_agent
from recpoint.flows.parameters import NO_RESULTS, StagingArea

__all__ = ["drain"]


@flow(
    name="drain",
    timeout_seconds=9 * 3600,
    persist_result=False,
    result_storage=NO_RESULTS,
)
async def drain(staging: StagingArea | None = None) -> State[Any]:
    """Do all jobs of a staging area that can be done now, unless an agent or drain serves it.

    A sweep that is at work there is waited for.

    Args:
        staging: the staging area of this host; the default one if None.

    Returns:
        Completed; its message says how many jobs were done, and how many have to wait.

    Raises:
        StagingError: the staging area may not be used.
        OSError: it cannot be read.
    """
    root = area.default_staging_root() if staging is None else Path(staging)
    return Completed(message=await asyncio.to_thread(_drain, root))


def _drain(root: Path) -> str:
    before = _count(root)
    if not before:
        return "nothing is staged"
    if (other := at_work(root)) is not None and not other.run:
        return _left_to(other, root, before)
    try:
        # Without flow runs of its own: this one is there to be seen.
        left = run_agent(root, once=True, prefect="off")
    except StagingError:
        if (other := at_work(root)) is not None and not other.ends_by_itself:
            return _left_to(other, root, before)  # one that was started just now
        raise
    return f"{max(0, before - left)} jobs done, {left} still staged"


def _left_to(other: AtWork, root: Path, jobs: int) -> str:
    return f"left to the {other.kind} that serves {root}: {jobs} jobs"


def _count(root: Path) -> int:
    return sum(len(area.staged_jobs(run_dir)) for run_dir in area.run_directories(root))
