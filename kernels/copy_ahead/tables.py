"""The tables of a copy ahead: their marks, the rows that a window looks up, and where rows go."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from recpoint.kernels.dirty_rows.destination import Room

__all__ = ["STEP_WORDS", "LastUses", "Left", "TableAhead"]

#: Words of a bitmap whose rows are copied in one step. The same as STEP_WORDS of native.cpp.
STEP_WORDS = 64


class LastUses(NamedTuple):
    """The rows that a window looks up, each once, ordered by the batch that looks it up last.

    Attributes:
        ids: int64 [n]; in any order within a batch.
        starts: int64 [batches + 1]: the ids of batch b are ids[starts[b]:starts[b + 1]].
    """

    ids: Tensor
    starts: Tensor


class TableAhead(NamedTuple):
    """A table whose rows are copied ahead.

    A row has a place if the checkpoint holds every row, or if the row was marked when the window
    opened or is looked up in it. Places are numbered in the order of ids.

    Attributes:
        rows: rows of the table.
        fresh: bitmap of the marks since the window opened. Handing rows over clears bits in it.
        taken: bitmap of the marks before, and of marks of rows that were handed over; nothing else
            may set bits in it.
        seen: bitmap of the rows that the window looks up.
        uses: these rows. Handing rows over changes the order within a batch.
        places: int64 [n]: the places of `uses.ids`.
        first_places: int64 [parts + 1]: number of rows with a place before each part of STEP_WORDS
            words, and of all; None: the checkpoint holds every row.
        ids: receives the ids of the rows with a place, int64, ascending; None: they are not wanted.
        arrays: (source [rows, *e], room for [places, *e]) for the weight and each row state;
            sources are contiguous, on the CPU, and overlap no room.
    """

    rows: int
    fresh: Tensor
    taken: Tensor
    seen: Tensor
    uses: LastUses
    places: Tensor
    first_places: Tensor | None
    ids: Room | None
    arrays: tuple[tuple[Tensor, Room], ...]

    @property
    def placed(self) -> int:
        """Number of rows with a place."""
        return self.rows if self.first_places is None else int(self.first_places[-1])


class Left(NamedTuple):
    """The rows of a table that were marked and not handed over.

    Attributes:
        ids: int64 [n]: rows with a place.
        places: int64 [n]: their places.
        unplaced: int64 [m], ascending: rows without a place.
    """

    ids: Tensor
    places: Tensor
    unplaced: Tensor
