"""Runs the first step of a persist: quantizes the rows of a group (format §3.2, §3.3).

The method comes from the table's setting, or is chosen on a sample of the table's rows. The choice
follows from the job alone, as keys and chunks do: an agent that starts over after a kill chooses
the same method and writes the same bytes. If a job names its method, nothing is chosen: the choice
for an earlier job of its chain still holds, and the trainer may have quantized with it. Rows that
the trainer has quantized are read from the slot and checked (§7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.plan import PARAMETER_DTYPES, ChunkGroup, RowBlock
from recpoint.catalog.persist.spool import (
    SpoolFile,
    extent_list,
    load_result,
    result_path,
    save_result,
    write_bits,
)
from recpoint.catalog.staging.job import CodeArray, StagedJob, code_name, kernel_method, values_name
from recpoint.catalog.staging.slot_reading import Extent, read_into
from recpoint.errors import MalformedObject
from recpoint.format.dtypes import Dtype, item_bytes, torch_dtype
from recpoint.format.manifest import Quantizer
from recpoint.kernels.implementation import on_cpu
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method, PackedRows, quantize_packed
from recpoint.kernels.quantize.choice import SAMPLE_ROWS, choose, drawn

__all__ = [
    "Choice",
    "Quantization",
    "choose_quantizer",
    "quantization_of",
    "quantize_group",
]

#: Staged bytes quantized at once: few enough to fit the caches and to bound the memory.
_PASS_BYTES = 8 << 20

_ARRAYS = ("codes", "scale", "offset")
_MOST_TEXT = 255


class Quantization(NamedTuple):
    """How the rows of a checkpoint were quantized, as its manifest records it."""

    quantizers: tuple[Quantizer, ...]
    implementation: str


def quantize_group(staged: StagedJob, group: ChunkGroup, chosen: dict[int, Choice]) -> str:
    """Quantize and pack the group's rows into the spool.

    Rows that cannot be quantized are left out and noted in the result; the next step stores them
    exactly. Rows that the trainer has quantized are only checked and sorted by parameter dtype.

    Args:
        staged: the job.
        group: one of its groups.
        chosen: the choice of each table's method, by table index; tables that no earlier group had
            are added.

    Returns:
        Path of the result, a JSON file that names extents of the spool.

    Raises:
        MalformedObject: the slot has codes that no quantization yields.
        StagingError: the slot cannot be read.
    """
    path = result_path(staged, group.index, "quantized")
    if load_result(path, staged) is None:
        blocks = [
            block
            for block in group.blocks
            if isinstance(block, RowBlock) and staged.job.tables[block.table].is_quantized
        ]
        tables = sorted({block.table for block in blocks})
        for table in tables:
            if table not in chosen:
                chosen[table] = choose_quantizer(staged, table)
        with SpoolFile(path.with_suffix(".bin")) as spool:
            quantized = [
                _quantize_block(staged, block, chosen[block.table][1], spool) for block in blocks
            ]
        result = {
            "blocks": quantized,
            "quantizers": [chosen[table][0].model_dump() for table in tables],
            "implementation": _implementation(staged, tables),
        }
        save_result(path, staged, result)
    return str(path)


def quantization_of(staged: StagedJob, groups: Sequence[ChunkGroup]) -> Quantization:
    """Return what the groups of a job were quantized with; all of them must be quantized."""
    quantizers: dict[int, Quantizer] = {}
    implementations: set[str] = set()
    for group in groups:
        result = load_result(result_path(staged, group.index, "quantized"), staged)
        if result is None:
            continue
        implementations.add(result["implementation"])
        for fields in result["quantizers"]:
            quantizer = Quantizer.model_validate(fields)
            quantizers[quantizer.table] = quantizer
    in_order = tuple(quantizers[table] for table in sorted(quantizers))
    return Quantization(in_order, "; ".join(sorted(implementations))[:_MOST_TEXT])


def _quantize_block(
    staged: StagedJob, block: RowBlock, method: Method, spool: SpoolFile
) -> dict[str, Any]:
    table = staged.job.tables[block.table]
    dim = table.spec.dim
    row_bytes = dim * item_bytes(table.spec.dtype)
    parts: dict[Dtype, dict[str, list[Extent]]] = {
        dtype: {name: [] for name in _ARRAYS} for dtype in PARAMETER_DTYPES
    }
    exact_rows: list[Tensor] = []
    wide_rows: list[Tensor] = []
    rows_each = max(1, _PASS_BYTES // row_bytes)
    if table.codes:
        passes = _staged_codes(staged, block, rows_each)
    else:
        passes = _quantized(staged, block, method, rows_each)
    for codes, scale, offset, exact, wide in passes:
        wide = wide & ~exact
        for dtype, chosen in zip(PARAMETER_DTYPES, (~(exact | wide), wide), strict=True):
            arrays = _chosen(chosen, codes, scale, offset, torch_dtype(dtype))
            for name, array in zip(_ARRAYS, arrays, strict=True):
                parts[dtype][name].append(spool.append(array.contiguous().numpy()))
        exact_rows.append(exact)
        wide_rows.append(wide)
    return {
        "table": block.table,
        "number": block.number,
        "exact_first": _exact_span(staged, block)[0] if table.codes else 0,
        "exact": _bits(exact_rows, spool),
        "wide": _bits(wide_rows, spool),
        **{
            dtype: {name: extent_list(tuple(extents)) for name, extents in arrays.items()}
            for dtype, arrays in parts.items()
        },
    }


def _quantized(
    staged: StagedJob, block: RowBlock, method: Method, rows_each: int
) -> Iterator[PackedRows]:
    """Yield the block's rows, `rows_each` at a time, quantized from their values."""
    table = staged.job.tables[block.table]
    dim = table.spec.dim
    row_bytes = dim * item_bytes(table.spec.dtype)
    buffer = bytearray(min(rows_each, block.rows) * row_bytes)
    for first in range(0, block.rows, rows_each):
        count = min(rows_each, block.rows - first)
        view = memoryview(buffer)[: count * row_bytes]
        name = values_name(block.table)
        read_into(view, staged.extent(name, first=block.first + first, count=count))
        stored = torch.frombuffer(view, dtype=torch_dtype(table.spec.dtype)).reshape(count, dim)
        rows = stored.to(torch.float32)
        packed = quantize_packed(rows, table.bits, method, half_parameters=True)
        if table.spec.dtype == "F64":
            # Only rows whose conversion to F32 is exact may be quantized (format §3.2).
            packed = packed._replace(
                exact=packed.exact | (rows.to(torch.float64) != stored).any(dim=1)
            )
        yield packed


