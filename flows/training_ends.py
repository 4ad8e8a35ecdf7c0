"""Telling Prefect that a training has ended, so that its silence raises no alert.

A trainer never talks to Prefect: it leaves a note in the staging area, which the agent finds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from recpoint.catalog import staged
from recpoint.catalog.trainer_note import read_note, trainer_state
from recpoint.flows.agent_runs import RunState

__all__ = ["tell_ended_trainings"]

_LOG = logging.getLogger("recpoint.agent")


def tell_ended_trainings(runs: Mapping[Path, RunState]) -> None:
    """Send an event for each training that said goodbye since the last call; returns at once.

    Only of runs that this agent has persisted something of: of others nobody expects a commit.
    Called while Prefect answers.

    Args:
        runs: the runs by directory.
    """
    for run_dir, state in runs.items():
        if state.run_id is None or state.run_url is None or state.works:
            continue
        note = read_note(run_dir)
        if note is None or state.end_told_ms == note.at_ms:
            continue
        # After its last commit, or that one would begin a new silence.
        try:
            if trainer_state(run_dir, note) != "ended" or staged.staged_jobs(run_dir):
                continue
        except OSError as error:
            _LOG.warning("%s: whether it has ended cannot be told: %s", run_dir.name, error)
            continue
        # Imported by now: Prefect takes seconds, and the agent does without it where it is away.
        from recpoint.tasks.events import emit

        emit("ended", state.run_id, state.run_url)
        state.end_told_ms = note.at_ms
