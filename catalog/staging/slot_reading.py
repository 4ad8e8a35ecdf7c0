"""Reads ranges of a slot's bytes, several files open at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from recpoint.catalog.staging import owned
from recpoint.closing import Closing
from recpoint.errors import StagingError

__all__ = [
    "Extent",
    "NEXT",
    "PIECE_BYTES",
    "area_of",
    "read_into",
    "read_pieces",
]

#: Bytes that are read at once; small, because each upload has its own buffer.
PIECE_BYTES = 1 << 20
NEXT = "nothing: the job is rejected, and the trainer stages its rows again"


class Extent(NamedTuple):
    """A range of bytes in a file: the slot or a file in the spool."""

    path: str
    offset: int
    length: int


class _Files(Closing):
    """Opens each file once for all extents of one read."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, path: str, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes of the file from `offset` on."""
        if path not in self._open:
            self._open[path] = owned.open_file(area_of(Path(path)), Path(path))
        descriptor = self._open[path]
        done = 0
        while done < len(view):
            got = os.preadv(descriptor, [view[done:]], offset + done)
            if got == 0:
                raise StagingError(
                    path,
                    found=f"the file's end at byte {offset + done}",
                    expected=f"{len(view) - done} more bytes",
                    next_step=NEXT,
                )
            done += got


@contextmanager
def _reading() -> Iterator[_Files]:
    try:
        with _Files() as files:
            yield files
    except OSError as error:
        # Only a failed medium stays failed, so only EIO may reject the job. Other errors (no
        # descriptors, no memory) pass, and rejecting the job would lose it for nothing.
        if error.errno != errno.EIO:
            raise
        raise StagingError(
            str(error.filename or "staging area"),
            found="an input/output error",
            expected="readable bytes",
            next_step="check the disk; the job is rejected, and the trainer stages its rows again",
        ) from error


def read_into(view: memoryview, *extents: Extent) -> None:
    """Fill `view` with the bytes of the extents, one after another.

    Args:
        view: as long as all extents together.
        extents: what to read.

    Raises:
        StagingError: a file ends early, or its medium fails.
        ValueError: `view` has another length.
    """
    length = sum(extent.length for extent in extents)
    if len(view) != length:
        raise ValueError(f"{len(view)} bytes of room for {length}")
    done = 0
    with _reading() as files:
        for extent in extents:
            files.read(extent.path, extent.offset, view[done : done + extent.length])
            done += extent.length


def read_pieces(*extents: Extent) -> Iterator[memoryview]:
    """Yield the extents' bytes in pieces of at most 1 MiB; each is valid until the next.

    Raises:
        StagingError: as `read_into`.
    """
    longest = max((extent.length for extent in extents), default=0)
    buffer = memoryview(bytearray(min(PIECE_BYTES, longest)))
    with _reading() as files:
        for extent in extents:
            for done in range(0, extent.length, PIECE_BYTES):
                piece = buffer[: min(PIECE_BYTES, extent.length - done)]
                files.read(extent.path, extent.offset + done, piece)
                yield piece


def area_of(path: Path) -> Path:
    """Return the staging area of a file in a run's `slots` or `spool`, or else its directory."""
    for above in path.parents:
        if above.name in ("slots", "spool"):
            return above.parent.parent
    return path.parent
