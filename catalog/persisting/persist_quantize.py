"""First step of a persist: fewer bits for the rows of a group (format §3.2, §3.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persisting.persist_choice import Choice, choose_quantizer
from recpoint.catalog.persisting.persist_codes import exact_span, staged_codes
from recpoint.catalog.persisting.persist_parts import write_bits
from recpoint.catalog.persisting.persist_plan import PARAMETER_DTYPES, Group, RowBlock
from recpoint.catalog.persisting.persist_spool import (
    SpoolFile,
    extent_list,
    load_result,
    result_path,
    save_result,
)
from recpoint.catalog.staging.staged_job import Extent, StagedJob, read_into, values_name
from recpoint.format.dtypes import Dtype, item_bytes, torch_dtype
from recpoint.format.manifest import Quantizer
from recpoint.kernels.implementation import on_cpu
from recpoint.kernels.quantize import Method, PackedRows, quantize_packed

__all__ = ["Quantization", "quantization_of", "quantize_group"]

#: Staged bytes that are worked on at once: small enough for the caches and for bounded memory.
_PASS_BYTES = 8 << 20

_ARRAYS = ("codes", "scale", "offset")
_MOST_TEXT = 255


class Quantization(NamedTuple):
    """What a manifest says about how its rows were quantized."""

    quantizers: tuple[Quantizer, ...]
    implementation: str


def quantize_group(staged: StagedJob, group: Group, chosen: dict[int, Choice]) -> str:
    """Quantize and pack the group's rows into the spool.

    Rows that are not quantizable are left out and it is written down which: the next step
    stores them exactly. What the trainer has quantized is only checked and sorted.

    Args:
        staged: the job.
        group: one of its groups.
        chosen: what the rows of its tables are quantized with, by table; a table that no group
            before had is added.

    Returns:
        Path of the result, which names extents of the spool.

    Raises:
        MalformedObject: the slot has codes that no quantization gives.
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


def quantization_of(staged: StagedJob, groups: Sequence[Group]) -> Quantization:
    """What the groups of a job, all of them quantized that have to be, were quantized with."""
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
        passes = staged_codes(staged, block, rows_each)
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
        "exact_first": exact_span(staged, block)[0] if table.codes else 0,
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
    """The block's rows, some at a time, quantized from their values."""
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
        found = quantize_packed(rows, table.bits, method, half_parameters=True)
        if table.spec.dtype == "F64":
            # Only rows whose conversion to F32 is exact may be quantized (format §3.2).
            found = found._replace(
                exact=found.exact | (rows.to(torch.float64) != stored).any(dim=1)
            )
        yield found


def _implementation(staged: StagedJob, tables: Sequence[int]) -> str:
    """What has quantized the rows of these tables: here, or where they were trained."""
    job = staged.job
    found = {job.quantized_by if job.tables[table].codes else on_cpu() for table in tables}
    return "; ".join(sorted(found))


def _chosen(
    mask: Tensor, codes: Tensor, scale: Tensor, offset: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that `mask` chooses; their parameters, which `dtype` can hold, as such."""
    if not bool(mask.all()):  # nearly always all of them: then nothing is copied
        codes, scale, offset = codes[mask], scale[mask], offset[mask]
    return codes, scale.to(dtype), offset.to(dtype)


def _bits(masks: list[Tensor], spool: SpoolFile) -> list[Any]:
    mask = torch.cat(masks).numpy() if masks else np.empty(0, np.bool_)
    return extent_list((write_bits(mask, spool),))[0]
