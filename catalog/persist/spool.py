"""Reads and writes the files in the spool, and assembles the bodies of chunks (format §7).

Each step of a persist leaves files in the spool for the next step. The spool is emptied when an
agent starts, so nothing here is made durable. A step's result exists as soon as its JSON file has
its final name; a step that finds its result has nothing to do.

Chosen rows are read from where they lie each time they are needed, so that they take no room in the
spool, which may be in memory.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import crc32c
import numpy as np

from recpoint.catalog.staging import owned
from recpoint.catalog.staging.job import StagedJob
from recpoint.catalog.staging.slot_reading import PIECE_BYTES, Extent, read_into, read_pieces
from recpoint.catalog.store import durable
from recpoint.closing import Closing
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

#: Version of the results that steps leave for each other, and of how a job is divided into groups.
#: If it differs, a job that another release began is started over.
_FORM: Final = 3

#: Reading a row by itself costs as much as reading these bytes and leaving them out.
_SKIPPED_BYTES: Final = 16 << 10


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an OSError for lack of room into StagingFull; the job then stays staged."""
    try:
        yield
    except OSError as error:
        if error.errno not in durable.NO_ROOM:
            raise
        raise StagingFull(
            str(path),
            found=error.strerror or str(error),
            expected="room for what is encoded beside the staged checkpoints",
            next_step="free space there; the checkpoint is then tried again by itself. Or set "
            "RECPOINT_STAGING to a larger directory for trainer and agent",
        ) from error


class SpoolFile(Closing):
    """A file to which arrays are appended; each `append` returns where the bytes lie.

    Raises:
        StagingFull: there is no room for the file; raised on open, append, flush or close.
        StagingRefused: the spool belongs to another user.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _writing(path):
            owned.make_directory(_area_of(path), path.parent)
            descriptor = open_in_spool(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._file = open(descriptor, "wb")
        self._end = 0

    def append(self, data: bytes | np.ndarray[Any, Any]) -> Extent:
        """Write the bytes of `data` (an array must be C-contiguous) at the end."""
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
        """Make the appended bytes readable through the file's path."""
        with _writing(self.path):
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with _writing(self.path):
            self._file.close()


def result_path(staged: StagedJob, group: int, step: str) -> Path:
    """Return the path of the JSON file that a step leaves for a group of a job."""
    return staged.spool / f"g{group:04d}.{step}.json"


def empty_spool(staged: StagedJob) -> None:
    """Remove a job's spool, so that it is encoded and uploaded anew; no other process may use it.

    Raises:
        StagingRefused: the spool belongs to another user.
        OSError: the spool cannot be removed.
    """
    owned.remove_tree(staged.spool.parent.parent.parent, staged.spool)


def save_result(path: Path, staged: StagedJob, value: dict[str, Any]) -> None:
    """Write a step's result atomically.

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
    """Return a step's result; None if this release has not done the step for this attempt."""
    try:
        with open(open_in_spool(path), encoding="utf-8") as file:
            value: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return None
    is_current = value.get("form") == _FORM and value["attempt"] == staged.job.attempt
    return value if is_current else None


def _area_of(path: Path) -> Path:
    """Return the staging area of a file in the spool: `<area>/<run>/spool/<job>/<name>`."""
    return path.parent.parent.parent.parent


