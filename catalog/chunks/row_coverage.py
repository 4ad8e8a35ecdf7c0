"""Whether the chunks of a table hold each row at most once (format §4, I2 and I3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.errors import MalformedObject
from recpoint.kernels import dirty_bitmap

__all__ = ["RowCoverage"]


class RowCoverage:
    """The rows that the chunks of one table of one checkpoint have brought so far.

    Ranges are kept as ranges, which a full mostly consists of. Sets of ids cost one bit for each
    row of the table or eight bytes for each row stored, whichever is less: a manifest may claim
    any number of rows, while what is stored has been seen to be there.

    Args:
        rows: rows of the table.
        row_counts: of each of its chunks in this checkpoint.
    """

    def __init__(self, *, rows: int, row_counts: Sequence[int]) -> None:
        self._rows = rows
        self._single = len(row_counts) == 1
        self._with_bitmap = rows // 8 <= 8 * sum(row_counts)
        self._ranges: list[range] = []
        self._sets: list[Tensor] = []
        self._bitmap: Tensor | None = None
        self._set_rows = 0

    def add(self, rows: range | Tensor) -> None:
        """Take in a chunk's rows, already known to be ascending and inside the table."""
        if self._single:
            return  # its ids ascend strictly: there is nothing they could overlap with
        if isinstance(rows, range):
            self._ranges.append(rows)
            return
        if not self._with_bitmap:
            self._sets.append(rows)
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
        if overlap or self._sets_overlap(ranges):
            raise MalformedObject(
                key,
                found=f"a row of table {table!r} in two chunks",
                expected="each row at most once in a checkpoint",
                next_step="restore an older checkpoint: recpoint list URL",
            )

    def _sets_overlap(self, ranges: Sequence[range]) -> bool:
        """Whether the sets of ids overlap each other or `ranges`, which are disjoint."""
        if self._sets:
            ids = torch.cat(self._sets).sort().values
            edges = torch.tensor(
                [(rows.start, rows.stop) for rows in ranges], dtype=torch.int64, device="cpu"
            )
            before = torch.searchsorted(ids, edges.reshape(-1, 2))
            return bool((ids[1:] == ids[:-1]).any() or (before[:, 0] != before[:, 1]).any())
        if self._bitmap is None:
            return False
        for rows in ranges:
            dirty_bitmap.mark(
                self._bitmap, torch.arange(rows.start, rows.stop, device="cpu"), rows=self._rows
            )
        added = self._set_rows + sum(len(rows) for rows in ranges)
        return dirty_bitmap.count(self._bitmap) != added
