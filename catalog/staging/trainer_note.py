"""The note that a trainer leaves in the staging area: which run it trains, and whether it ended.

A lock says whether a trainer is alive. Only the trainer can say whether one that is gone had
finished, or obeyed a signal, or was killed: what is worth waking somebody up for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from recpoint.catalog.staging import owned, staged
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.catalog.stores.run_url import parse_run_url
from recpoint.errors import SettingsError, StagingRefused

__all__ = ["NoteState", "TrainerNote", "TrainerState", "read_note", "trainer_state", "write_note"]

NoteState = Literal["training", "ended"]
TrainerState = Literal["training", "ended", "lost", "unknown"]

_FILE: Final = "trainer.json"
_MOST_BYTES: Final = 65_536


class TrainerNote(NamedTuple):
    """What a trainer said of itself; `at_ms`: when, on this host's clock."""

    run_url: str
    state: NoteState
    at_ms: int


def write_note(run_dir: Path, run_url: str, state: NoteState) -> None:
    """Replace the note; whole at every moment, but not made durable: it is about this boot.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it cannot be written.
    """
    document = {"run_url": run_url, "state": state, "at_ms": now_ms()}
    owned.replace(
        run_dir.parent,
        run_dir / _FILE,
        (json.dumps(document) + "\n").encode(),
        temporary=f".tmp-trainer-{os.getpid()}",
    )


def read_note(run_dir: Path) -> TrainerNote | None:
    """The newest trainer's note; None if none can be read, or it is another run's."""
    try:
        found = json.loads(owned.read(run_dir.parent, run_dir / _FILE, _MOST_BYTES))
        run_url = parse_run_url(str(found["run_url"])).url
        state, at_ms = found["state"], found["at_ms"]
    except (
        OSError,
        StagingRefused,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        SettingsError,
    ):
        return None
    if state not in get_args(NoteState) or type(at_ms) is not int:
        return None
    if staged.run_directory(run_dir.parent, run_url).name != run_dir.name:
        return None
    return TrainerNote(run_url, state, at_ms)


def trainer_state(run_dir: Path, note: TrainerNote | None) -> TrainerState:
    """What has become of the newest trainer of a run on this host.

    Args:
        run_dir: the run's directory.
        note: what it has said.

    Returns:
        `training`; `ended`: it said goodbye; `lost`: it is gone without a word; `unknown`: it never
        said anything, or the file system does not say whether it holds its lock.
    """
    try:
        if staged.trainer_is_running(run_dir):
            return "training"
    except (OSError, StagingRefused):
        return "unknown"  # whoever needs that lock tries to take it, and says what is wrong there
    if note is None:
        return "unknown"
    return "ended" if note.state == "ended" else "lost"
