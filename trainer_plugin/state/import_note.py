"""Marks the checkpoint that `recpoint import` writes, which has no trainer's state.

A trainer begins a job with such a checkpoint: it takes the tables and dense tensors, and all else
begins as the script has made it (decision 52).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["IMPORT_NOTE", "ImportNote", "imported_path"]

#: The extra that says so (format §3.4).
IMPORT_NOTE: Final = "recpoint.import"


class ImportNote:
    """Is stored as an extra of the checkpoint.

    Args:
        path: path of the other tool's checkpoint.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def state_dict(self) -> dict[str, Any]:
        """Return the path."""
        return {"path": self._path}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the path of a restored checkpoint."""
        self._path = state["path"]


def imported_path(saved: Mapping[str, Any]) -> str | None:
    """Return the path from which a tree was imported; None: a trainer has made it."""
    extras = saved.get("extras")
    note = extras.get(IMPORT_NOTE) if isinstance(extras, Mapping) else None
    return str(note.get("path")) if isinstance(note, Mapping) else None