def _implementation(staged: StagedJob, tables: Sequence[int]) -> str:
    """Return the implementation that quantized these tables: the agent's, or the trainer's."""
    job = staged.job
    names = {job.quantized_by if job.tables[table].codes else on_cpu() for table in tables}
    return "; ".join(sorted(names))


def _chosen(
    mask: Tensor, codes: Tensor, scale: Tensor, offset: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that `mask` chooses, with their parameters converted to `dtype`."""
    if not bool(mask.all()):  # nearly always all rows are chosen, and nothing is copied
        codes, scale, offset = codes[mask], scale[mask], offset[mask]
    return codes, scale.to(dtype), offset.to(dtype)


def _bits(masks: list[Tensor], spool: SpoolFile) -> list[Any]:
    mask = torch.cat(masks).numpy() if masks else np.empty(0, np.bool_)
    return extent_list((write_bits(mask, spool),))[0]


#: The method for a table's rows: as the manifest records it, and as the kernels take it.
Choice = tuple[Quantizer, Method]


def choose_quantizer(staged: StagedJob, index: int) -> Choice:
    """Choose the method for the rows of table `index`, which must be a quantized table.

    Raises:
        StagingError: the slot cannot be read.
    """
    table = staged.job.tables[index]
    sample_rows, seed = 0, 0
    if table.method is not None:
        chosen_now = Quantizer(table=index, rank=staged.job.rank, **table.method.model_dump())
        return chosen_now, kernel_method(table.method)
    if table.quantizer == "symmetric":
        method = SYMMETRIC
    elif table.quantizer == "asymmetric" or (table.quantizer == "auto" and table.bits == 8):
        method = ASYMMETRIC
    else:
        seed = staged.job.step
        rows = _sample(staged, index, seed)
        sample_rows = len(rows)
        name = None if table.quantizer == "auto" else table.quantizer
        method = choose(rows, table.bits, seed=seed, name=name)
    quantizer = Quantizer(
        table=index,
        rank=staged.job.rank,
        method=method.name,
        bins=method.bins,
        ratio_permille=method.ratio_permille,
        refits=method.refits,
        sample_rows=sample_rows,
        seed=seed,
    )
    return quantizer, method


def _sample(staged: StagedJob, index: int, seed: int) -> Tensor:
    """Return a sample of a table's staged rows, or all if there are few: f32 [n, dim]."""
    table = staged.job.tables[index]
    count = table.row_count
    positions = torch.arange(count, device="cpu") if count <= SAMPLE_ROWS else drawn(count, seed)
    extents = tuple(
        staged.extent(values_name(index), first=position, count=1)
        for position in positions.tolist()
    )
    dtype = torch_dtype(table.spec.dtype)
    data = bytearray(sum(extent.length for extent in extents))
    read_into(memoryview(data), *extents)
    stored = torch.frombuffer(data, dtype=dtype)
    return stored.reshape(len(extents), table.spec.dim).to(torch.float32)


def _staged_codes(staged: StagedJob, block: RowBlock, rows_each: int) -> Iterator[PackedRows]:
    """Yield the block's rows as the trainer quantized them, `rows_each` at a time.

    Raises:
        MalformedObject: no quantization yields such codes, or they would decode to values that are
            not finite.
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
        packed = PackedRows(codes, scale, offset, exact, wide.to(torch.bool))
        _check(staged, block, packed)
        yield packed


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


def _exact_span(staged: StagedJob, block: RowBlock) -> tuple[int, int]:
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
    low, high = _exact_span(staged, block)
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
