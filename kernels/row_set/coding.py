"""What all versions of the row-set coding share: the codings, their choice, their payloads."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.arguments import require
from recpoint.kernels.row_set.frame import compress, decompress

__all__ = [
    "Bytes",
    "Coding",
    "ESCAPE",
    "Gaps",
    "Numbers",
    "RowSet",
    "bitmap_payload",
    "check_range",
    "choose",
    "delta_payload",
    "extent",
    "gap_room",
    "open_bitmap",
    "open_delta",
    "open_runs",
    "out_of_order",
    "outside",
    "runs_payload",
    "too_long",
    "unknown_coding",
]

Coding = Literal["range", "bitmap", "runs", "delta"]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

#: A symbol of this value stands for itself and is followed by another symbol of the same number.
ESCAPE: Final = 255

#: Up to this many rows for each run, one in each byte, a bitmap is smaller than runs or gaps.
_ROWS_PER_RUN: Final = 8

_MOST_LOW_BYTES: Final = 7
_MOST_ROWS: Final = 1 << 62


class RowSet(NamedTuple):
    """A coded set: its first id (0 for none), and a payload unless the coding is "range"."""

    coding: Coding
    first: int
    payload: bytes | None


class Gaps(NamedTuple):
    """A list of gaps as it is stored (format §3.1): `low` byte planes, and a string of symbols."""

    low: int
    planes: Bytes
    symbols: Bytes


def out_of_order() -> ValueError:
    """The error for ids that are not a set in ascending order."""
    return ValueError("ids: not ascending without duplicates from 0 on")


def outside(rows: int) -> ValueError:
    """The error for gaps that lead past the last row."""
    return ValueError(f"row set: an id is not below the table's {rows} rows")


def too_long(count: int) -> ValueError:
    """The error for runs of more ids than there are."""
    return ValueError(f"row set: runs of more than {count} ids")


def unknown_coding(coding: str) -> ValueError:
    """The error for a coding that the format does not have."""
    return ValueError(f"row set: coding {coding!r}, expected range, bitmap, runs or delta")


def extent(ids: Tensor) -> tuple[int, int]:
    """The first id, and how many rows lie from it to the last id; (0, 0) for no ids.

    The caller has to make sure that the ids between ascend.
    """
    require("ids", ids, torch.int64, 1)
    if ids.numel() == 0:
        return 0, 0
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last < first:
        raise out_of_order()
    return first, last - first + 1


def choose(count: int, span: int, runs: int) -> Coding:
    """The coding of `count` ids in `runs` runs of consecutive ids, over `span` rows."""
    if runs <= 1:
        return "range"
    if span <= _ROWS_PER_RUN * runs:
        return "bitmap"
    return "runs" if 2 * runs <= count else "delta"


def gap_room(count: int, span: int) -> tuple[int, int]:
    """How many low bytes of each gap are planes, and the most symbols that the rest can need.

    That is 2 symbols a gap or fewer, and as few planes as this allows.

    Args:
        count: how many ascending numbers the gaps lie between, 2 or more.
        span: the last number less the first, plus 1.
    """
    low, gaps = 0, count - 1
    while (span - count >> 8 * low) // ESCAPE > gaps:
        low += 1
    return low, gaps + (span - count >> 8 * low) // ESCAPE


def bitmap_payload(bits: Bytes) -> bytes:
    """One frame of the bits of the rows from the first id to the last, u8 [ceil(span / 8)]."""
    return compress([bits])


def delta_payload(gaps: Gaps) -> bytes:
    """The number of planes, and a frame of the planes and the symbols."""
    return bytes([gaps.low]) + compress([*_split(gaps), gaps.symbols])


def runs_payload(runs: int, offsets: Gaps, starts: Gaps) -> bytes:
    """How many runs, two numbers of planes, and a frame of all planes and symbols.

    Args:
        runs: how many there are.
        offsets: for each run, its first id less that id's position in the set.
        starts: for each run, that position.
    """
    parts = [*_split(offsets), *_split(starts), offsets.symbols, starts.symbols]
    return runs.to_bytes(8, "little") + bytes([offsets.low, starts.low]) + compress(parts)


def _split(gaps: Gaps) -> list[Bytes]:
    return list(gaps.planes.reshape(gaps.low, -1)) if gaps.low else []


def check_range(first: int, payload: object, *, count: int, rows: int) -> None:
    """Refuse a range with a payload, or one that leaves the table.

    Raises:
        ValueError: says which.
    """
    _check_counts(first, count, rows)
    if payload is not None:
        raise ValueError("row set: a range with a payload")


def open_bitmap(first: int, payload: object, *, count: int, rows: int) -> Bytes:
    """The bits of `count` rows from `first` on, all of them below `rows`: u8 [ceil(span / 8)].

    Raises:
        ValueError: a frame that does not hold exactly that.
    """
    data = _payload(first, payload, count=count, rows=rows)
    bits = decompress(data, smallest=(count + 7) // 8, largest=(_ROWS_PER_RUN * count + 7) // 8)
    if not bits[0] & 1 or not bits[-1]:
        raise ValueError("row set: a bitmap whose ends are not in the set")
    bit_count = int(np.bitwise_count(bits).sum(dtype=np.int64))
    if bit_count != count:
        raise ValueError(f"row set: a bitmap of {bit_count} ids, expected {count}")
    if first + 8 * (bits.size - 1) + int(bits[-1]).bit_length() > rows:
        raise outside(rows)
    return bits


def open_delta(first: int, payload: object, *, count: int, rows: int) -> Gaps:
    """The count − 1 gaps between the ids: that many symbols end one, the very last among them.

    Raises:
        ValueError: a frame that does not hold exactly that.
    """
    data = _payload(first, payload, count=count, rows=rows)
    (low,) = _planes(data[:1], 1)
    gaps = count - 1
    content = decompress(data[1:], smallest=(low + 1) * gaps, largest=(low + 2) * gaps)
    planes, symbols = content[: low * gaps], content[low * gaps :]
    _check_ends(symbols, gaps)
    return Gaps(low, planes, symbols)


def open_runs(first: int, payload: object, *, count: int, rows: int) -> tuple[int, Gaps, Gaps]:
    """How many runs, and the gaps of their offsets and starts, one fewer of each.

    The symbols are those of both lists, not taken apart: where the second begins is known when
    the first has been read.

    Raises:
        ValueError: a frame that does not hold exactly two such lists.
    """
    data = _payload(first, payload, count=count, rows=rows)
    runs = int.from_bytes(data[:8], "little")
    if not 2 <= runs <= count:
        raise ValueError(f"row set: {runs} runs of {count} ids")
    low, low_starts = _planes(data[8:10], 2)
    gaps = runs - 1
    low_bytes = low + low_starts
    content = decompress(data[10:], smallest=(low_bytes + 2) * gaps, largest=(low_bytes + 4) * gaps)
    symbols = content[low_bytes * gaps :]
    _check_ends(symbols, 2 * gaps)
    offsets = Gaps(low, content[: low * gaps], symbols)
    return runs, offsets, Gaps(low_starts, content[low * gaps : low_bytes * gaps], symbols)


def _payload(first: int, payload: object, *, count: int, rows: int) -> memoryview:
    _check_counts(first, count, rows)
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise ValueError("row set: no payload, and not a range")
    if count < 2:
        raise ValueError(f"row set: {count} ids, and not a range")
    return memoryview(payload)


def _planes(header: memoryview, lists: int) -> bytes:
    if len(header) != lists or max(header) > _MOST_LOW_BYTES:
        raise ValueError(f"row set: planes {header.hex()!r}, expected {lists} numbers below 8")
    return bytes(header)


def _check_ends(symbols: Bytes, gaps: int) -> None:
    gap_count = symbols.size - int(np.count_nonzero(symbols == ESCAPE))
    if gap_count != gaps or symbols[-1] == ESCAPE:
        raise ValueError(f"row set: symbols of {gap_count} whole gaps, expected {gaps}")


def _check_counts(first: int, count: int, rows: int) -> None:
    if not 0 <= rows <= _MOST_ROWS:
        raise ValueError(f"row set: a table of {rows} rows")
    if not 0 <= count <= rows:
        raise ValueError(f"row set: {count} ids in a table of {rows} rows")
    if not 0 <= first <= rows - count:
        raise ValueError(f"row set: {count} ids from {first} on in a table of {rows} rows")
