"""First step of a persist: fewer bits for the rows of a group (format §3.2, §3.3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recpoint.catalog.persist_plan import Group, RowBlock, is_quantized
from recpoint.catalog.persist_spool import (
    SpoolFile,
    extent_list,
    load_result,
    result_path,
    save_result,
)
from recpoint.catalog.staged_job import Extent, StagedJob, read_into, values_name
from recpoint.format.dtypes import item_bytes, torch_dtype
from recpoint.kernels.quantize import quantize_packed

__all__ = ["quantize_group"]

#: Staged bytes that are worked on at once: small enough for the caches and for bounded memory.
_PASS_BYTES = 8 << 20


def quantize_group(staged: StagedJob, group: Group) -> str:
    """Quantize and pack the group's rows into the spool.

    Rows that are not quantizable are left out and their positions written down: the next step
    stores them exactly.

    Returns:
        Path of the result, which names extents of the spool.

    Raises:
        StagingError: the slot cannot be read.
    """
    path = result_path(staged, group.index, "quantized")
    if load_result(path, staged) is None:
        with SpoolFile(path.with_suffix(".bin")) as spool:
            blocks = [
                _quantize_block(staged, block, spool)
                for block in group.blocks
                if isinstance(block, RowBlock) and is_quantized(staged.job.tables[block.table])
            ]
        save_result(path, staged, {"blocks": blocks})
    return str(path)


def _quantize_block(staged: StagedJob, block: RowBlock, spool: SpoolFile) -> dict[str, Any]:
    table = staged.job.tables[block.table]
    dim = table.spec.dim
    row_bytes = dim * item_bytes(table.spec.dtype)
    parts: dict[str, list[Extent]] = {"codes": [], "scale": [], "offset": []}
    left_out: list[np.ndarray[Any, Any]] = []
    rows_each = max(1, _PASS_BYTES // row_bytes)
    buffer = bytearray(min(rows_each, block.rows) * row_bytes)
    for first in range(0, block.rows, rows_each):
        count = min(rows_each, block.rows - first)
        view = memoryview(buffer)[: count * row_bytes]
        read_into(
            staged.extent(values_name(block.table), first=block.first + first, count=count), view
        )
        stored = torch.frombuffer(view, dtype=torch_dtype(table.spec.dtype)).reshape(count, dim)
        rows = stored.to(torch.float32)
        codes, scale, offset, exact, _ = quantize_packed(rows, table.bits)
        if table.spec.dtype == "F64":
            # Only rows whose conversion to F32 is exact may be quantized (format §3.2).
            exact = exact | (rows.to(torch.float64) != stored).any(dim=1)
        if bool(exact.any()):
            kept = ~exact
            codes, scale, offset = codes[kept], scale[kept], offset[kept]
            left_out.append(first + torch.nonzero(exact).flatten().numpy())
        for name, array in (("codes", codes), ("scale", scale), ("offset", offset)):
            parts[name].append(spool.append(array.contiguous().numpy()))
    positions = np.concatenate(left_out) if left_out else np.empty(0, np.int64)
    return {
        "table": block.table,
        "number": block.number,
        "exact": extent_list((spool.append(positions.astype("<i8")),))[0],
        **{name: extent_list(tuple(extents)) for name, extents in parts.items()},
    }
