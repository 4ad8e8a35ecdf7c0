"""When an agent has swept a run of its staging area last (format §7)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

from recpoint.catalog import durable

__all__ = ["note_sweep", "swept_ms"]

_FILE: Final = "sweep.json"
_MOST_BYTES: Final = 65_536


def note_sweep(run_dir: Path) -> None:
    """Note that a run was swept now, or that one begins to wait for its first sweep.

    Raises:
        OSError: it cannot be written.
    """
    document = {"at_ms": time.time_ns() // 1_000_000}
    durable.write_atomically(run_dir / _FILE, json.dumps(document).encode())


def swept_ms(run_dir: Path) -> int | None:
    """Milliseconds since 1970 on this host's clock; None: that was never noted, or is damaged."""
    try:
        with (run_dir / _FILE).open("rb") as file:
            at_ms = json.loads(file.read(_MOST_BYTES))["at_ms"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return at_ms if type(at_ms) is int else None
