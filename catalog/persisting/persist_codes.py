"""Rows that the trainer has quantized: read from the slot and checked (format §7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persisting.persist_plan import RowBlock
from recpoint.catalog.staging.staged_job import CodeArray, StagedJob, code_name, read_into
from recpoint.errors import MalformedObject
from recpoint.format.dtypes import torch_dtype
from recpoint.kernels.quantize import PackedRows

__all__ = ["exact_span", "staged_codes"]


def staged_codes(staged: StagedJob, block: RowBlock, rows_each: int) -> Iterator[PackedRows]:
    """The block's rows as they were quantized, `rows_each` at a time.

    Raises:
        MalformedObject: they are nothing that quantization gives, or would decode to something
            that is not finite.
        StagingError: the slot cannot be read.
    """
    exact_at = _exact_positions(staged, block)
    for first in range(0, block.rows, rows_each):
        count = min(rows_each, block.rows - first)
        start = block.first + first
        codes = _read(staged, block, "codes", start, count)
        scale, offset = (_read(staged, block, name, start, count) for name in _PARAMETERS)
        wide = _read(staged, block, "wide", start, count)
        if bool((wide > 1).any()):
            _refuse(staged, block, "wide", f"a flag of {int(wide.max())}", "0 or 1")
        low, high = np.searchsorted(exact_at, (first, first + count))
        exact = torch.zeros(count, dtype=torch.bool, device="cpu")
        exact[torch.from_numpy(exact_at[low:high] - first)] = True
        found = PackedRows(codes, scale, offset, exact, wide.to(torch.bool))
        _check(staged, block, found)
        yield found


_PARAMETERS: tuple[CodeArray, CodeArray] = ("scale", "offset")


def _check(staged: StagedJob, block: RowBlock, rows: PackedRows) -> None:
    table = staged.job.tables[block.table]
    levels = float(2**table.bits - 1)
    wanted = ~rows.exact
    for name, parameter in zip(_PARAMETERS, (rows.scale, rows.offset), strict=True):
        if bool((wanted & ~torch.isfinite(parameter)).any()):
            _refuse(staged, block, name, "a value that is not finite", "finite ones")
        half = parameter.to(torch.float16).to(torch.float32)
        if bool((wanted & ~rows.wide & (half != parameter)).any()):
            _refuse(staged, block, name, "a value that binary16 does not have", "a wide row for it")
    # The first code decodes to the offset, the last to this, the others lie in between.
    if bool((wanted & ~torch.isfinite(rows.scale * levels + rows.offset)).any()):
        _refuse(staged, block, "scale", "codes that decode to no finite number", "finite ones")
    unused = -table.spec.dim * table.bits % 8
    if unused and bool((wanted & (rows.packed[:, -1] >= 1 << (8 - unused))).any()):
        _refuse(staged, block, "codes", "bits past the last code of a row", "zeros there")


def exact_span(staged: StagedJob, block: RowBlock) -> tuple[int, int]:
    """Which of the exactly staged rows are the block's: the first, and that after the last."""
    count = staged.segments[code_name(block.table, "exact_at")].shape[0]
    end = block.first + block.rows
    # The ends of a table's blocks cover all of them, whatever they hold.
    low = 0 if block.first == 0 else _first_from(staged, block, count, block.first)
    last = end == staged.job.tables[block.table].row_count
    return low, count if last else _first_from(staged, block, count, end)


def _first_from(staged: StagedJob, block: RowBlock, count: int, row: int) -> int:
    """Position of the first exact row that is `row` or a later one: by halves, for of a table that
    can hardly be quantized there are many."""
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
    """The block's exact rows, counted from its first."""
    low, high = exact_span(staged, block)
    if high < low:
        _refuse(staged, block, "exact_at", "positions that descend", "ascending ones")
    found = _read(staged, block, "exact_at", low, high - low).numpy() - block.first
    if len(found):
        ascending = bool((found[1:] > found[:-1]).all())
        if not ascending or found[0] < 0 or found[-1] >= block.rows:
            _refuse(
                staged,
                block,
                "exact_at",
                f"positions that {'' if ascending else 'do not '}ascend, from "
                f"{found[0] + block.first} to {found[-1] + block.first}",
                f"ascending ones from {block.first} to {block.first + block.rows - 1}",
            )
    return found


def _read(staged: StagedJob, block: RowBlock, array: CodeArray, first: int, count: int) -> Tensor:
    """Entries of a segment; BOOL as bytes."""
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
