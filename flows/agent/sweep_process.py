"""Sweeps a run as the agent's child process: lowest priority, ends with the agent.

    python -m recpoint.flows.agent.sweep_process RUN_URL RUN_DIRECTORY GRACE_SECONDS PARENT_PID

Runs the flow if `PREFECT_API_URL` is set. If it is not set, or Prefect fails, calls the same
function without Prefect. Unlike a consolidation it is never stopped (SIGSTOP), because a sweep must
remove objects soon after it has checked them (format §6.5). Its answer has `done`, `gone` or
`error`; with `done`, `nothing_left` says whether a later sweep has nothing to do.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from recpoint.catalog.retention.sweep_here import NOTHING_LEFT, sweep_here, swept_words
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.store.store import open_store
from recpoint.errors import NothingToRestore, RecpointError, RunRecordLost
from recpoint.flows.agent.children import begin, run_flow, tell_agent

__all__ = ["main"]


_LOG = logging.getLogger("recpoint.sweep")


def main(arguments: list[str]) -> int:
    """Sweep a run.

    Returns:
        Exit status: 0, or 1 if it failed.
    """
    run_url, grace_seconds = arguments[0], float(arguments[2])
    staged_run = StagedRun(Path(arguments[1]))
    begin(int(arguments[3]))
    try:
        done = run_flow(lambda: _flow(run_url, staged_run, grace_seconds), _LOG)
        if done is None:
            swept = sweep_here(open_store(run_url), staged_run, grace_seconds=grace_seconds)
            done = swept_words(swept)
    except RunRecordLost as error:
        return tell_agent(error=str(error))
    except NothingToRestore as error:  # the run is gone, so a later sweep would find nothing either
        return tell_agent(gone=str(error))
    except (RecpointError, OSError, MemoryError) as error:
        return tell_agent(error=f"{type(error).__name__}: {error}")
    return tell_agent(done=done, nothing_left=done.rstrip(".").endswith(NOTHING_LEFT))


def _flow(run_url: str, staged_run: StagedRun, grace_seconds: float) -> Any:
    from recpoint.flows.sweep import run_sweep

    return run_sweep(run_url, staging=str(staged_run.staging), grace_seconds=grace_seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
