"""Files in the spool, and what the bodies of chunks are put together from (format §7).

Each step of a persist leaves files there for the next. The spool is emptied when an agent starts,
so nothing here is made durable. A step's result exists once its JSON file has its final name; a
step that finds its result there has nothing to do.

Rows that are chosen are read where they lie whenever they are needed, so that they take no room in
the spool, which may be in memory.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import crc32c
import numpy as np

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.job import PIECE_BYTES, Extent, StagedJob, read_into, read_pieces
from recpoint.catalog.store import durable
from recpoint.errors import StagingFull

__all__ = [
    "ChosenRows",
    "Part",
    "SpoolFile",
    "assemble_parts",
    "digest_parts",
    "empty_spool",
    "extent_from",
    "extent_list",
    "load_result",
    "open_in_spool",
    "part_from",
    "part_list",
    "pieces",
    "read_bits",
    "result_path",
    "save_result",
    "write_bits",
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
            self._file = open(descriptor, "wb")
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


# --- parts of chunks ------------------------------------------------------------------------------


_Mask = np.ndarray[Any, np.dtype[np.bool_]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ChosenRows(NamedTuple):
    """Some of the rows of a piece of a file, one after another.

    Attributes:
        whole: all of the rows.
        row_bytes: of each.
        rows: how many of them are chosen.
        bits: what `write_bits` has written of which.
    """

    whole: Extent
    row_bytes: int
    rows: int
    bits: Extent

    @property
    def length(self) -> int:
        """Bytes of the chosen rows."""
        return self.rows * self.row_bytes


Part = Extent | ChosenRows


def write_bits(mask: _Mask, spool: SpoolFile) -> Extent:
    """Write `mask` [n] as a bit each."""
    return spool.append(np.packbits(mask, bitorder="little"))


def read_bits(bits: Extent, count: int) -> _Mask:
    """The first `count` entries of what `write_bits` has written.

    Raises:
        StagingError: they cannot be read.
    """
    return _unpacked(_read(bits), count)


def digest_parts(parts: tuple[Part, ...], *, start: bytes) -> int:
    """crc32c of `start` and the parts' bytes, one after another.

    Raises:
        StagingError: slot or spool cannot be read.
    """
    value: int = crc32c.crc32c(start)
    for part in parts:
        for piece in pieces(part):
            value = crc32c.crc32c(piece, value)
    return value


def pieces(part: Part) -> Iterator[memoryview]:
    """A part's bytes, whole rows at a time; each piece holds until the next.

    Raises:
        StagingError: slot or spool cannot be read.
    """
    if isinstance(part, Extent):
        yield from read_pieces(part)
        return
    path, offset, length = part.whole
    count, bits = length // part.row_bytes, _read(part.bits)
    rows_each = max(8, PIECE_BYTES // part.row_bytes // 8 * 8)
    buffer = np.empty(min(rows_each, count) * part.row_bytes, np.uint8).data
    for first in range(0, count, rows_each):
        rows = min(rows_each, count - first)
        chosen = _unpacked(bits[first // 8 :], rows)
        if chosen.any():
            piece = buffer[: rows * part.row_bytes]
            read_into(piece, Extent(path, offset + first * part.row_bytes, len(piece)))
            yield np.frombuffer(piece, f"V{part.row_bytes}")[chosen].view(np.uint8).data


def assemble_parts(parts: tuple[Part, ...], *, start: bytes) -> bytes:
    """`start` and the parts' bytes as one object.

    Raises:
        StagingError: slot or spool cannot be read, or chooses another number of rows.
    """
    buffer = io.BytesIO()
    buffer.write(start)
    total = len(start) + sum(part.length for part in parts)
    if total > len(start):
        # Makes the buffer as large as it will be; getvalue() then hands it over without a copy.
        buffer.seek(total - 1)
        buffer.write(b"\0")
    with buffer.getbuffer() as view:
        done = len(start)
        for part in parts:
            into = view[done : done + part.length]
            if isinstance(part, Extent):
                read_into(into, part)
            else:
                _fill(part, into)
            into.release()
            done += part.length
    return buffer.getvalue()


def part_list(parts: tuple[Part, ...]) -> list[list[Any]]:
    """Parts as JSON."""
    return [
        list(part)
        if isinstance(part, Extent)
        else [list(part.whole), part.row_bytes, part.rows, list(part.bits)]
        for part in parts
    ]


def part_from(value: list[Any]) -> Part:
    """One part from JSON."""
    if not isinstance(value[0], list):
        return extent_from(value)
    whole, row_bytes, rows, bits = value
    return ChosenRows(extent_from(whole), int(row_bytes), int(rows), extent_from(bits))


def _fill(part: ChosenRows, into: memoryview) -> None:
    """What does not fit, as the spool has changed, is left out: the chunk's digest tells."""
    done = 0
    for piece in pieces(part):
        fitting = piece[: len(into) - done]
        into[done : done + len(fitting)] = fitting
        done += len(fitting)


def _read(extent: Extent) -> _Bytes:
    found = np.empty(extent.length, np.uint8)
    if extent.length:
        read_into(found.data, extent)
    return found


def _unpacked(bits: _Bytes, count: int) -> _Mask:
    return np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)
