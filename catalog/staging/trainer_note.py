"""Reads and writes a trainer's note: the run that it trains, and whether it has ended (format §7).

A trainer touches its note every few seconds, so the file's time is its last sign of life.

A lock shows whether a trainer is alive. Only the trainer's note shows whether a trainer that is
gone had finished or obeyed a signal, or was killed, which is worth an alarm.
"""

from __future__ import annotations

import os
from typing import Final, Literal, NamedTuple

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.area import StagedRun
from recpoint.catalog.staging.notes import write_note
from recpoint.catalog.store.contract import now_ms
from recpoint.catalog.store.run_url import parse_run_url
from recpoint.errors import SettingsError, StagingRefused
from recpoint.format.notes import MAX_NOTE_BYTES, TRAINING_NOTE, TrainingNote

__all__ = [
    "BEAT_SECONDS",
    "NoteState",
    "TrainerNote",
    "TrainerState",
    "beat",
    "read_trainer_note",
    "trainer_state",
    "write_trainer_note",
]

NoteState = Literal["training", "ended"]
TrainerState = Literal["training", "ended", "lost", "unknown"]

#: A trainer touches its note this often, unless its background thread is staging a checkpoint.
BEAT_SECONDS: Final = 5.0


class TrainerNote(NamedTuple):
    """A trainer's note about itself.

    Attributes:
        run_url: the run that it trains.
        state: whether it trains or has ended.
        at_ms: when it wrote the note, in ms since the epoch by this host's clock.
        seen_ms: when it touched the note last; see `beat`.
    """

    run_url: str
    state: NoteState
    at_ms: int
    seen_ms: int


def write_trainer_note(staged_run: StagedRun, run_url: str, state: NoteState) -> None:
    """Replace the note so that it is whole at every moment, but not durably.

    It need not survive a reboot, because no trainer does.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it cannot be written.
    """
    note = TrainingNote(run_url=run_url, state=state, at_ms=now_ms())
    write_note(staged_run, TRAINING_NOTE, note, temporary=f".tmp-trainer-{os.getpid()}")


def beat(staged_run: StagedRun) -> None:
    """Touch the trainer's note, as a sign that the trainer lives.

    Raises:
        FileNotFoundError: there is no note.
        StagingRefused: it, or a directory above it, is not this user's own.
        OSError: its time cannot be changed.
    """
    descriptor = owned.open_file(staged_run.staging, staged_run.path / TRAINING_NOTE.file)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def read_trainer_note(staged_run: StagedRun) -> TrainerNote | None:
    """Return the newest trainer's note; None if it cannot be read, or is of another run."""
    path = staged_run.path / TRAINING_NOTE.file
    try:
        with open(owned.open_file(staged_run.staging, path), "rb") as file:
            data = file.read(MAX_NOTE_BYTES)
            seen_ms = os.fstat(file.fileno()).st_mtime_ns // 10**6
    except (OSError, StagingRefused):
        return None
    note = TRAINING_NOTE.unpack(data)
    if note is None:
        return None
    try:
        run_url = parse_run_url(note.run_url).url
    except (SettingsError, ValueError):
        return None
    if StagedRun.of(staged_run.staging, run_url) != staged_run:
        return None
    return TrainerNote(run_url, note.state, note.at_ms, seen_ms)


def trainer_state(staged_run: StagedRun, note: TrainerNote | None) -> TrainerState:
    """Return the state of the newest trainer of a run on this host.

    Args:
        staged_run: the run.
        note: the trainer's note.

    Returns:
        `training`: it is alive; `ended`: it is gone and noted its end; `lost`: it is gone without
        noting its end; `unknown`: there is no note, or the file system does not say whether it
        holds its lock.
    """
    try:
        if staged_run.trainer_is_running():
            return "training"
    except (OSError, StagingRefused):
        return "unknown"  # a process that needs this lock takes it, and reports the error then
    if note is None:
        return "unknown"
    return "ended" if note.state == "ended" else "lost"
