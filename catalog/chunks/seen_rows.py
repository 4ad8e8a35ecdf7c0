"""Which rows of a table have been brought by newer checkpoints of a chain."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from recpoint.kernels import dirty_bitmap

__all__ = [
    "SECTION_ROWS",
    "SeenIds",
    "SeenRows",
    "kept_by_ids",
    "sections_of",
    "sections_touched",
]

#: Rows of a table whose bits are in memory at once where memory is bounded: 64 MiB.
SECTION_ROWS: Final = 1 << 29


class SeenRows:
    """One bit a row of a table; a chain is gone through from its newest checkpoint to its oldest.

    Args:
        rows: rows of the table.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._bitmap = dirty_bitmap.new(rows)
        self._seen = 0

    @property
    def all(self) -> bool:
        """Whether every row has been brought: what is older holds nothing that counts."""
        return self._seen == self._rows

    def claim(self, rows: range | Tensor) -> Tensor | None:
        """Take in a chunk's rows, known to be ascending and inside the table.

        Returns:
            Which of them nothing newer has brought: positions int64 [m], ascending; None: all.
        """
        if self.all:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        positions = dirty_bitmap.mark_new(self._bitmap, rows, rows=self._rows)
        self._seen += positions.numel()
        return None if positions.numel() == len(rows) else positions


class SeenIds:
    """The same for few rows of a table that would take far more bits: sorted ids."""

    all = False

    def __init__(self) -> None:
        self._seen = torch.empty(0, dtype=torch.int64, device="cpu")

    def claim(self, rows: range | Tensor) -> Tensor | None:
        """See `SeenRows.claim`."""
        ids = torch.arange(rows.start, rows.stop, device="cpu") if isinstance(rows, range) else rows
        places = torch.searchsorted(self._seen, ids)
        known = torch.zeros(ids.numel(), dtype=torch.bool, device="cpu")
        inside = places < self._seen.numel()
        known[inside] = self._seen[places[inside]] == ids[inside]
        positions = (~known).nonzero().flatten()
        self._seen = torch.cat([self._seen, ids[positions]]).sort().values
        return None if positions.numel() == ids.numel() else positions


def sections_of(rows: int, stored_rows: int) -> list[tuple[range, SeenRows | SeenIds | None]]:
    """The parts of a table that are gone through one after another, so that memory is bounded.

    Args:
        rows: of the table.
        stored_rows: row ids in all chunks of the chain.

    Returns:
        rows, and what keeps them in mind; None stands for `SeenRows`, made when it is their turn.
    """
    if kept_by_ids(rows, stored_rows):
        return [(range(rows), SeenIds())]
    return [
        (range(first, min(first + SECTION_ROWS, rows)), None)
        for first in range(0, rows, SECTION_ROWS)
    ]


def sections_touched(first_row: int, last_row: int) -> int:
    """In how many sections a chunk of these first and last rows is read, at most.

    Where a table is not `kept_by_ids`: there it is read once.
    """
    return last_row // SECTION_ROWS - first_row // SECTION_ROWS + 1


def kept_by_ids(rows: int, stored_rows: int) -> bool:
    """Whether a table is gone through in one part, its few rows kept in mind as ids.

    Args:
        rows, stored_rows: as for `sections_of`.
    """
    return 64 * stored_rows < min(rows, SECTION_ROWS)
