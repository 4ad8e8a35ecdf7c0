"""Reads rows of a block from the slot, a pass at a time."""

from __future__ import annotations

from torch import Tensor, frombuffer

from recpoint.catalog.persist.plan import RowBlock
from recpoint.catalog.staging.job import StagedJob
from recpoint.catalog.staging.slot_reading import read_into
from recpoint.format.dtypes import item_bytes, torch_dtype

__all__ = ["BlockRows", "passes"]

#: Staged bytes quantized at once: few enough to fit the caches and to bound the memory.
_PASS_BYTES = 8 << 20


def passes(staged: StagedJob, block: RowBlock) -> list[range]:
    """Return the ranges of the block's rows that are worked on at once, counted from its first."""
    spec = staged.job.tables[block.table].spec
    rows_each = max(1, _PASS_BYTES // (spec.dim * item_bytes(spec.dtype)))
    return [
        range(first, min(first + rows_each, block.rows))
        for first in range(0, block.rows, rows_each)
    ]


class BlockRows:
    """Reads the rows of a block in one segment; all reads share a buffer.

    Args:
        staged: the job.
        block: the block.
        name: name of the segment.
    """

    def __init__(self, staged: StagedJob, block: RowBlock, name: str) -> None:
        self._staged, self._block, self._name = staged, block, name
        self._segment = staged.segments[name]
        self._dtype = torch_dtype(self._segment.dtype)
        self._buffer = bytearray()

    def read(self, rows: range) -> Tensor:
        """Return some of the rows in the segment's dtype, [n, …]; valid until the next read.

        Args:
            rows: positions in the block, at least one.

        Raises:
            StagingError: the slot cannot be read.
        """
        first = self._block.first + rows.start
        extent = self._staged.extent(self._name, first=first, count=len(rows))
        if len(self._buffer) < extent.length:
            self._buffer = bytearray(extent.length)
        view = memoryview(self._buffer)[: extent.length]
        read_into(view, extent)
        return frombuffer(view, dtype=self._dtype).reshape(len(rows), *self._segment.shape[1:])
