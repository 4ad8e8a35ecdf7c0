"""A map from row ids to places on a CPU: open addressing, one compiled pass over the ids."""

from __future__ import annotations

from array import array
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.native import library

__all__ = ["RowMap"]

_ENTRY_BYTES: Final = 16
_FEWEST: Final = 1 << 10


class RowMap:
    """Maps ids of rows, 0 or more, to places, 0 or more.

    `put` must not run beside any other call. All other calls may run beside each other.
    """

    def __init__(self) -> None:
        self._entries = _empty(_FEWEST)
        # Native code counts, so that no signal's handler can come between a row and its count.
        self._count = array("q", [0])

    def __len__(self) -> int:
        return self._count[0]

    @property
    def nbytes(self) -> int:
        """Memory of the map, in bytes."""
        return self._entries.nbytes

    def put(self, ids: Tensor, first: int) -> None:
        """Give each row a place, instead of the one that it had.

        Args:
            ids: int64 [n], without duplicates. Row ids[i] gets place first + i.
            first: 0 or more.

        Raises:
            ValueError: ids of another form, or a negative number.
        """
        require_integers("ids", ids)
        if first < 0 or (len(ids) and int(ids.min()) < 0):
            raise ValueError("ids or first: a negative number, expected 0 or more")
        self._make_room(len(self) + len(ids))
        library.put_places(
            self._entries.data_ptr(), self._mask, ids.data_ptr(), len(ids), first,
            self._count.buffer_info()[0],
        )  # fmt: skip

    def find(self, ids: Tensor) -> Tensor:
        """Return the place of each row, or -1: int64 [n].

        Args:
            ids: int64 [n].

        Raises:
            ValueError: ids of another form.
        """
        require_integers("ids", ids)
        places = torch.empty_like(ids)
        library.find_places(
            self._entries.data_ptr(), self._mask, ids.data_ptr(), len(ids), places.data_ptr()
        )
        return places

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all rows, ascending, and their places: int64 [rows] each."""
        ids, places = torch.empty((2, len(self)), dtype=torch.int64, device="cpu")
        library.list_places(self._entries.data_ptr(), self._mask, ids.data_ptr(), places.data_ptr())
        ids, order = ids.sort()
        return ids, places[order]

    @property
    def _mask(self) -> int:
        return len(self._entries) - 1

    def _make_room(self, rows: int) -> None:
        entries = len(self._entries)
        while 4 * rows > 3 * entries:
            entries *= 2
        if entries > len(self._entries):
            larger = _empty(entries)
            library.move_places(
                self._entries.data_ptr(), self._mask, larger.data_ptr(), entries - 1
            )
            self._entries = larger


def _empty(entries: int) -> Tensor:
    return torch.zeros(entries, _ENTRY_BYTES // 8, dtype=torch.int64, device="cpu")
