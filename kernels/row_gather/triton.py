"""Row gather and scatter on a GPU: rows are moved as words of 4 bytes where they can be."""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.row_gather.shapes import require_rows

__all__ = ["gather", "scatter"]

_TILE = 4096


@triton.jit
def _gather(source, ids, out, n, limit, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(ids + i, mask=i < n, other=-1)
    inside = (row >= 0) & (row < limit)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < width)[None, :]
    values = tl.load(source + row[:, None] * width + column[None, :], mask=mask)
    tl.store(out + i[:, None] * width + column[None, :], values, mask=mask)


@triton.jit
def _scatter(rows, ids, dest, n, limit, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.load(ids + i, mask=i < n, other=-1)
    inside = (row >= 0) & (row < limit)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = inside[:, None] & (column < width)[None, :]
    values = tl.load(rows + i[:, None] * width + column[None, :], mask=mask)
    tl.store(dest + row[:, None] * width + column[None, :], values, mask=mask)


def _words(tensor: Tensor, row_bytes: int) -> Tensor:
    """The tensor's memory as a vector of int32, or of u8 where rows are not whole words."""
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = row_bytes % 4 == 0 and tensor.data_ptr() % 4 == 0
    return flat.view(torch.int32) if whole else flat


def _move(table: Tensor, ids: Tensor, part: Tensor, *, into_table: bool) -> None:
    row_bytes = require_rows(table, ids, part)
    n = ids.numel()
    if n == 0 or row_bytes == 0:
        return
    stored, given = _words(table, row_bytes), _words(part, row_bytes)
    if stored.dtype != given.dtype:
        stored, given = stored.view(torch.uint8), given.view(torch.uint8)
    width = row_bytes // stored.element_size()
    columns = min(triton.next_power_of_2(width), 1024)
    rows = max(1, min(_TILE // columns, 256))
    grid = (triton.cdiv(n, rows), triton.cdiv(width, columns))
    first, last = (given, stored) if into_table else (stored, given)
    launch = _scatter if into_table else _gather
    launch[grid](first, ids, last, n, table.shape[0], width, ROWS=rows, COLUMNS=columns)


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]; rows of ids out of range are left as they are."""
    _move(source, ids, out, into_table=False)


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]; ids out of range are passed over."""
    _move(dest, ids, rows, into_table=True)
