"""Notes when an agent last swept a run of its staging area, and if that was the last time (§7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from recpoint.catalog.staging import owned
from recpoint.catalog.store.contract import now_ms
from recpoint.errors import StagingRefused

__all__ = [
    "LastSweep",
    "last_sweep",
    "note_sweep",
    "swept_ms",
]


_FILE: Final = "sweep.json"
_MOST_BYTES: Final = 65_536


class LastSweep(NamedTuple):
    """The note of a run's last sweep.

    Attributes:
        at_ms: time of the sweep, or since when the first one is waited for; in milliseconds since
            the epoch by this host's clock.
        ended_ms: if the sweep found nothing left to do after training had ended: the time of that
            end, by the trainer's clock. None: something was left, or training had not ended.
    """

    at_ms: int
    ended_ms: int | None


def note_sweep(run_dir: Path, *, ended_ms: int | None = None) -> None:
    """Note that a run was swept now, or that the wait for its first sweep begins.

    Args:
        run_dir: the run's directory in a staging area.
        ended_ms: see `LastSweep`.

    Raises:
        StagingRefused: the directory belongs to another user.
        OSError: the note cannot be written.
    """
    document: dict[str, int] = {"at_ms": now_ms()}
    if ended_ms is not None:
        document["ended_ms"] = ended_ms
    owned.write_atomically(run_dir.parent, run_dir / _FILE, json.dumps(document).encode())


def last_sweep(run_dir: Path) -> LastSweep | None:
    """Return the note of the last sweep; None if there is none or it is damaged."""
    try:
        document = json.loads(owned.read(run_dir.parent, run_dir / _FILE, _MOST_BYTES))
        at_ms, ended_ms = document["at_ms"], document.get("ended_ms")
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
    if type(at_ms) is not int:
        return None
    return LastSweep(at_ms, ended_ms if type(ended_ms) is int else None)


def swept_ms(run_dir: Path) -> int | None:
    """Return `LastSweep.at_ms` of a run; None as for `last_sweep`."""
    note = last_sweep(run_dir)
    return None if note is None else note.at_ms
