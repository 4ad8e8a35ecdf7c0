"""Slots of keys on a CPU: an index of a tensor of keys, in compiled passes over batches of keys."""

from __future__ import annotations

import secrets
from array import array
from typing import Final

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.key_map.shapes import (
    require_larger,
    require_pairs,
    require_room,
    require_slot_keys,
)
from recpoint.kernels.native import library

__all__ = ["KeyMap"]

#: Positions of numbers in native.cpp's Map.
_OLD_ENTRIES: Final = 2
_SIZE: Final = 9

#: Kinds of errors in what native.cpp returns.
_KINDS: Final = 4
_OUTSIDE: Final = 0
_TAKEN: Final = 1


class KeyMap:
    """Maps keys, which are any int64, to slots 1 to `capacity` of a table.

    Each call runs in the calling thread alone. Calls of `find` may run beside each other; no other
    call may run beside any.

    Args:
        slot_keys: int64 [capacity + 1] on the CPU: where the map keeps the key of each slot. A
            table stores it as a row state, so the map needs no copy. The map writes it: `insert`
            the keys, `remove` zeros. Nothing else may change the key of a slot that has one. The
            map is empty at first, whatever the tensor holds; `insert(slot_keys[slots], slots)`
            brings back the keys of a restored table.
        seed: of the hash, 128 bits. None: drawn from the system, so that nobody can choose keys
            that meet in the map. No result depends on it.
        growth_step: entries of the smaller index that a call moves at least, while the map grows.

    Raises:
        ValueError: the tensor has another form, or a capacity outside 1 to MOST_SLOTS.
    """

    def __init__(
        self, slot_keys: Tensor, *, seed: int | None = None, growth_step: int = 4096
    ) -> None:
        require_slot_keys(slot_keys)
        self.slot_keys = slot_keys
        # native.cpp writes them first, after it has asked for large pages.
        self._entries = torch.empty(_entry_count(self.capacity), dtype=torch.int64, device="cpu")
        self._taken = torch.empty(_word_count(self.capacity), dtype=torch.int64, device="cpu")
        index = self._entries.data_ptr(), self._entries.shape[0]
        old_index, old_range = (0, 0), (0, 0)
        slots = slot_keys.data_ptr(), self._taken.data_ptr(), self.capacity
        counts = (0, 0)
        factors = _factors(secrets.randbits(128) if seed is None else seed)
        self._map = array(
            "Q", [*index, *old_index, *old_range, *slots, *counts, *factors, growth_step, 0]
        )
        self._address = self._map.buffer_info()[0]
        #: Memory for a batch of keys.
        self._room = torch.empty(0, dtype=torch.int64, device="cpu")
        #: Memory of an index from which keys still move.
        self._old_entries: Tensor | None = None
        library.clear_keys(self._address)

    def __len__(self) -> int:
        return self._map[_SIZE]

    @property
    def capacity(self) -> int:
        """Number of slots beside slot 0."""
        return self.slot_keys.shape[0] - 1

    @property
    def nbytes(self) -> int:
        """Memory of the map in bytes, `slot_keys` included."""
        tensors = self.slot_keys, self._entries, self._taken, self._old_entries
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def is_growing(self) -> bool:
        """Whether keys still lie in the index of a smaller capacity."""
        return self._map[_OLD_ENTRIES] != 0

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, or 0: int64 [n].

        Args:
            keys: int64 [n]; keys may come several times.

        Raises:
            ValueError: keys of another form.
        """
        require_integers("keys", keys)
        slots = torch.empty_like(keys)
        library.find_keys(self._address, keys.data_ptr(), keys.shape[0], slots.data_ptr())
        return slots

    def find_or_list(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slot of each key, or 0, and the keys that have none, ascending, each once.

        Args:
            keys: int64 [n]; keys may come several times.

        Returns:
            int64 [n] and int64 [m].

        Raises:
            ValueError: keys of another form.
        """
        require_integers("keys", keys)
        n = keys.shape[0]
        slots = torch.empty_like(keys)
        if self._room.shape[0] < 2 * n:
            self._room = torch.empty(2 * n, dtype=torch.int64, device="cpu")
        count = library.find_or_list(
            self._address, keys.data_ptr(), n, slots.data_ptr(), self._room.data_ptr()
        )
        return slots, self._room[:count].clone()

    def find_missing(self, keys: Tensor, slots: Tensor) -> None:
        """Write the slots that keys got since `find` returned 0 as theirs.

        Args:
            keys: int64 [n].
            slots: int64 [n]: their slots before; those that are 0 are written.

        Raises:
            ValueError: vectors of another form.
        """
        require_pairs(keys, slots)
        library.find_missing(self._address, keys.data_ptr(), keys.shape[0], slots.data_ptr())

    def insert(self, keys: Tensor, slots: Tensor) -> None:
        """Give each key its slot, and write it to `slot_keys`.

        Args:
            keys: int64 [n]: keys that have no slot, all different.
            slots: int64 [n]: free slots, all different.

        Raises:
            ValueError: vectors of another form, a slot that a key has or that does not exist, or a
                key that has a slot. Nothing has changed.
        """
        require_pairs(keys, slots)
        before = torch.empty_like(keys)
        error = library.insert_keys(
            self._address, keys.data_ptr(), slots.data_ptr(), keys.shape[0], before.data_ptr()
        )
        self._let_go()
        if error >= 0:
            raise _error(error, keys, slots, self.capacity)

    def remove(self, keys: Tensor) -> Tensor:
        """Take the slots from the keys, and write 0 to `slot_keys` there.

        Args:
            keys: int64 [n]; keys may have no slot, and may come several times.

        Returns:
            int64 [n]: the slot that each key had when its turn came, or 0.

        Raises:
            ValueError: keys of another form.
        """
        require_integers("keys", keys)
        slots = torch.empty_like(keys)
        library.remove_keys(self._address, keys.data_ptr(), keys.shape[0], slots.data_ptr())
        self._let_go()
        return slots

    def free_slots(self, most: int) -> Tensor:
        """Return the lowest slots without a key, ascending, `most` at most: int64 [n]."""
        count = max(0, min(most, self.capacity - len(self)))
        slots = torch.empty(count, dtype=torch.int64, device="cpu")
        library.list_free(self._address, count, slots.data_ptr())
        return slots

    def choose_slots(self, count: int, leaving: Tensor) -> Tensor:
        """Return slots for so many new keys, ascending: `leaving`, and the lowest free ones.

        Args:
            count: how many.
            leaving: int64 [n]: slots that lose their keys before, all different.

        Raises:
            ValueError: slots of another form, or fewer slots are free.
        """
        require_integers("leaving", leaving)
        n = leaving.shape[0]
        require_room(count - n, self.capacity - len(self))
        # The upper half is room to sort in.
        slots = torch.empty(2 * count, dtype=torch.int64, device="cpu")
        library.choose_slots(self._address, leaving.data_ptr(), n, count, slots.data_ptr())
        return slots[:count]

    def taken_slots(self) -> Tensor:
        """Return the slots that have a key, ascending: int64 [len(self)]."""
        slots = torch.empty(len(self), dtype=torch.int64, device="cpu")
        library.list_taken(self._address, slots.data_ptr())
        return slots

    def grow(self, slot_keys: Tensor) -> None:
        """Take over a tensor with room for more slots.

        The call moves no key to the larger index. Each later `insert` or `remove` moves some
        thousands, and `insert` eight entries of the index for each of its keys. If an earlier
        growth has not ended, the call ends it.

        Args:
            slot_keys: int64 [capacity + 1]: of the larger capacity. The caller has copied what the
                current `slot_keys` holds to its beginning.

        Raises:
            ValueError: the tensor has another form, or less room than the current one.
        """
        require_larger(slot_keys, self.slot_keys)
        capacity = slot_keys.shape[0] - 1
        # NumPy's zeros are pages that the system gives when they are first used. torch would write
        # them all within this call.
        entries = torch.from_numpy(np.zeros(_entry_count(capacity), dtype=np.int64))
        taken = torch.from_numpy(np.zeros(_word_count(capacity), dtype=np.int64))
        library.grow_keys(
            self._address, entries.data_ptr(), entries.shape[0], slot_keys.data_ptr(),
            taken.data_ptr(), capacity,
        )  # fmt: skip
        self._old_entries = self._entries
        self.slot_keys, self._entries, self._taken = slot_keys, entries, taken

    def _let_go(self) -> None:
        if self._old_entries is not None and not self.is_growing:
            self._old_entries = None


def _entry_count(capacity: int) -> int:
    """Return 25 entries for each 16 slots: at most 64 % of them are used."""
    return 25 * capacity // 16 + 8


def _word_count(capacity: int) -> int:
    """Return the words of 64 bits that have a bit for slot 0 and each other slot."""
    return capacity // 64 + 1


def _factors(seed: int) -> tuple[int, int]:
    """Return two odd factors of 64 bits, of a seed of up to 128 bits."""
    mask = (1 << 64) - 1
    # Seed 0 gives the factors of the other maps. Each other seed changes bits 1 to 63 of them.
    return 0x9E3779B97F4A7C15 ^ seed << 1 & mask, 0xD6E8FEB86659FD93 ^ seed >> 63 & mask - 1


def _error(code: int, keys: Tensor, slots: Tensor, capacity: int) -> ValueError:
    kind, position = code % _KINDS, code // _KINDS
    key, slot = int(keys[position]), int(slots[position])
    if kind == _OUTSIDE:
        return ValueError(f"slots: {slot}, expected 1 to {capacity}")
    if kind == _TAKEN:
        return ValueError(f"slots: {slot}, which a key has; expected a free slot")
    return ValueError(f"keys: {key}, which has a slot; expected a new key")