def open_in_spool(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file of the spool; `flags` and errors are those of `owned.open_file`."""
    return owned.open_file(_area_of(path), path, flags)


def extent_list(extents: tuple[Extent, ...]) -> list[list[Any]]:
    """Return extents as JSON."""
    return [list(extent) for extent in extents]


def extent_from(value: list[Any]) -> Extent:
    """Return one extent from JSON."""
    path, offset, length = value
    return Extent(str(path), int(offset), int(length))


_Mask = np.ndarray[Any, np.dtype[np.bool_]]
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ChosenRows(NamedTuple):
    """Some of the rows of an extent, concatenated.

    Attributes:
        whole: extent of all rows.
        row_bytes: bytes of each row.
        rows: number of chosen rows.
        bits: extent of the mask of chosen rows, as `write_bits` writes it.
    """

    whole: Extent
    row_bytes: int
    rows: int
    bits: Extent

    @property
    def length(self) -> int:
        """Bytes of all chosen rows."""
        return self.rows * self.row_bytes


Part = Extent | ChosenRows


def write_bits(mask: _Mask, spool: SpoolFile) -> Extent:
    """Write `mask` (bool [n]) as packed bits, ceil(n / 8) bytes."""
    return spool.append(np.packbits(mask, bitorder="little"))


def read_bits(bits: Extent, count: int) -> _Mask:
    """Return the first `count` entries of a mask that `write_bits` has written: bool [count].

    Raises:
        StagingError: the spool cannot be read.
    """
    return _unpacked(_read(bits), count)


def digest_parts(parts: tuple[Part, ...], *, start: bytes) -> int:
    """Return the crc32c of `start` followed by the parts' bytes.

    Raises:
        StagingError: slot or spool cannot be read.
    """
    value: int = crc32c.crc32c(start)
    for piece in pieces(*parts):
        value = crc32c.crc32c(piece, value)
    return value


def pieces(*parts: Part) -> Iterator[memoryview]:
    """Yield the bytes of parts, whole rows at a time; each piece is valid until the next one.

    Raises:
        StagingError: slot or spool cannot be read.
    """
    for extents, chosen in _by_form(parts):
        yield from read_pieces(*extents)
        for part in chosen:
            if part.whole.length > part.rows * _SKIPPED_BYTES:
                yield from _few_rows(part)
            else:
                yield from _many_rows(part)


def _by_form(parts: tuple[Part, ...]) -> Iterator[tuple[list[Extent], list[ChosenRows]]]:
    """Yield the parts in order: extents that follow each other together, chosen rows one by one.

    So each file is opened once for many small extents.
    """
    extents: list[Extent] = []
    for part in parts:
        if isinstance(part, Extent):
            extents.append(part)
        else:
            yield extents, [part]
            extents = []
    yield extents, []


def _few_rows(part: ChosenRows) -> Iterator[memoryview]:
    """Yield chosen rows that lie far apart: reads nothing in between."""
    path, offset, length = part.whole
    positions = np.flatnonzero(_unpacked(_read(part.bits), length // part.row_bytes))
    rows_each = max(1, PIECE_BYTES // part.row_bytes)
    for first in range(0, len(positions), rows_each):
        chosen = positions[first : first + rows_each].tolist()
        piece = memoryview(bytearray(len(chosen) * part.row_bytes))
        read_into(
            piece,
            *(Extent(path, offset + row * part.row_bytes, part.row_bytes) for row in chosen),
        )
        yield piece


def _many_rows(part: ChosenRows) -> Iterator[memoryview]:
    """Yield chosen rows out of all rows, which are read."""
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
    """Return `start` followed by the parts' bytes.

    Raises:
        StagingError: slot or spool cannot be read.
    """
    buffer = io.BytesIO()
    buffer.write(start)
    total = len(start) + sum(part.length for part in parts)
    if total > len(start):
        # Grows the buffer to its final size first; getvalue() then returns it without a copy.
        buffer.seek(total - 1)
        buffer.write(b"\0")
    with buffer.getbuffer() as view:
        filled = len(start)
        for extents, chosen in _by_form(parts):
            length = sum(extent.length for extent in extents)
            with view[filled : filled + length] as target:
                read_into(target, *extents)
            filled += length
            for part in chosen:
                with view[filled : filled + part.length] as target:
                    _fill(part, target)
                filled += part.length
    return buffer.getvalue()


def part_list(parts: tuple[Part, ...]) -> list[list[Any]]:
    """Return parts as JSON."""
    return [
        list(part)
        if isinstance(part, Extent)
        else [list(part.whole), part.row_bytes, part.rows, list(part.bits)]
        for part in parts
    ]


def part_from(value: list[Any]) -> Part:
    """Return one part from JSON."""
    if not isinstance(value[0], list):
        return extent_from(value)
    whole, row_bytes, rows, bits = value
    return ChosenRows(extent_from(whole), int(row_bytes), int(rows), extent_from(bits))


def _fill(part: ChosenRows, target: memoryview) -> None:
    """Copy a part; leave out bytes that do not fit if the spool changed (the digest differs)."""
    filled = 0
    for piece in pieces(part):
        fitting = piece[: len(target) - filled]
        target[filled : filled + len(fitting)] = fitting
        filled += len(fitting)


def _read(extent: Extent) -> _Bytes:
    data = np.empty(extent.length, np.uint8)
    if extent.length:
        read_into(data.data, extent)
    return data


def _unpacked(bits: _Bytes, count: int) -> _Mask:
    return np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)
