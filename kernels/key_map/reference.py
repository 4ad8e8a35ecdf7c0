"""Slots of keys, as a dictionary: what the fast version must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.key_map.shapes import (
    require_larger,
    require_pairs,
    require_room,
    require_slot_keys,
)

__all__ = ["KeyMap"]


def _integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


class KeyMap:
    """Maps keys to slots of a table."""

    def __init__(self, slot_keys: Tensor) -> None:
        require_slot_keys(slot_keys)
        self.slot_keys = slot_keys
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def capacity(self) -> int:
        """Number of slots beside slot 0."""
        return len(self.slot_keys) - 1

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, or 0."""
        require_integers("keys", keys)
        return _integers([self._slots.get(key, 0) for key in keys.tolist()])

    def find_or_list(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot of each key, or 0, and the keys that have none, ascending, each once."""
        slots = self.find(keys)
        return slots, _integers(sorted(set(keys[slots == 0].tolist())))

    def find_missing(self, keys: Tensor, slots: Tensor) -> None:
        """Write the slots of the keys whose slot is 0."""
        require_pairs(keys, slots)
        slots.copy_(torch.where(slots == 0, self.find(keys), slots))

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """Give each key its slot."""
        require_pairs(keys, slots)
        slots_by_key: dict[int, int] = {}
        taken_slots = set(self._slots.values())
        for key, slot in zip(keys.tolist(), slots.tolist(), strict=True):
            if not 1 <= slot <= self.capacity:
                raise ValueError(f"slots: {slot}, expected 1 to {self.capacity}")
            if slot in taken_slots:
                raise ValueError(f"slots: {slot}, which a key has; expected a free slot")
            if key in self._slots or key in slots_by_key:
                raise ValueError(f"keys: {key}, which has a slot; expected a new key")
            slots_by_key[key] = slot
            taken_slots.add(slot)
        self._slots.update(slots_by_key)
        self.slot_keys[slots] = keys

    def remove(self, keys: Tensor) -> Tensor:
        """Take the slots from the keys. Return the slot that each key had, or 0."""
        require_integers("keys", keys)
        slots = [self._slots.pop(key, 0) for key in keys.tolist()]
        self.slot_keys[[slot for slot in slots if slot]] = 0
        return _integers(slots)

    def free_slots(self, most: int) -> Tensor:
        """Return the lowest slots without a key, ascending, `most` at most."""
        free = sorted(set(range(1, self.capacity + 1)) - set(self._slots.values()))
        return _integers(free[: max(most, 0)])

    def choose_slots(self, count: int, leaving: Tensor) -> Tensor:
        """Return slots for so many new keys, ascending: `leaving`, and the lowest free ones."""
        require_integers("leaving", leaving)
        free_count = count - len(leaving)
        require_room(free_count, self.capacity - len(self))
        return torch.cat([leaving, self.free_slots(free_count)]).sort().values

    def taken_slots(self) -> Tensor:
        """Return the slots that have a key, ascending."""
        return _integers(sorted(self._slots.values()))

    def grow(self, slot_keys: Tensor) -> None:
        """Take over a tensor with room for more slots."""
        require_larger(slot_keys, self.slot_keys)
        self.slot_keys = slot_keys
