"""Measures the least time to copy scattered rows of one cache line, whose ids are already known.

All other work of a snapshot (finding the ids in a bitmap, writing ids and other contents) is left
out. The loop is the snapshot's: it prefetches lines far ahead, and writes past the caches. Loops in
C with prefetches 32 to 512 rows ahead into either cache, with lines of 64 bytes written at once,
and block by block, took 0.94 to 1.3 times as long (AMD EPYC of family 26, 2 threads).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba.np.numpy_support import carray
from torch import Tensor

from recpoint.kernels.intrinsics import compiled_team_work, pointer, take_turn
from recpoint.kernels.row_gather.cpu import copy_rows
from recpoint.kernels.threads import as_team, team_size

__all__ = ["perfect_gather"]

_LINE_BYTES: Final = 64
_PIECE_ROWS: Final = 1 << 14

# Fields of the array that describes the work to the threads.
_SOURCE_AT: Final = 0
_IDS_AT: Final = 1
_OUT_AT: Final = 2
_ROWS: Final = 3
_TURN: Final = 4
_FIELDS: Final = 5


@compiled_team_work
def _gather(data: int) -> None:
    work = carray(pointer(data), _FIELDS, np.int64)
    rows, turn = work[_ROWS], data + 8 * _TURN
    piece = take_turn(turn)
    while piece * _PIECE_ROWS < rows:
        first = piece * _PIECE_ROWS
        ids, to = work[_IDS_AT] + 8 * first, work[_OUT_AT] + _LINE_BYTES * first
        n = min(_PIECE_ROWS, rows - first)
        copy_rows(work[_SOURCE_AT], ids, to, _LINE_BYTES, 1, n)
        piece = take_turn(turn)


def perfect_gather(source: Tensor, out: Tensor) -> Callable[[Tensor], None]:
    """Returns a function that copies source[ids] to `out` with torch's threads.

    Args:
        source: [rows, …], contiguous, rows of 64 bytes, aligned to 32.
        out: [n, …] with the same row shape, aligned to 32; every row is written.
    """
    for tensor in (source, out):
        if tensor[0].nbytes != _LINE_BYTES or tensor.data_ptr() % 32 or not tensor.is_contiguous():
            raise ValueError("perfect_gather: rows that are not lines of 64 bytes")
    call = _gather()

    def gather(ids: Tensor) -> None:
        fields: np.ndarray[Any, np.dtype[np.int64]] = np.array(
            [source.data_ptr(), ids.data_ptr(), out.data_ptr(), len(ids), 0], dtype=np.int64
        )
        pieces = -(-len(ids) // _PIECE_ROWS)
        as_team(call, fields.ctypes.data, threads=team_size(pieces, 2 * out.nbytes))

    return gather
