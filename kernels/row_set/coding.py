"""What all versions of the row-set coding share: the choice of coding, the frame and its checks."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import zstandard
from torch import Tensor

from recpoint.kernels.arguments import require

__all__ = [
    "ITEM_BYTES",
    "RowSet",
    "compress",
    "decode_range",
    "decompress",
    "encode_range",
    "out_of_order",
    "outside",
]

#: Bytes of one difference in each coding.
ITEM_BYTES: Final = {"delta32": 4, "delta64": 8}

#: Level 1: differences of sorted ids are nearly as small at level 19, at a fiftieth of the speed.
LEVEL: Final = 1

_MAGIC: Final = (0xFD2FB528).to_bytes(4, "little")

#: A block of a zstd frame is 4 bytes or more and stands for 128 KiB or less.
_LARGEST_RATIO: Final = (128 << 10) // 4


class RowSet(NamedTuple):
    """A coded set: `first` for "range", `payload` (one zstd frame) for "delta32" and "delta64"."""

    coding: str
    first: int | None
    payload: bytes | None


def out_of_order() -> ValueError:
    """The error for ids that are not a set in ascending order."""
    return ValueError("ids: not ascending without duplicates from 0 on")


def outside(rows: int) -> ValueError:
    """The error for differences that lead past the last row."""
    return ValueError(f"row set: an id is not below the table's {rows} rows")


def encode_range(ids: Tensor) -> RowSet | None:
    """The range coding of ids whose ends lie as far apart as a range's; None for others.

    The caller has to make sure that ids between the ends ascend.
    """
    require("ids", ids, torch.int64, 1)
    n = ids.numel()
    if n == 0:
        return RowSet("range", 0, None)
    first, last = int(ids[0]), int(ids[-1])
    if first < 0:
        raise out_of_order()
    return RowSet("range", first, None) if last - first == n - 1 else None


def decode_range(first: int | None, payload: object, *, count: int, rows: int) -> int:
    """The first id of a range, checked before anything is written out.

    Raises:
        ValueError: `first` is missing, a payload is there, or the range leaves the table.
    """
    _require_counts(count, rows)
    if payload is not None:
        raise ValueError("row set: a range with a payload")
    if first is None or first < 0 or first + count > rows:
        raise ValueError(f"row set: range from {first} of {count} rows in a table of {rows}")
    return first


def compress(shuffled: bytes | memoryview) -> bytes:
    """One zstd frame that states its content size."""
    compressor = zstandard.ZstdCompressor(
        level=LEVEL, write_content_size=True, write_checksum=False, write_dict_id=False
    )
    return compressor.compress(shuffled)


def decompress(
    coding: str,
    first: int | None,
    payload: bytes | bytearray | memoryview | None,
    *,
    count: int,
    rows: int,
) -> bytes:
    """The shuffled differences: count · 4 or count · 8 bytes.

    Raises:
        ValueError: an unknown coding, a frame that is damaged, states another size, could not hold
            that much, or is followed by more bytes.
    """
    _require_counts(count, rows)
    if coding not in ITEM_BYTES:
        raise ValueError(f"row set: coding {coding!r}, expected range, delta32 or delta64")
    if first is not None or payload is None:
        raise ValueError(f"row set: {coding} needs a payload and has no first id")
    frame = bytes(payload)
    expected = count * ITEM_BYTES[coding]
    if frame[:4] != _MAGIC:
        raise ValueError("row set: not a zstd frame")
    try:
        stated = zstandard.get_frame_parameters(frame).content_size
        if stated != expected:
            raise ValueError(f"row set: the frame states {stated} bytes, expected {expected}")
        if expected > len(frame) * _LARGEST_RATIO:
            raise ValueError(f"row set: {len(frame)} bytes cannot hold {expected}")
        shuffled = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=expected, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(f"row set: {error}") from error
    if len(shuffled) != expected:
        raise ValueError(f"row set: the frame holds {len(shuffled)} bytes, expected {expected}")
    return shuffled


def _require_counts(count: int, rows: int) -> None:
    if not 0 <= rows <= 1 << 62:
        raise ValueError(f"row set: a table of {rows} rows")
    if not 0 <= count <= rows:
        raise ValueError(f"row set: {count} ids in a table of {rows} rows")
