"""Tells Prefect that a training has ended, so that its silence raises no alert.

A trainer never talks to Prefect: it leaves a note in the staging area, which the agent finds. The
event needs the run's id, which only jobs contain, so the agent keeps the id for later agents in
the run's directory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import read_note, write_note
from recpoint.catalog.staging.trainer_note import read_trainer_note, trainer_state
from recpoint.errors import StagingRefused
from recpoint.flows.agent.runs import RunState
from recpoint.format.job import Job
from recpoint.format.notes import NEWEST_RUN_NOTE, NewestRunNote

__all__ = [
    "expect_end",
    "tell_ended_trainings",
]


_LOG = logging.getLogger("recpoint.agent")


def expect_end(staged_run: StagedRun, job: Job) -> None:
    """Keep the run's id and URL in the run's directory, for the agent that sees the training end.

    If the directory cannot be written, a later agent cannot tell Prefect of the end.
    """
    expected = read_note(staged_run, NEWEST_RUN_NOTE)
    if expected is None or (expected.run, expected.run_url) != (job.run, job.run_url):
        _keep(staged_run, NewestRunNote(run=job.run, run_url=job.run_url))


def tell_ended_trainings(runs: Mapping[StagedRun, RunState]) -> None:
    """Send one event for each training that ended by itself; does not wait for Prefect.

    Leaves out runs of which no agent has persisted a job: nobody expects a commit of those. Call it
    while Prefect answers.

    Args:
        runs: the state of each run.
    """
    for staged_run, state in runs.items():
        if state.works:
            continue
        note = read_trainer_note(staged_run)
        if note is None or note.state != "ended" or state.end_told_ms == note.at_ms:
            continue
        # The event must follow the last commit, because a commit starts the wait for the next one.
        try:
            if trainer_state(staged_run, note) != "ended" or staged_run.staged_jobs():
                continue
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: cannot check whether training ended: %s", staged_run.name, error)
            continue
        expected = read_note(staged_run, NEWEST_RUN_NOTE)
        if expected is None and state.run_id is not None and state.run_url is not None:
            # Its file could not be written.
            expected = NewestRunNote(run=state.run_id, run_url=state.run_url)
        if expected is None:
            continue
        if expected.told_ms != note.at_ms:
            # Imported only here: the import takes seconds, and an agent without Prefect never needs
            # it. The gate has already done it.
            from recpoint.tasks.reports import emit

            emit("ended", expected.run, expected.run_url)
            _keep(staged_run, expected.model_copy(update={"told_ms": note.at_ms}))
        state.end_told_ms = note.at_ms


def _keep(staged_run: StagedRun, note: NewestRunNote) -> None:
    """Replace the note atomically, but without fsync, because only an alert depends on it."""
    try:
        write_note(staged_run, NEWEST_RUN_NOTE, note)
    except (OSError, StagingRefused) as error:
        _LOG.warning("%s: %s cannot be written: %s", staged_run.name, NEWEST_RUN_NOTE.file, error)
