"""Telling Prefect that a training has ended, so that its silence raises no alert.

A trainer never talks to Prefect: it leaves a note in the staging area, which the agent finds. Whose
id that run has, only its jobs say: the agent keeps it there, for those that come after it.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from recpoint.catalog.staging import owned, staged
from recpoint.catalog.staging.trainer_note import read_note, trainer_state
from recpoint.catalog.stores import durable
from recpoint.errors import StagingRefused
from recpoint.flows.agent_runs import RunState
from recpoint.format.job import Job

__all__ = ["expect_end", "tell_ended_trainings"]

_LOG = logging.getLogger("recpoint.agent")

_FILE: Final = "silence.json"
_MOST_BYTES: Final = 65_536


class _Expected(NamedTuple):
    """A run whose commits Prefect may have been told of; `told_ms`: the end that it was told of."""

    run_id: str
    run_url: str
    told_ms: int | None = None


def expect_end(run_dir: Path, job: Job) -> None:
    """Keep in the run's directory whose jobs are done there; the agent may be another by the end.

    A directory that cannot be written costs only that.
    """
    there = _expected(run_dir)
    if there is None or (there.run_id, there.run_url) != (job.run, job.run_url):
        _write_expected(run_dir, _Expected(job.run, job.run_url))


def tell_ended_trainings(runs: Mapping[Path, RunState]) -> None:
    """Send an event for each training that said goodbye, once; returns at once.

    Only of runs that an agent has persisted something of: of others nobody expects a commit. Called
    while Prefect answers.

    Args:
        runs: the runs by directory.
    """
    for run_dir, state in runs.items():
        if state.works:
            continue
        note = read_note(run_dir)
        if note is None or note.state != "ended" or state.end_told_ms == note.at_ms:
            continue
        # After its last commit, or that one would begin a new silence.
        try:
            if trainer_state(run_dir, note) != "ended" or staged.staged_jobs(run_dir):
                continue
        except (OSError, StagingRefused) as error:
            _LOG.warning("%s: whether it has ended cannot be told: %s", run_dir.name, error)
            continue
        expected = _expected(run_dir)
        if expected is None and state.run_id is not None and state.run_url is not None:
            expected = _Expected(state.run_id, state.run_url)  # it could not be written
        if expected is None:
            continue
        if expected.told_ms != note.at_ms:
            # Imported by now: Prefect takes seconds; the agent does without it where it is away.
            from recpoint.tasks.events import emit

            emit("ended", expected.run_id, expected.run_url)
            _write_expected(run_dir, expected._replace(told_ms=note.at_ms))
        state.end_told_ms = note.at_ms


def _expected(run_dir: Path) -> _Expected | None:
    """What was kept; None: nothing was, or it is damaged."""
    try:
        found = json.loads(owned.read(run_dir.parent, run_dir / _FILE, _MOST_BYTES))
        run_id, run_url, told_ms = found["run"], found["run_url"], found.get("told_ms")
    except (
        OSError,
        StagingRefused,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return None
    if not isinstance(run_id, str) or not isinstance(run_url, str):
        return None
    return _Expected(run_id, run_url, told_ms if type(told_ms) is int else None)


def _write_expected(run_dir: Path, expected: _Expected) -> None:
    """Replace what was kept; whole at every moment, but not made durable: it is for people."""
    document: dict[str, object] = {"run": expected.run_id, "run_url": expected.run_url}
    if expected.told_ms is not None:
        document["told_ms"] = expected.told_ms
    try:
        owned.replace(
            run_dir.parent,
            run_dir / _FILE,
            (json.dumps(document) + "\n").encode(),
            temporary=f"{durable.TEMPORARY_PREFIX}{secrets.token_hex(16)}",
        )
    except (OSError, StagingRefused) as error:
        _LOG.warning("%s: %s cannot be written: %s", run_dir.name, _FILE, error)
