"""Slots of rows, row by row: what the fast version must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recpoint.kernels.slot_map.taken import Taken, as_vector, require_use

__all__ = ["SlotMap"]


def _integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


class SlotMap:
    """A map from rows to slots that gives the slots of rows that are no longer used to others."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity}, expected 1 or more")
        self.capacity = capacity
        self._slots: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._uses_held: dict[int, int] = {}

    @property
    def size(self) -> int:
        """Number of rows that have a slot."""
        return len(self._slots)

    def find(self, ids: Tensor) -> Tensor:
        """Return the slot of each row, or -1."""
        return _integers([self._slots.get(row, -1) for row in as_vector(ids).tolist()])

    def hold(self, ids: Tensor, use: int) -> Tensor:
        """`find`, and raise the last uses of the rows that are found."""
        require_use("use", use)
        for row in self._slots.keys() & set(ids.tolist()):
            self._uses_held[row] = max(self._uses_held[row], use)
            self._last[row] = max(self._last[row], use)
        return self.find(ids)

    def expect(self, ids: Tensor, use: int) -> None:
        """Raise the last uses of the rows that have a slot; `lower` lowers them again."""
        require_use("use", use)
        for row in self._slots.keys() & set(as_vector(ids).tolist()):
            self._last[row] = max(self._last[row], use)

    def take(self, ids: Tensor, *, use: int, released: int) -> Taken | None:
        """Give each row a slot, and raise its last use."""
        require_use("use", use)
        if use <= released:
            raise ValueError(f"use: {use}, expected more than released, {released}")
        return self._take(ids, use=use, released=released)

    def add(self, ids: Tensor, *, use: int, released: int) -> Taken | None:
        """Give slots to rows that have none, and hold them."""
        require_use("use", use)
        rows = set(ids.tolist())
        if all(row >= 0 for row in rows) and (len(rows) < ids.numel() or rows & self._slots.keys()):
            raise ValueError("ids: a row that has a slot, or comes twice; expected new rows")
        slots = self._take(ids, use=use, released=released)
        if slots is not None:
            self._uses_held.update(dict.fromkeys(rows, use))
        return slots

    def _take(self, ids: Tensor, *, use: int, released: int) -> Taken | None:
        rows = as_vector(ids).tolist()
        for row in rows:
            if row < 0:
                raise IndexError(f"ids: {row}, expected id >= 0")
        absent = sorted(set(rows) - self._slots.keys())
        free = sorted(set(range(self.capacity)) - set(self._slots.values()))[: len(absent)]
        leave = sorted(
            (last, self._slots[row], row)
            for row, last in self._last.items()
            if last <= released and row not in rows
        )
        needed = len(absent) - len(free)
        if needed > len(leave):
            return None
        evicted = [(row, slot) for _, slot, row in leave[:needed]]
        slots = free + [slot for _, slot in evicted]
        for row, _ in evicted:
            self._remove(row)
        for row, slot in zip(absent, slots, strict=True):
            self._slots[row], self._last[row], self._uses_held[row] = slot, use, 0
        for row in rows:
            self._last[row] = max(self._last[row], use)
        evicted.sort()
        return Taken(
            _integers(absent),
            _integers(slots),
            _integers([row for row, _ in evicted]),
            _integers([slot for _, slot in evicted]),
        )

    def _remove(self, row: int) -> int:
        del self._last[row], self._uses_held[row]
        return self._slots.pop(row)

    def lower(self, use: int) -> None:
        """Lower later last uses to `use`, or to the use until which a row is held."""
        require_use("use", use)
        for row, last in self._last.items():
            self._last[row] = min(last, max(use, self._uses_held[row]))

    def drop(self, ids: Tensor) -> Tensor:
        """Take the slots from the rows. Return the slot that each row had, or -1."""
        return _integers(
            [self._remove(row) if row in self._slots else -1 for row in as_vector(ids).tolist()]
        )

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return the rows that have a slot, ascending, and their slots."""
        row_slots = sorted(self._slots.items())
        return _integers([row for row, _ in row_slots]), _integers([slot for _, slot in row_slots])

    def evictable(self, released: int) -> int:
        """Return the number of rows whose last use is `released` or before."""
        return sum(last <= released for last in self._last.values())
