"""Slots of rows on a CPU: a table, and a few numbers for each slot, in tensors.

Each call runs in the calling thread alone. A map belongs to one thread at a time.
"""

from __future__ import annotations

from array import array
from typing import Final

import torch
from torch import Tensor

from recpoint.kernels.native import library
from recpoint.kernels.slot_map.taken import Taken, as_vector, require_use

__all__ = ["SlotMap"]

#: Positions of numbers in native.cpp's Map, and how many it has.
_TAKEN: Final = 8
_FIELDS: Final = 17

#: What native.cpp returns instead of a number of rows.
_NO_ROOM: Final = -1
_NO_MEMORY: Final = -2
_NOT_NEW: Final = -3
_NEGATIVE: Final = -4


class SlotMap:
    """A map from rows to slots that gives the slots of rows that are no longer used to others.

    Row ids are 0 or more, in vectors of int32 or int64 on the CPU. Uses are 0 to MOST_USE. All
    methods raise ValueError for ids or uses of another form, and then change nothing.

    Args:
        capacity: number of slots, 1 or more.

    Raises:
        ValueError: the capacity is less than 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity}, expected 1 or more")
        self.capacity = capacity
        bits = (2 * capacity - 1).bit_length()
        sizes = 2 << bits, capacity, capacity, capacity, capacity
        # native.cpp writes them first, after it has asked for large pages.
        self._tensors = tuple(torch.empty(n, dtype=torch.int64, device="cpu") for n in sizes)
        entries, keys, last, in_use, queue = (tensor.data_ptr() for tensor in self._tensors)
        fields = entries, (1 << bits) - 1, 64 - bits, keys, last, in_use, queue, capacity
        self._map = array("q", [*fields, *[0] * (_FIELDS - len(fields))])
        self._address = self._map.buffer_info()[0]
        library.clear_slots(self._address)

    @property
    def size(self) -> int:
        """Number of rows that have a slot."""
        return self._map[_TAKEN]

    @property
    def size_bytes(self) -> int:
        """Bytes of the map: they follow the capacity."""
        return sum(tensor.nbytes for tensor in self._tensors) + 8 * _FIELDS

    def find(self, ids: Tensor) -> Tensor:
        """Return the slot of each row, or -1: int64 [k] for k ids."""
        ids = as_vector(ids)
        slots = torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        library.find_slots(
            self._address, ids.data_ptr(), ids.numel(), ids.element_size(), slots.data_ptr()
        )
        return slots

    def hold(self, ids: Tensor, use: int) -> Tensor:
        """`find`, and raise the last uses of the rows that are found to `use` at least.

        `lower` does not lower them below `use`.
        """
        return self._raise(ids, use, is_held=True)

    def expect(self, ids: Tensor, use: int) -> None:
        """Raise the last uses of the rows that have a slot to `use` at least.

        `lower` lowers them again.
        """
        self._raise(ids, use, is_held=False)

    def _raise(self, ids: Tensor, use: int, *, is_held: bool) -> Tensor:
        require_use("use", use)
        ids = as_vector(ids)
        slots = torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        library.hold_slots(
            self._address, ids.data_ptr(), ids.numel(), ids.element_size(), use, is_held,
            slots.data_ptr(),
        )  # fmt: skip
        return slots

    def take(self, ids: Tensor, *, use: int, released: int) -> Taken | None:
        """Give each row a slot, and raise its last use to `use` at least.

        Args:
            ids: [k]; rows may come several times.
            use: the use of these rows, later than `released`.
            released: rows with a last use up to this one may lose their slots, except rows of the
                call itself. They lose them only if no slot is free.

        Returns:
            What changed. None: there is no room, and nothing has changed.

        Raises:
            IndexError: an id is negative; nothing has changed.
            MemoryError: there was no memory to sort rows by their last use; nothing has changed.
        """
        require_use("use", use)
        if use <= released:
            raise ValueError(f"use: {use}, expected more than released, {released}")
        return self._take(ids, use=use, released=released, all_new=False)

    def add(self, ids: Tensor, *, use: int, released: int) -> Taken | None:
        """Give slots to rows that have none, and hold them as `hold` does.

        Args:
            ids: [k], all different.
            use: the last use of these rows; it need not be later than `released`.
            released: as for `take`.

        Returns:
            What changed. None: there is no room, and nothing has changed.

        Raises:
            IndexError: an id is negative; nothing has changed.
            MemoryError: as for `take`.
            ValueError: a row has a slot or comes twice; nothing has changed.
        """
        require_use("use", use)
        return self._take(ids, use=use, released=released, all_new=True)

    def _take(self, ids: Tensor, *, use: int, released: int, all_new: bool) -> Taken | None:
        ids = as_vector(ids)
        count = ids.numel()
        scratch = torch.empty(4 * count, dtype=torch.int64, device="cpu")
        n = library.seek_slots(
            self._address, ids.data_ptr(), count, ids.element_size(), use, released, all_new,
            scratch.data_ptr(),
        )  # fmt: skip
        if n < 0:
            if n == _NO_ROOM:
                return None
            raise _error(n, ids)
        if n == 0:  # as in most batches of a small table
            none = torch.empty(0, dtype=torch.int64, device="cpu")
            return Taken(none, none, none, none)
        m = max(0, n - (self.capacity - self._map[_TAKEN]))
        # One tensor of just this size: a caller keeps what is returned for many batches.
        out = torch.empty(2 * (n + m), dtype=torch.int64, device="cpu")
        slots = Taken(*out.split_with_sizes((n, n, m, m)))
        library.fill_slots(self._address, use, all_new, out.data_ptr(), n, m, scratch.data_ptr())
        return slots

    def lower(self, use: int) -> None:
        """Lower later last uses to `use`, or to the use until which a row is held.

        `use` must not be earlier than any `released` that was given.
        """
        require_use("use", use)
        library.lower_uses(self._address, use)

    def drop(self, ids: Tensor) -> Tensor:
        """Take the slots from the rows. Return the slot that each row had, or -1."""
        ids = as_vector(ids)
        slots = torch.empty(ids.numel(), dtype=torch.int64, device="cpu")
        library.drop_slots(
            self._address, ids.data_ptr(), ids.numel(), ids.element_size(), slots.data_ptr()
        )
        return slots

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the rows that have a slot, ascending, and their slots."""
        n = self.size
        out = torch.empty((2, n), dtype=torch.int64, device="cpu")
        scratch = torch.empty(4 * n, dtype=torch.int64, device="cpu")
        ids, slots = out.unbind()
        library.list_slots(self._address, ids.data_ptr(), slots.data_ptr(), scratch.data_ptr())
        return ids, slots

    def evictable(self, released: int) -> int:
        """Return the number of rows whose last use is `released` or before."""
        count = int(library.count_evictable(self._address, released))
        if count == _NO_MEMORY:
            raise MemoryError("no memory to sort rows by their last use")
        return count


def _error(code: int, ids: Tensor) -> Exception:
    if code == _NO_MEMORY:
        return MemoryError("no memory to sort rows by their last use")
    if code == _NOT_NEW:
        return ValueError("ids: a row that has a slot, or comes twice; expected new rows")
    return IndexError(f"ids: {int(ids[_NEGATIVE - code])}, expected id >= 0")
