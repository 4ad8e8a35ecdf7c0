"""Writes row states that are stored in fewer bits to the spool: rounded, or coded (format §3.5)."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple

import torch
from torch import Tensor

from recpoint.catalog.persist.spool import Part, SpoolFile, pieces
from recpoint.catalog.staging.slot_reading import Extent, read_into
from recpoint.format.dtypes import Dtype, array_bytes
from recpoint.format.manifest import RowStateSpec
from recpoint.format.row_state import to_bfloat16
from recpoint.kernels import moments

__all__ = ["StoredRowState", "stored_row_state"]

#: Staged bytes that are coded at once: few enough to fit the caches and to bound the memory.
_PIECE_BYTES: Final = 1 << 20


class StoredRowState(NamedTuple):
    """A row state of a chunk, and the dtype in which the chunk has it.

    Attributes:
        dtype: U8 for codes.
        values: the values, or the codes.
        grids: the grids of coded rows; None if the state is not coded.
    """

    dtype: Dtype
    values: Part
    grids: Part | None


def stored_row_state(
    part: Part, state: RowStateSpec, dtype: Dtype, spool: SpoolFile
) -> StoredRowState:
    """Return a row state as a chunk stores it.

    Args:
        part: the staged values of the chunk's rows.
        state: the row state.
        dtype: the wanted dtype: its own, BF16, or U8 for codes.
        spool: takes what is not stored as staged.

    Returns:
        The row state. It is stored as staged, in its own dtype, if a row of it has no codes.
    """
    if dtype == state.dtype:
        return StoredRowState(dtype, part, None)
    spool.flush()  # the mask of chosen rows is read from this file
    if not state.is_coded(dtype):
        return StoredRowState(dtype, _rounded(part, spool), None)
    return _coded(part, state, spool) or StoredRowState(state.dtype, part, None)


def _rounded(part: Part, spool: SpoolFile) -> Extent:
    """Round F32 values to the nearest BF16 and write them to the spool."""
    offset, length = spool.append(b"").offset, 0
    for piece in pieces(part):
        values = torch.frombuffer(piece, dtype=torch.float32)
        length += spool.append(to_bfloat16(values).view(torch.uint8).numpy()).length
    return Extent(str(spool.path), offset, length)


def _coded(part: Part, state: RowStateSpec, spool: SpoolFile) -> StoredRowState | None:
    """Code rows of F32 and write codes and grids to the spool; None if a row has no codes."""
    offset, length = spool.append(b"").offset, 0
    grids: list[Tensor] = []
    for piece in _whole_rows(part, array_bytes(state.dtype, state.shape)):
        rows = torch.frombuffer(piece, dtype=torch.float32).view(-1, prod(state.shape))
        coded = moments.encode(rows)
        if bool(coded.refused.any()):
            return None
        length += spool.append(coded.codes.view(-1).numpy()).length
        grids.append(coded.grids)
    all_grids = torch.cat(grids).view(torch.uint8).numpy()
    codes = Extent(str(spool.path), offset, length)
    return StoredRowState("U8", codes, spool.append(all_grids))


def _whole_rows(part: Part, row_bytes: int) -> Iterator[memoryview]:
    """Yield a part's bytes, whole rows at a time; each piece is valid until the next one."""
    if not isinstance(part, Extent):
        yield from pieces(part)
        return
    path, offset, length = part
    step = max(1, _PIECE_BYTES // row_bytes) * row_bytes
    buffer = memoryview(bytearray(min(step, length)))
    for first in range(0, length, step):
        piece = buffer[: min(step, length - first)]
        read_into(piece, Extent(path, offset + first, len(piece)))
        yield piece
