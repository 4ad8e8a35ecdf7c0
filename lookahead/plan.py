"""Plans a window of batches: after which batch each row is final, and where its copy goes.

The plan is pure: it reads the ids that batches look up, and marks. It knows no trainer and writes
nothing but the bitmap that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from recpoint.kernels import copy_ahead
from recpoint.kernels.copy_ahead import LastUses

__all__ = ["TablePlan", "plan_table"]


@dataclass(frozen=True, kw_only=True, eq=False)
class TablePlan:
    """The plan of one table for one window.

    Attributes:
        rows: rows of the table.
        seen: bitmap of the rows that the window looks up.
        uses: these rows, by the batch that looks each up last: after that batch, the row is final.
            All other rows are final when the window opens.
        places: int64 [n]: places of `uses.ids`.
        first_places: places of the rows by parts of the bitmap, as `copy_ahead.TableAhead` has
            them; None: every row has a place, equal to its id.
        placed: number of rows with a place.
    """

    rows: int
    seen: Tensor
    uses: LastUses
    places: Tensor
    first_places: Tensor | None
    placed: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the plan without the bitmap: they follow the rows of the window."""
        lists = (self.uses.ids, self.uses.starts, self.places, self.first_places)
        return sum(0 if ids is None else ids.nbytes for ids in lists)


def plan_table(
    batches: Sequence[Tensor], *, rows: int, marked: Tensor | None, seen: Tensor
) -> TablePlan:
    """Plan one table.

    Args:
        batches: ids that each batch of the window looks up, in order: int32 or int64 [n],
            contiguous, on the CPU; wrong ids cost time only.
        rows: rows of the table.
        marked: bitmap of the rows that are marked when the window opens, on the CPU; they and the
            rows of the window have places. None: all rows have places.
        seen: a clean bitmap of the table, which becomes the plan's.

    Raises:
        ValueError: a tensor has another form than expected.
    """
    uses = copy_ahead.last_uses(batches, rows=rows, seen=seen)
    if marked is not None:
        first = copy_ahead.first_places(marked, seen)
        placed = int(first[-1])
        if placed < rows:
            places = copy_ahead.places(uses.ids, marked, seen, first)
            return TablePlan(
                rows=rows, seen=seen, uses=uses, places=places, first_places=first, placed=placed
            )
    # The copier writes rows of `uses.ids` and of `places` in the same order, each in its own list.
    return TablePlan(
        rows=rows, seen=seen, uses=uses, places=uses.ids.clone(), first_places=None, placed=rows
    )
