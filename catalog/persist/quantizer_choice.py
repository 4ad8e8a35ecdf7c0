"""Chooses the method with which a table's rows are quantized, from its setting or on a sample.

The choice follows from the job alone, as keys and chunks do: an agent that starts over after a kill
chooses the same method and writes the same bytes. If a job names its method, nothing is chosen: the
choice for an earlier job of its chain still holds, and the trainer may have quantized with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.catalog.persist.priced_codes import RESIDUALS, priced_method
from recpoint.catalog.persist.residuals import ResidualRows, staged_ids
from recpoint.catalog.staging.job import StagedJob, kernel_method, values_name
from recpoint.catalog.staging.slot_reading import read_into
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import CODE_BITS, Quantizer
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method
from recpoint.kernels.quantize.choice import SAMPLE_ROWS, choose, drawn

__all__ = ["Choice", "choose_quantizer"]

#: The method for a table's rows: as the manifest records it, and as the kernels take it.
Choice = tuple[Quantizer, Method]


def choose_quantizer(
    staged: StagedJob, index: int, residuals: ResidualRows | None = None
) -> Choice:
    """Choose the method for the rows of table `index`, which must be a quantized table.

    Args:
        staged: the job.
        index: index of the table.
        residuals: the rows to which a table with residuals has them; None: the job has none.

    Raises:
        StagingError: the slot cannot be read.
        RecpointError: as `ResidualRows.of`.
    """
    table = staged.job.tables[index]
    sample_rows, seed = 0, 0
    if table.method is not None:
        chosen_now = Quantizer(table=index, rank=staged.job.rank, **table.method.model_dump())
        return chosen_now, kernel_method(table.method)
    by_price = None
    if table.allocation is not None:
        by_price = priced_method(table.quantizer, residual=table.residual is True)
    if by_price is not None:
        method = by_price
    elif table.quantizer == "symmetric":
        method = SYMMETRIC
    elif table.quantizer == "asymmetric" or (table.quantizer == "auto" and table.bits == 8):
        method = ASYMMETRIC
    elif table.quantizer == "auto" and table.residual:
        method = RESIDUALS
    else:
        seed = staged.job.step
        rows = _sample(staged, index, seed, residuals)
        sample_rows = len(rows)
        name = None if table.quantizer == "auto" else table.quantizer
        # Of several widths it matters most for the narrowest, which errs most.
        bits = table.bits if table.allocation is None else min(CODE_BITS)
        method = choose(rows, bits, seed=seed, name=name)
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


def _sample(
    staged: StagedJob, index: int, seed: int, residuals: ResidualRows | None = None
) -> Tensor:
    """Return a sample of what is quantized of a table, or all if there is little: f32 [n, dim]."""
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
    stored = torch.frombuffer(data, dtype=dtype).reshape(len(extents), table.spec.dim)
    if residuals is None or not table.residual:
        return stored.to(torch.float32)
    spans = [range(position, position + 1) for position in positions.tolist()]
    return residuals.of(index, staged_ids(staged, index, spans), stored)
