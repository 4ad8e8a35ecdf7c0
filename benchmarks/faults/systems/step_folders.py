"""Shared by systems that give each checkpoint a folder, and leave it to users which is newest.

The newest is the folder with the highest step in its name that is complete, where the system has a
mark for that. torchtitan and the tutorial of torch-checkpointing choose like this.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from benchmarks.faults.system import System

__all__ = ["NoCheckpoint", "StepFolders"]

_NAME = re.compile(r"step_(\d+)")


class NoCheckpoint(Exception):
    """There is no complete checkpoint."""


class StepFolders(System):
    """A system whose checkpoint of step n is the folder `step_n`.

    Attributes:
        mark: the file that is written last; a folder without it is no checkpoint. Empty: none is.
    """

    mark: ClassVar[str] = ""

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.place.store / f"step_{step}"

    def newest(self) -> int:
        """Return the newest complete step.

        Raises:
            NoCheckpoint: there is none.
        """
        steps = [
            int(match[1])
            for path in (self.place.store.iterdir() if self.place.store.is_dir() else ())
            if (match := _NAME.fullmatch(path.name)) and (path / self.mark).exists()
        ]
        if not steps:
            raise NoCheckpoint(f"{self.place.store}: no complete folder step_N")
        return max(steps)

    def files(self, step: int) -> list[Path]:
        """See `System.files`."""
        return sorted(path for path in self.folder(step).rglob("*") if path.is_file())

    def names(self, step: int) -> list[str]:
        """See `System.names`."""
        return [f"step_{step}"]
