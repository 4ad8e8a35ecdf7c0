"""Keys of artifacts: one history in Prefect's UI for each thing that a run shows."""

from __future__ import annotations

import re

__all__ = ["ARTIFACT_PREFIX", "artifact_key", "run_title"]

#: Of every artifact of ours.
ARTIFACT_PREFIX = "recpoint-"

_ID_CHARACTERS = 12


def artifact_key(run_url: str, run_id: str, what: str) -> str:
    """The key of what a run shows, such as its lag or the table of one checkpoint.

    Artifacts of one key are versions of one thing to Prefect, so that runs of the same name, each
    in a folder or bucket of its own, must never share one: some characters of the id are in it.

    Args:
        run_url: the run; the last part of it is for people.
        run_id: 32 hexadecimal digits.
        what: lower-case letters, digits and dashes.

    Returns:
        At most 80 characters of the name between `recpoint-` and the id.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run_title(run_url).lower()).strip("-")[:80] or "run"
    return f"{ARTIFACT_PREFIX}{name}-{run_id[:_ID_CHARACTERS]}-{what}"


def run_title(run_url: str) -> str:
    """What people call the run: the last part of its URL."""
    return run_url.rstrip("/").rpartition("/")[2] or "run"
