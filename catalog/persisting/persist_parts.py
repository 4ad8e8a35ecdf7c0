"""What the bodies of chunks are put together from: pieces of files, and rows chosen of them.

Rows that are chosen are read where they lie whenever they are needed, so that they take no room in
the spool, which may be in memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import crc32c
import numpy as np

from recpoint.catalog.persisting.persist_spool import SpoolFile, extent_from
from recpoint.catalog.staging.staged_job import PIECE_BYTES, Extent, read_into, read_pieces

__all__ = [
    "ChosenRows",
    "Part",
    "assemble_parts",
    "digest_parts",
    "part_from",
    "part_list",
    "pieces",
    "read_bits",
    "write_bits",
]

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
