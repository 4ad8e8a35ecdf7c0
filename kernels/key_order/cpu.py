"""The order in which rows of a keyed table leave, on a CPU: few candidates, and a scan for more."""

from __future__ import annotations

from array import array
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.key_order.shapes import outside, require_columns
from recpoint.kernels.native import library

__all__ = ["KeyOrder"]

#: Numbers of a candidate in native.cpp, and positions in its Order.
_NUMBERS: Final = 4
_SIZE: Final = 6
_HAS_ALL: Final = 8
_RETURNED: Final = 9

#: Room for candidates: at least so many, and one for so many rows.
_FEWEST: Final = 1 << 13
_ROWS_PER_CANDIDATE: Final = 16


class KeyOrder:
    """Says which rows of a keyed table leave next, from the tensors that the table keeps of them.

    A row's uses and last use may rise, and a slot may become free, at any time. Whoever gives a
    slot another key, or lowers uses or a last use, calls `join` once the tensors say so. If many
    rows change otherwise, as in a restore, a new order is needed. Calls must not run beside each
    other, or beside a change of the tensors.

    Args:
        slot_keys: int64 [rows] on the CPU: the key of each slot; those of slots with a last use
            differ. Slot 0 has none.
        last_use: int64 [rows] on the CPU: the last use of each slot's key, or less than 0 if the
            slot is free.
        uses: int64 [rows] on the CPU: what is compared first. None: the last use is.

    Raises:
        ValueError: tensors of another form.
    """

    def __init__(self, slot_keys: Tensor, last_use: Tensor, uses: Tensor | None = None) -> None:
        require_columns(slot_keys, last_use, uses)
        self._slot_keys = slot_keys
        self._last_use, self._uses = last_use, uses
        self._columns = (slot_keys, last_use, last_use if uses is None else uses)
        self._bound = torch.zeros(_NUMBERS, dtype=torch.int64, device="cpu")
        self._room = 0
        self._heap = torch.empty(0, dtype=torch.int64, device="cpu")
        self._order = self._new_order()
        #: Slots of the last call of `use`, and what it found there.
        self._used = (self._heap, self._heap)
        self._is_whole = False

    def least(self, count: int, before: int) -> Tensor:
        """Return the slots of the least rows that were last used before the use `before`.

        Rows are compared by (uses, last use, key), or by (last use, key) without uses. The call
        changes no row, so a second one returns the same.

        Args:
            count: how many rows to return; fewer are returned if there are no more.
            before: a use.

        Returns:
            int64 [n]: slots, that of the least row first.
        """
        count = max(0, min(count, self._slot_keys.shape[0]))
        slots = torch.empty(count, dtype=torch.int64, device="cpu")
        while True:
            was_whole = self._is_whole
            if not was_whole:
                self._scan()
            address = self._order.buffer_info()[0]
            taken = library.take_least(address, count, before, slots.data_ptr())
            if taken == count or self._order[_HAS_ALL]:
                return slots if taken == count else slots[:taken]
            self._is_whole = False
            # As many candidates as were seen now, twice.
            needed = 4 * (count + self._order[_RETURNED] - taken)
            self._room = max(self._room if was_whole else 2 * self._room, needed)

    def use(self, slots: Tensor, step: int) -> None:
        """Write that a lookup used these slots: `step` as last use, and one use more.

        Args:
            slots: int64 [n]; 0 is left out, and a slot that comes several times is used once.
            step: not before the last use of any of the slots.

        Raises:
            ValueError: slots of another form, or that the table does not have; nothing has changed.
        """
        require_integers("slots", slots)
        n, uses = slots.shape[0], self._uses
        earlier = torch.empty(n if uses is None else 2 * n, dtype=torch.int64, device="cpu")
        error = library.use_slots(
            slots.data_ptr(), n, self._slot_keys.shape[0], step, self._last_use.data_ptr(),
            0 if uses is None else uses.data_ptr(), earlier.data_ptr(),
        )  # fmt: skip
        if error >= 0:
            raise outside(slots, error, self._slot_keys.shape[0])
        self._used = (slots, earlier)

    def undo_use(self) -> None:
        """Write back the last uses and uses that the last call of `use` found.

        Nothing else may have changed those of its slots since.
        """
        slots, earlier = self._used
        library.undo_use(
            slots.data_ptr(), slots.shape[0], self._last_use.data_ptr(),
            0 if self._uses is None else self._uses.data_ptr(), earlier.data_ptr(),
        )  # fmt: skip
        self.join(slots)

    def join(self, slots: Tensor) -> None:
        """Take note that these slots got other keys, or that their uses or last uses went down.

        Args:
            slots: int64 [n]; slots may come several times, and may be free.

        Raises:
            ValueError: slots of another form, or that the table does not have.
        """
        require_integers("slots", slots)
        n = slots.shape[0]
        error = library.join_rows(self._order.buffer_info()[0], slots.data_ptr(), n)
        if 0 <= error < n:
            raise outside(slots, error, self._slot_keys.shape[0])
        self._is_whole = self._is_whole and error < 0

    def _scan(self) -> None:
        rows = self._slot_keys.shape[0]
        # With twice as much room as there are rows, all of them are candidates.
        self._room = min(max(self._room, _FEWEST, rows // _ROWS_PER_CANDIDATE), 2 * rows)
        if self._heap.shape[0] != self._room * _NUMBERS:
            self._heap = torch.empty(self._room * _NUMBERS, dtype=torch.int64, device="cpu")
        self._order = self._new_order()
        library.scan_rows(self._order.buffer_info()[0])
        self._is_whole = True

    def _new_order(self) -> array[int]:
        """Return native.cpp's Order without candidates."""
        columns = [column.data_ptr() for column in self._columns]
        candidates = self._heap.data_ptr(), self._room, 0
        rows = self._slot_keys.shape[0]
        return array("q", [*columns, rows, *candidates, self._bound.data_ptr(), 0, 0])
