"""Chooses a width for each row of a block whose table has an allocation (format §7).

The widths follow from the job alone, so that an agent that starts over after a kill writes the same
bytes.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.persist.block_rows import BlockRows
from recpoint.catalog.persist.plan import RowBlock
from recpoint.catalog.persist.residual_price import residual_price, sampled_spans
from recpoint.catalog.persist.residuals import BlockResiduals
from recpoint.catalog.staging.job import StagedJob, state_name, values_name
from recpoint.format.dtypes import item_bytes
from recpoint.format.job import Allocation
from recpoint.kernels import lookup_counts
from recpoint.kernels.allocation import WIDTHS, allocate, weigh
from recpoint.kernels.bit_packing.widths import packed_width

__all__ = ["PricedWidths", "RowWidths", "importance", "with_fewer_chunks"]

#: Bits of each row's codes, or `EXACT`: u8 [rows of the block].
RowWidths = np.ndarray[Any, np.dtype[np.uint8]]

#: What a chunk costs beside its rows: its header, its entry in manifests, and a request. Rows of
#: one width that would cost less in the next wider one get no chunk of their own.
_CHUNK_COST_BYTES = 4096


class PricedWidths:
    """Chooses the widths of a block's rows, pass by pass.

    Args:
        staged: the job.
        block: the block.
        allocation: of its table.
        values: what is quantized of its rows; residuals are read here, as a sample.

    Raises:
        StagingError: the slot cannot be read.
        RecpointError: as `ResidualRows.of`.
    """

    def __init__(
        self,
        staged: StagedJob,
        block: RowBlock,
        allocation: Allocation,
        values: BlockRows | BlockResiduals,
    ) -> None:
        table = staged.job.tables[block.table]
        self._states = BlockRows(staged, block, state_name(block.table, allocation.state))
        self._scale = float.fromhex(allocation.scale)
        self._initial = 0.0 if allocation.initial is None else float.fromhex(allocation.initial)
        self._exact_bits = 8 * item_bytes(table.spec.dtype)
        self._price = float.fromhex(allocation.price)
        if isinstance(values, BlockResiduals):
            whole = BlockRows(staged, block, values_name(block.table))
            spans = sampled_spans(block.rows)
            self._price = residual_price(
                torch.cat([whole.read(rows).to(torch.float32, copy=True) for rows in spans]),
                torch.cat([values.read(rows) for rows in spans]),
                torch.cat([self._importance(rows) for rows in spans]),
                self._price,
                quantizer=table.quantizer,
                exact_bits=self._exact_bits,
            )

    def of(self, rows: range, stored: Tensor) -> RowWidths:
        """Return the widths of some of the rows.

        Args:
            rows: positions in the block.
            stored: what is quantized of them, [n, dim].

        Raises:
            StagingError: the slot cannot be read.
        """
        importances = self._importance(rows)
        widths = allocate(
            stored.to(torch.float32), importances, self._price, exact_bits=self._exact_bits
        )
        return widths.numpy()

    def _importance(self, rows: range) -> Tensor:
        return importance(self._states.read(rows), self._scale, self._initial)


def importance(states: Tensor, scale: float, initial: float = 0.0) -> Tensor:
    """Return `scale` times the mean of each row's state less `initial`: f32 [n].

    Values that are negative then count as 0.

    Args:
        states: [n, …] of a float dtype; or u8, counts of lookups as `kernels.lookup_counts` has
            them.
        scale: above 0.
        initial: the value with which the optimizer began the state.
    """
    if states.dtype is torch.uint8:
        states = lookup_counts.values(states)
    return weigh(states.unsqueeze(1).flatten(1).contiguous(), scale, initial=initial)


def with_fewer_chunks(widths: RowWidths, dim: int) -> RowWidths:
    """Return the widths, but where few rows have a width, they have the next wider one.

    Args:
        widths: of the rows of a block; changed in place.
        dim: values in a row.
    """
    counts = np.bincount(widths, minlength=max(WIDTHS) + 1)
    used = [width for width in WIDTHS if counts[width]]
    for width, wider in itertools.pairwise(used):
        more_bytes = packed_width(dim, wider) - packed_width(dim, width)
        if int(counts[width]) * more_bytes < _CHUNK_COST_BYTES:
            widths[widths == width] = wider
            counts[wider] += counts[width]
    return widths
