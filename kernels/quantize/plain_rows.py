"""Rows quantized by their ends, on a CPU: one pass, sixteen rows at a time where they fit."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba.np.numpy_support import carray

from recpoint.kernels.intrinsics import compiled, compiled_team_work, pointer, take_turn
from recpoint.kernels.quantize.blocks import (
    ROWS,
    ends_of_block,
    fits_block,
    parameters_of_block,
    write_block,
)
from recpoint.kernels.quantize.plain import plain_parameters, write_row
from recpoint.kernels.quantize.vectors import CODES_AT_ONCE, ends_of_row
from recpoint.kernels.threads import as_team, team_size

__all__ = ["quantize_plain"]

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)

#: Rows and codes that a thread takes at a time: few enough to share, many enough not to matter.
_PART_BYTES: Final = 1 << 19

# Fields of what the threads work on; those from 3 on are arguments of `quantize_plain`.
_TURN: Final = 0  # the next part to take
_PART_ROWS: Final = 1
_COUNT: Final = 2  # of rows
_ROOM_AT: Final = 16  # address of room for each thread
_ROOM_BYTES: Final = 17  # of one of them
_ROOM_TURN: Final = 18  # the next room to take
_FIELDS: Final = 19

# What a thread has room for, at these bytes of it.
_KEYS_AT: Final = 0  # i32 [2, ROWS]
_INVERSES_AT: Final = 8 * ROWS  # f32 [ROWS]
_CODES_AT: Final = 12 * ROWS  # u8 [dim + CODES_AT_ONCE]


@compiled(nogil=True)
def quantize_in_blocks(
    rows: int, dim: int, bits: int, symmetric: bool, half: bool, in_blocks: bool,
    packed: int, code_bits: int, width: int,
    scales: int, offsets: int, exacts: int, wides: int, start: int, stop: int,
    keys: Any, inverses: Any, codes: Any,
) -> None:  # fmt: skip
    """Quantize rows start … stop in the room of the last three arguments, else as the caller."""
    inverse_of_row = inverses.ctypes.data
    low_keys, high_keys = keys.ctypes.data, keys.ctypes.data + keys.strides[0]
    levels = np.float32((1 << bits) - 1)
    for block in range((stop - start + ROWS - 1) // ROWS):
        first = start + block * ROWS
        count = min(ROWS, stop - first)
        row, to = rows + 4 * dim * first, packed + width * first
        scale_of = carray(pointer(scales + 4 * first), ROWS, np.float32)
        offset_of = carray(pointer(offsets + 4 * first), ROWS, np.float32)
        exact_of = carray(pointer(exacts + first), ROWS, np.uint8)
        wide_of = carray(pointer(wides + first), ROWS, np.uint8)
        whole = count == ROWS
        if whole:
            ends_of_block(row, dim, low_keys, high_keys)
        else:
            for lane in range(count):
                keys[0, lane], keys[1, lane] = ends_of_row(row + 4 * dim * lane, dim)
        if whole and not symmetric and not half:
            at = 4 * first
            parameters_of_block(
                low_keys, high_keys, levels, scales + at, offsets + at, inverse_of_row,
                exacts + first,
            )  # fmt: skip
            for lane in range(count):
                wide_of[lane] = np.uint8(0)
        else:
            for lane in range(count):
                scale, offset, exact, wide = plain_parameters(
                    keys[0, lane], keys[1, lane], levels, symmetric, half
                )
                scale_of[lane] = scale
                offset_of[lane] = offset
                exact_of[lane] = np.uint8(exact)
                wide_of[lane] = np.uint8(wide)
                inverses[lane] = np.float32(_ONE / scale) if scale > _ZERO else _ZERO
        if whole and in_blocks:
            write_block(row, dim, code_bits, inverse_of_row, offsets + 4 * first, levels, to)
        else:
            for lane in range(count):
                room = (stop - first - lane) * width
                write_row(
                    row + 4 * dim * lane, dim, bits, code_bits, scale_of[lane], offset_of[lane],
                    codes, to + width * lane, width, room,
                )  # fmt: skip


@compiled_team_work
def _quantize_parts(data: int) -> None:
    work = carray(pointer(data), _FIELDS, np.int64)
    rows, dim, bits = work[3], work[4], work[5]
    symmetric, half, in_blocks = work[6] != 0, work[7] != 0, work[8] != 0
    packed, code_bits, width = work[9], work[10], work[11]
    scales, offsets, exacts, wides = work[12], work[13], work[14], work[15]
    size, count, turn = work[_PART_ROWS], work[_COUNT], data + 8 * _TURN
    # Each call is one of `threads` at most, which is how many rooms there are: see `as_team`.
    room = work[_ROOM_AT] + take_turn(data + 8 * _ROOM_TURN) * work[_ROOM_BYTES]
    keys = carray(pointer(room + _KEYS_AT), (2, ROWS), np.int32)
    inverses = carray(pointer(room + _INVERSES_AT), ROWS, np.float32)
    codes = carray(pointer(room + _CODES_AT), dim + CODES_AT_ONCE, np.uint8)
    start = take_turn(turn) * size
    while start < count:
        quantize_in_blocks(
            rows, dim, bits, symmetric, half, in_blocks, packed, code_bits, width,
            scales, offsets, exacts, wides, start, min(start + size, count),
            keys, inverses, codes,
        )  # fmt: skip
        start = take_turn(turn) * size


def quantize_plain(
    count: int, rows: int, dim: int, bits: int, symmetric: bool, half: bool,
    packed: int, code_bits: int, width: int, scales: int, offsets: int, exacts: int, wides: int,
) -> None:  # fmt: skip
    """Quantize rows by their ends (format §3.2), in as many threads as pay.

    Args:
        count: how many rows.
        rows: address of f32 [count, dim].
        dim: values a row, 1 or more.
        bits: 2, 3, 4 or 8.
        symmetric: whether a row's ends are those of its largest magnitude.
        half: choose row parameters among the values of binary16 where that is safe.
        packed: address of u8 [count, width].
        code_bits: width of a code as it is stored, `bits` or 8.
        width: bytes of a packed row.
        scales, offsets: addresses of f32 [count].
        exacts, wides: addresses of bool [count].
    """
    row_bytes = 4 * dim + width
    part_rows = max(1, _PART_BYTES // row_bytes // ROWS) * ROWS
    in_blocks = fits_block(dim, code_bits)
    threads = team_size(-(-count // part_rows), count * row_bytes)
    # Whole lines, and one more, so that no two threads write to the same one.
    room_bytes = (_CODES_AT + dim + CODES_AT_ONCE + 127) // 64 * 64
    room = np.empty((threads, room_bytes), np.uint8)
    data = np.array(
        [
            0, part_rows, count,
            rows, dim, bits, symmetric, half, in_blocks, packed, code_bits, width,
            scales, offsets, exacts, wides, room.ctypes.data, room_bytes, 0,
        ],
        dtype=np.int64,
    )  # fmt: skip
    as_team(_quantize_parts(), data.ctypes.data, threads=threads)
