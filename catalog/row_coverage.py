"""Whether the chunks of a table hold each row at most once (format §4, I2 and I3)."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.errors import MalformedObject
from recpoint.kernels import dirty_bitmap

__all__ = ["RowCoverage"]


class RowCoverage:
    """The rows that the chunks of one table of one checkpoint have brought so far.

    Ranges are kept as ranges, which a full mostly consists of; sets of ids cost one bit for each
    row of the table, and only when the table has more than one chunk.

    Args:
        rows: rows of the table.
        chunks: how many chunks it has in this checkpoint.
    """

    def __init__(self, *, rows: int, chunks: int) -> None:
        self._rows = rows
        self._single = chunks == 1
        self._ranges: list[range] = []
        self._bitmap: Tensor | None = None
        self._set_rows = 0

    def add(self, rows: range | Tensor) -> None:
        """Take in a chunk's rows, already known to be ascending and inside the table."""
        if self._single:
            return  # its ids ascend strictly: there is nothing they could overlap with
        if isinstance(rows, range):
            self._ranges.append(rows)
            return
        if self._bitmap is None:
            self._bitmap = dirty_bitmap.new(self._rows)
        dirty_bitmap.mark(self._bitmap, rows, rows=self._rows)
        self._set_rows += rows.numel()

    def finish(self, *, key: str, table: str) -> None:
        """Check what has been added, after the last chunk.

        A full needs no more than this: its manifest's row counts sum to the table's rows, so that
        disjoint chunks hold every row.

        Raises:
            MalformedObject: naming the manifest `key`: some row is in two chunks.
        """
        ranges = sorted(self._ranges, key=lambda rows: rows.start)
        overlap = any(
            after.start < before.stop for before, after in zip(ranges, ranges[1:], strict=False)
        )
        if self._bitmap is not None and not overlap:
            for rows in ranges:
                dirty_bitmap.mark(
                    self._bitmap, torch.arange(rows.start, rows.stop), rows=self._rows
                )
            added = self._set_rows + sum(len(rows) for rows in ranges)
            overlap = dirty_bitmap.count(self._bitmap) != added
        if overlap:
            raise MalformedObject(
                key,
                found=f"a row of table {table!r} in two chunks",
                expected="each row at most once in a checkpoint",
                next_step="restore an older checkpoint: recpoint list URL",
            )
