"""Row gather and scatter on a GPU, of one table or of many in one launch.

Rows are moved in units of 16 bytes where rows and addresses are multiples of that, else of 4, else
of single bytes. A program moves a fixed number of units, whatever the length of a row, so that
narrow rows, long ones and lengths that are no power of two keep the memory equally busy.
"""

# Triton reads the kernels' source; annotations other than constexpr would mean something to it.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from recpoint.kernels.descriptors import entry_and_part, plan
from recpoint.kernels.row_gather.shapes import require_rows

__all__ = ["gather", "gather_many", "scatter"]

#: Units a program moves: four of each thread are on their way at a time.
_UNITS: Final = 512
_WARPS: Final = 4
#: Places within a row and the units of one program are counted in 32 bits.
_LONGEST_ROW_BYTES: Final = 1 << 31


@triton.jit
def _move_units(
    table, ids, part, first, n, limit, width,
    UNITS: tl.constexpr, VECTOR: tl.constexpr, INTO_TABLE: tl.constexpr,
):  # fmt: skip
    """Move UNITS units of the part from unit `first` on: VECTOR elements each, `width` in a row."""
    row_0 = first // width
    # Below width + UNITS: 32 bits are enough from here, and dividing by them takes half as long.
    position = (first - row_0 * width).to(tl.uint32) + tl.arange(0, UNITS).to(tl.uint32)
    row = position // width.to(tl.uint32)
    unit = position - row * width.to(tl.uint32)
    i = row_0 + row.to(tl.int64)
    row_id = tl.load(ids + i, mask=i < n, other=-1)
    valid = (row_id >= 0) & (row_id < limit)
    lane = tl.arange(0, VECTOR)[None, :]
    stored = table + ((row_id * width + unit.to(tl.int64)) * VECTOR)[:, None] + lane
    part_units = part + ((first + tl.arange(0, UNITS)) * VECTOR)[:, None] + lane
    mask = valid[:, None] & (lane < VECTOR)
    if INTO_TABLE:
        tl.store(stored, tl.load(part_units, mask=mask), mask=mask)
    else:
        tl.store(part_units, tl.load(stored, mask=mask), mask=mask)


@triton.jit
def _move_many(descriptors, SLOTS: tl.constexpr, UNITS: tl.constexpr, INTO_TABLE: tl.constexpr):
    entry, number = entry_and_part(descriptors, SLOTS)
    fields = descriptors + SLOTS + entry
    table = tl.load(fields)
    ids = tl.load(fields + SLOTS).to(tl.pointer_type(tl.int64))
    part = tl.load(fields + 2 * SLOTS)
    n = tl.load(fields + 3 * SLOTS)
    limit = tl.load(fields + 4 * SLOTS)
    width = tl.load(fields + 5 * SLOTS)
    unit_bytes = tl.load(fields + 6 * SLOTS)
    first = number * UNITS
    if unit_bytes == 16:
        _move_units(
            tl.multiple_of(table.to(tl.pointer_type(tl.int32)), 16), ids,
            tl.multiple_of(part.to(tl.pointer_type(tl.int32)), 16),
            first, n, limit, width, UNITS, 4, INTO_TABLE,
        )  # fmt: skip
    elif unit_bytes == 4:
        _move_units(
            table.to(tl.pointer_type(tl.int32)), ids, part.to(tl.pointer_type(tl.int32)),
            first, n, limit, width, UNITS, 1, INTO_TABLE,
        )  # fmt: skip
    else:
        _move_units(
            table.to(tl.pointer_type(tl.int8)), ids, part.to(tl.pointer_type(tl.int8)),
            first, n, limit, width, UNITS, 1, INTO_TABLE,
        )  # fmt: skip


def _unit_bytes(row_bytes: int, *addresses: int) -> int:
    """The largest unit that rows and addresses are multiples of."""
    for unit in (16, 4):
        if row_bytes % unit == 0 and all(address % unit == 0 for address in addresses):
            return unit
    return 1


def _move(moves: Sequence[tuple[Tensor, Tensor, Tensor]], *, into_table: bool) -> None:
    """One launch for all moves (table, ids, part)."""
    entries: list[tuple[int, ...]] = []
    programs: list[int] = []
    for table, ids, part in moves:
        row_bytes = require_rows(table, ids, part)
        if table.device != moves[0][0].device:
            raise ValueError(
                f"tables: on {moves[0][0].device} and on {table.device}, expected one device a call"
            )
        if row_bytes > _LONGEST_ROW_BYTES:
            raise ValueError(f"rows: {row_bytes} bytes each, expected at most {_LONGEST_ROW_BYTES}")
        n = ids.numel()
        if n == 0 or row_bytes == 0:
            continue
        unit = _unit_bytes(row_bytes, table.data_ptr(), part.data_ptr())
        width = row_bytes // unit
        entries.append(
            (table.data_ptr(), ids.data_ptr(), part.data_ptr(), n, table.shape[0], width, unit)
        )
        programs.append(triton.cdiv(n * width, _UNITS))
    if entries:
        launch = plan(entries, programs, moves[0][0].device)
        _move_many[(launch.programs,)](
            launch.table, SLOTS=launch.slots, UNITS=_UNITS, INTO_TABLE=into_table, num_warps=_WARPS
        )


def gather(source: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[i] = source[ids[i]]; rows of ids out of range are left as they are."""
    _move([(source, ids, out)], into_table=False)


def gather_many(sources: Sequence[Tensor], ids: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """`gather` for each source, in one launch."""
    _move(list(zip(sources, ids, outs, strict=True)), into_table=False)


def scatter(rows: Tensor, ids: Tensor, dest: Tensor) -> None:
    """dest[ids[i]] = rows[i]; ids out of range are passed over."""
    _move([(dest, ids, rows)], into_table=True)
