"""Writes row states that are stored in fewer bits to the spool: rounded, or coded (format §3.5).

A block's states are read once for all of its chunks, because each chunk has rows from everywhere
in the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.block_rows import BlockRows, passes
from recpoint.catalog.persist.plan import RowBlock
from recpoint.catalog.persist.spool import SpoolFile
from recpoint.catalog.staging.job import StagedJob, state_name
from recpoint.catalog.staging.slot_reading import Extent
from recpoint.format.dtypes import Dtype
from recpoint.format.manifest import RowStateSpec
from recpoint.format.row_state import to_bfloat16
from recpoint.kernels import moments, row_gather

__all__ = ["NarrowState", "narrow_states"]

_Positions = np.ndarray[Any, np.dtype[np.int64]]


class NarrowState(NamedTuple):
    """A row state of a chunk as the spool has it.

    Attributes:
        dtype: BF16, or U8 for codes.
        values: the values, or the codes.
        grids: the grids of coded rows; none if the state is not coded.
    """

    dtype: Dtype
    values: tuple[Extent, ...]
    grids: tuple[Extent, ...]


def narrow_states(
    staged: StagedJob, block: RowBlock, chunks: Sequence[_Positions], spool: SpoolFile
) -> list[list[NarrowState | None]]:
    """Return the row states of each chunk of a block; None for one that is stored as staged.

    A state that has codes is stored as staged in the chunks that have a row without codes.

    Args:
        staged: the job.
        block: the block.
        chunks: positions of the rows of each chunk in the block, int64 [n], ascending.
        spool: takes the states.

    Raises:
        StagingError: the slot cannot be read.
        StagingFull: there is no room in the spool.
    """
    table = staged.job.tables[block.table]
    of_states = [
        _narrow(staged, block, index, chunks, spool)
        if dtype != state.dtype
        else [None for _ in chunks]
        for index, (state, dtype) in enumerate(
            zip(table.spec.row_states, table.state_dtypes, strict=True)
        )
    ]
    return [[states[number] for states in of_states] for number in range(len(chunks))]


def _narrow(
    staged: StagedJob,
    block: RowBlock,
    index: int,
    chunks: Sequence[_Positions],
    spool: SpoolFile,
) -> list[NarrowState | None]:
    """Return one state of each chunk."""
    table = staged.job.tables[block.table]
    state, dtype = table.spec.row_states[index], table.state_dtypes[index]
    reader = BlockRows(staged, block, state_name(block.table, index))
    narrowed: list[NarrowState | None] = [NarrowState(dtype, (), ()) for _ in chunks]
    for rows in passes(staged, block):
        spans = [np.searchsorted(positions, (rows.start, rows.stop)) for positions in chunks]
        arrays, has_codes = _narrowed(reader.read(rows), state, dtype)
        for number, (positions, (first, stop)) in enumerate(zip(chunks, spans, strict=True)):
            before = narrowed[number]
            if first == stop or before is None:
                continue
            own = torch.from_numpy(positions[first:stop] - rows.start)
            if not bool(has_codes[own].all()):
                narrowed[number] = None
                continue
            values, *grids = (spool.append(_chosen(array, own).numpy()) for array in arrays)
            narrowed[number] = NarrowState(dtype, (*before.values, values), (*before.grids, *grids))
    return narrowed


def _narrowed(rows: Tensor, state: RowStateSpec, dtype: Dtype) -> tuple[list[Tensor], Tensor]:
    """Return rows of F32 as bytes: rounded, or their codes and grids; and whether each has them."""
    count = len(rows)
    if not state.is_coded(dtype):
        rounded = to_bfloat16(rows.reshape(count, -1)).view(torch.uint8)
        return [rounded], torch.ones(count, dtype=torch.bool, device="cpu")
    coded = moments.encode(rows.reshape(count, -1))
    return [coded.codes, coded.grids.view(count, 1).view(torch.uint8)], ~coded.refused


def _chosen(array: Tensor, positions: Tensor) -> Tensor:
    """Return the rows [n, bytes] at `positions`, int64 [m], ascending."""
    if len(positions) == len(array):
        return array
    chosen = array.new_empty(len(positions), array.shape[1])
    row_gather.gather(array, positions, chosen)
    return chosen
