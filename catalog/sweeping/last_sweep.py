"""When an agent has swept a run of its staging area last, and whether that was for good (§7)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

from recpoint.catalog.staging import owned
from recpoint.catalog.stores.elapsed import now_ms
from recpoint.errors import StagingRefused

__all__ = ["LastSweep", "last_sweep", "note_sweep", "swept_ms"]

_FILE: Final = "sweep.json"
_MOST_BYTES: Final = 65_536


class LastSweep(NamedTuple):
    """What was noted of a sweep.

    Attributes:
        at_ms: when it was, or when one began to be waited for; on this host's clock.
        ended_ms: when the training had ended after which it found nothing left to do, as that one's
            trainer said; None: something was left, or it had not ended.
    """

    at_ms: int
    ended_ms: int | None


def note_sweep(run_dir: Path, *, ended_ms: int | None = None) -> None:
    """Note that a run was swept now, or that one begins to wait for its first sweep.

    Raises:
        StagingRefused: the directory is not this user's own.
        OSError: it cannot be written.
    """
    document: dict[str, int] = {"at_ms": now_ms()}
    if ended_ms is not None:
        document["ended_ms"] = ended_ms
    owned.write_atomically(run_dir.parent, run_dir / _FILE, json.dumps(document).encode())


def last_sweep(run_dir: Path) -> LastSweep | None:
    """What was noted last; None: nothing was, or it is damaged."""
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
    """When it was swept last; None as for `last_sweep`."""
    note = last_sweep(run_dir)
    return None if note is None else note.at_ms
