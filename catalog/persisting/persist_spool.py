"""Files in the spool: what the steps of a persist leave for each other (format §7).

The spool is emptied when an agent starts, so nothing here is made durable. A step's result exists
once its JSON file has its final name; a step that finds its result there has nothing to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.staged_job import Extent, StagedJob
from recpoint.catalog.stores import durable
from recpoint.errors import StagingFull

__all__ = [
    "SpoolFile",
    "empty_spool",
    "extent_from",
    "extent_list",
    "load_result",
    "open_in_spool",
    "result_path",
    "save_result",
]

#: Of what steps leave for each other, and of how a job is cut into groups. Changed with either: a
#: job that was begun by another release is begun anew.
_FORM: Final = 2


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the file where there is no room for it; the job stays staged, and is tried again."""
    try:
        yield
    except OSError as error:
        if error.errno not in durable.NO_ROOM:
            raise
        raise StagingFull(
            str(path),
            found=error.strerror or str(error),
            expected="room for what is encoded beside the staged checkpoints",
            next_step="free space there; the checkpoint is tried again by itself. Or give trainer "
            "and agent a larger directory: RECPOINT_STAGING",
        ) from error


class SpoolFile:
    """A file that grows by arrays; each `append` says where its bytes went.

    Raises:
        StagingFull: there is no room for it, when it is opened, added to, flushed or closed.
        StagingRefused: the spool is not this user's own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _writing(path):
            owned.make_directory(_area_of(path), path.parent)
            descriptor = open_in_spool(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._file = open(descriptor, "wb")  # noqa: SIM115
        self._end = 0

    def append(self, data: bytes | np.ndarray[Any, Any]) -> Extent:
        """Write an array's (C-contiguous) or string's bytes at the end."""
        if isinstance(data, bytes):
            view = memoryview(data)
        else:
            view = data.data.cast("B") if data.size else memoryview(b"")
        with _writing(self.path):
            self._file.write(view)
        extent = Extent(str(self.path), self._end, len(view))
        self._end += len(view)
        return extent

    def flush(self) -> None:
        """Let what was appended be read."""
        with _writing(self.path):
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _writing(self.path):
            self._file.close()


def result_path(staged: StagedJob, group: int, step: str) -> Path:
    """The JSON file that a step leaves for a group of a job."""
    return staged.spool / f"g{group:04d}.{step}.json"


def empty_spool(staged: StagedJob) -> None:
    """Forget what has been encoded and uploaded of a job; nobody else may be at work on it.

    Raises:
        StagingRefused: it is not this user's own.
        OSError: it cannot be removed.
    """
    owned.remove_tree(staged.spool.parent.parent.parent, staged.spool)


def save_result(path: Path, staged: StagedJob, value: dict[str, Any]) -> None:
    """Write a step's result; it is there as a whole or not at all.

    Raises:
        StagingFull: there is no room for it.
    """
    whole = {"form": _FORM, "attempt": staged.job.attempt, **value}
    area = _area_of(path)
    with _writing(path):
        owned.make_directory(area, path.parent)
        data = json.dumps(whole, separators=(",", ":")).encode()
        owned.replace(area, path, data, temporary=path.with_suffix(".tmp").name)


def load_result(path: Path, staged: StagedJob) -> dict[str, Any] | None:
    """A step's result; None if this release has not done the step for this attempt."""
    try:
        with open(open_in_spool(path), encoding="utf-8") as file:
            value: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    known = value.get("form") == _FORM and value["attempt"] == staged.job.attempt
    return value if known else None


def _area_of(path: Path) -> Path:
    """The staging area of a file in the spool, which is `<area>/<run>/spool/<job>/<name>`."""
    return path.parent.parent.parent.parent


def open_in_spool(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of the spool; arguments and errors as those of `owned.open_file`."""
    return owned.open_file(_area_of(path), path, flags)


def extent_list(extents: tuple[Extent, ...]) -> list[list[Any]]:
    """Extents as JSON."""
    return [list(extent) for extent in extents]


def extent_from(value: list[Any]) -> Extent:
    """One extent from JSON."""
    path, offset, length = value
    return Extent(str(path), int(offset), int(length))
