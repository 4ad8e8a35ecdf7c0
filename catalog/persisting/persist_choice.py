"""How a staged table's rows are quantized: as its setting says, or chosen on a sample of them.

What is chosen follows from the job alone, as keys and chunks do: an agent that starts over after
having been killed chooses the same, and so writes the same bytes. A job that names its method is
not chosen for: what was chosen for an earlier one of its chain still holds, and the trainer may
have quantized with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.catalog.staging.staged_job import (
    StagedJob,
    kernel_method,
    read_into,
    values_name,
)
from recpoint.format.dtypes import torch_dtype
from recpoint.format.manifest import Quantizer
from recpoint.kernels.quantize import ASYMMETRIC, SYMMETRIC, Method
from recpoint.kernels.quantize.choice import SAMPLE_ROWS, choose, drawn

__all__ = ["Choice", "choose_quantizer"]

#: What rows are quantized with: as a manifest records it, and as the kernels take it.
Choice = tuple[Quantizer, Method]


def choose_quantizer(staged: StagedJob, index: int) -> Choice:
    """What the rows of table `index`, which are to be quantized, are quantized with.

    Raises:
        StagingError: the slot cannot be read.
    """
    table = staged.job.tables[index]
    sample_rows, seed = 0, 0
    if table.method is not None:
        given = Quantizer(table=index, rank=staged.job.rank, **table.method.model_dump())
        return given, kernel_method(table.method)
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
    """Some of the staged rows of a table, or all when they are few: f32 [n, dim]."""
    table = staged.job.tables[index]
    count = table.row_count
    every = torch.arange(count, device="cpu") if count <= SAMPLE_ROWS else drawn(count, seed)
    extents = tuple(
        staged.extent(values_name(index), first=position, count=1) for position in every.tolist()
    )
    dtype = torch_dtype(table.spec.dtype)
    data = bytearray(sum(extent.length for extent in extents))
    read_into(memoryview(data), *extents)
    stored = torch.frombuffer(data, dtype=dtype)
    return stored.reshape(len(extents), table.spec.dim).to(torch.float32)
