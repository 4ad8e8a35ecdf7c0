"""Giving back this host's memory, once a training that ended by itself has nothing staged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from recpoint.catalog.staging.free_slots import free_slots_of_ended
from recpoint.errors import StagingRefused
from recpoint.flows.agent_runs import RunState

__all__ = ["free_ended_slots"]

_LOG = logging.getLogger("recpoint.agent")


def free_ended_slots(runs: Mapping[Path, RunState]) -> None:
    """Remove the slots of runs that have ended; cheap where there is nothing to do.

    Args:
        runs: the runs by directory.
    """
    for run_dir, state in runs.items():
        if state.works:
            continue
        try:
            freed = free_slots_of_ended(run_dir)
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: its slots cannot be removed: %s", run_dir.name, error)
            continue
        if freed:
            size = sum(slot.size_bytes for slot in freed)
            _LOG.info("%s has ended: %d bytes of slots are free again", run_dir.name, size)
