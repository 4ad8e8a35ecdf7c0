"""Reads rows that the trainer has quantized, and checks them (format §7, codes in the slot)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.block_rows import passes
from recpoint.catalog.persist.plan import RowBlock
from recpoint.catalog.staging.job import CodeArray, StagedJob, code_name
from recpoint.catalog.staging.slot_reading import read_into
from recpoint.errors import MalformedObject
from recpoint.format.dtypes import torch_dtype
from recpoint.kernels.quantize import PackedRows

__all__ = ["exact_span", "staged_codes"]


def staged_codes(staged: StagedJob, block: RowBlock) -> Iterator[tuple[range, PackedRows]]:
    """Yield the block's rows as the trainer quantized them, a pass at a time.

    Raises:
        MalformedObject: no quantization yields such codes, or they would decode to values that are
            not finite.
        StagingError: the slot cannot be read.
    """
    exact_at = _exact_positions(staged, block)
    for rows in passes(staged, block):
        first, count = block.first + rows.start, len(rows)
        codes = _read(staged, block, "codes", first, count)
        scale, offset = (_read(staged, block, name, first, count) for name in _PARAMETERS)
        wide = _read(staged, block, "wide", first, count)
        if bool((wide > 1).any()):
            _refuse(staged, block, "wide", f"a flag of {int(wide.max())}", "0 or 1")
        low, high = np.searchsorted(exact_at, (rows.start, rows.stop))
        exact = torch.zeros(count, dtype=torch.bool, device="cpu")
        exact[torch.from_numpy(exact_at[low:high] - rows.start)] = True
        packed = PackedRows(codes, scale, offset, exact, wide.to(torch.bool))
        _check(staged, block, packed)
        yield rows, packed


_PARAMETERS: tuple[CodeArray, CodeArray] = ("scale", "offset")


def _check(staged: StagedJob, block: RowBlock, rows: PackedRows) -> None:
    table = staged.job.tables[block.table]
    levels = float(2**table.bits - 1)
    is_coded = ~rows.exact
    for name, parameter in zip(_PARAMETERS, (rows.scale, rows.offset), strict=True):
        if bool((is_coded & ~torch.isfinite(parameter)).any()):
            _refuse(staged, block, name, "a value that is not finite", "finite values")
        half = parameter.to(torch.float16).to(torch.float32)
        if bool((is_coded & ~rows.wide & (half != parameter)).any()):
            _refuse(staged, block, name, "a value that binary16 does not have", "a wide row")
    # The smallest code decodes to the offset, the largest to scale * levels + offset, and all
    # others to values in between.
    if bool((is_coded & ~torch.isfinite(rows.scale * levels + rows.offset)).any()):
        _refuse(staged, block, "scale", "codes that decode to no finite number", "finite numbers")
    unused = -table.spec.dim * table.bits % 8
    if unused and bool((is_coded & (rows.packed[:, -1] >= 1 << (8 - unused))).any()):
        _refuse(staged, block, "codes", "bits past the last code of a row", "zero bits")


def exact_span(staged: StagedJob, block: RowBlock) -> tuple[int, int]:
    """Return the half-open range of the block's rows among the table's exactly staged rows."""
    count = staged.segments[code_name(block.table, "exact_at")].shape[0]
    end = block.first + block.rows
    # The first block begins at 0 and the last ends at `count`, so that no exact row is left
    # unchecked, even if its position is out of range.
    low = 0 if block.first == 0 else _first_from(staged, block, count, block.first)
    last = end == staged.job.tables[block.table].row_count
    return low, count if last else _first_from(staged, block, count, end)


def _first_from(staged: StagedJob, block: RowBlock, count: int, row: int) -> int:
    """Return the index of the first exact row at or after `row`, by binary search in the slot.

    A table that can hardly be quantized has too many exact rows to read them all.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if int(_read(staged, block, "exact_at", middle, 1)) < row:
            low = middle + 1
        else:
            high = middle
    return low


def _exact_positions(
    staged: StagedJob, block: RowBlock
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions of the block's exact rows, counted from its first row: i64 [n]."""
    low, high = exact_span(staged, block)
    if high < low:
        _refuse(staged, block, "exact_at", "positions that descend", "ascending ones")
    positions = _read(staged, block, "exact_at", low, high - low).numpy() - block.first
    if len(positions):
        ascending = bool((positions[1:] > positions[:-1]).all())
        if not ascending or positions[0] < 0 or positions[-1] >= block.rows:
            _refuse(
                staged,
                block,
                "exact_at",
                f"positions that {'' if ascending else 'do not '}ascend, from "
                f"{positions[0] + block.first} to {positions[-1] + block.first}",
                f"ascending ones from {block.first} to {block.first + block.rows - 1}",
            )
    return positions


def _read(staged: StagedJob, block: RowBlock, array: CodeArray, first: int, count: int) -> Tensor:
    """Read `count` entries of a segment from `first` on; BOOL as u8."""
    name = code_name(block.table, array)
    segment = staged.segments[name]
    extent = staged.extent(name, first=first, count=count)
    buffer = bytearray(extent.length)
    read_into(memoryview(buffer), extent)
    dtype = torch.uint8 if segment.dtype == "BOOL" else torch_dtype(segment.dtype)
    if not buffer:
        return torch.empty((count, *segment.shape[1:]), dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype).reshape(count, *segment.shape[1:])


def _refuse(
    staged: StagedJob, block: RowBlock, array: CodeArray, found: str, expected: str
) -> NoReturn:
    raise MalformedObject(
        f"{staged.slot} ({code_name(block.table, array)})",
        found=found,
        expected=expected,
        next_step="nothing: the job is rejected, and the trainer stages its rows again",
    )
