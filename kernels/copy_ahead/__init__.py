"""Copying rows of tables before they are due, while training goes on. On CPUs only.

A window is the batches before a cut. `last_uses` says by which batch each row that the window looks
up is final, if the predicted lookups are right. `Copier` copies rows once they are final, and at
the cut the rows that are left. See README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from recpoint.kernels.copy_ahead import cpu
from recpoint.kernels.copy_ahead.tables import LastUses, Left, TableAhead

__all__ = ["Copier", "LastUses", "Left", "TableAhead", "first_places", "last_uses", "places"]

Copier = cpu.Copier


def last_uses(batches: Sequence[Tensor], *, rows: int, seen: Tensor) -> LastUses:
    """List each row that the batches look up once, under the last batch that looks it up.

    Args:
        batches: of each batch, in order: int32 or int64 [n], contiguous, on the CPU. Ids outside
            0 … rows - 1 are left out.
        rows: rows of the table.
        seen: a clean bitmap of the table (`dirty_bitmap`); the bits of the listed rows are set.

    Raises:
        ValueError: a tensor has another form, or the bitmap does not fit.
    """
    return cpu.last_uses(batches, rows=rows, seen=seen)


def first_places(taken: Tensor, seen: Tensor) -> Tensor:
    """Return the number of rows set in either bitmap before each part, and of all rows set.

    Args:
        taken, seen: bitmaps of one table.

    Returns:
        int64 [parts + 1].

    Raises:
        ValueError: the bitmaps are not of one table.
    """
    return cpu.first_places(taken, seen)


def places(ids: Tensor, taken: Tensor, seen: Tensor, first: Tensor) -> Tensor:
    """Return how many rows before each id are set in either bitmap.

    Args:
        ids: int64 [n], inside the table.
        taken, seen: bitmaps of the table.
        first: as `first_places` returned it for these bitmaps.

    Returns:
        int64 [n].
    """
    return cpu.places(ids, taken, seen, first)
