"""Keeps slots of a cache free for the rows of new keys that coming batches probably bring.

A new key gets its row when it is looked up. Then a slot of the cache has to be free at once: to
wait for the home thread, which writes back the row that leaves a slot, takes longer than the
lookup. So the plan of a batch has a number for each key of the batch that has no row yet. No row
has such a number. In the oracle it has a slot, as rows have, and the lookup gives the slot to a
row. Wrong guesses cost slots for the time of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from recpoint.embeddings.cache.slots import TableSlots
from recpoint.embeddings.keyed.key_slots import KeySlots
from recpoint.lookahead.oracle import CapacityError, Oracle, Step

__all__ = ["FIRST_RESERVED", "ReservedSlots"]

#: Numbers from here on are no rows: a table has at most 2**48.
FIRST_RESERVED: Final = 1 << 56

_KEYS_OF_CHECK: Final = torch.tensor([0, -1], dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class _Reserved:
    """What the plan of one batch has reserved: numbers, int64 [n], for keys, int64 [n]."""

    batch: int
    numbers: Tensor
    keys: Tensor


class ReservedSlots:
    """The slots that are reserved in the cache of one keyed table. Used by the training thread.

    Args:
        keys: knows which keys have rows.
        slots: the slots of the cache.
    """

    def __init__(self, keys: KeySlots, slots: TableSlots) -> None:
        self._keys = keys
        self._slots = slots
        self._next_number = FIRST_RESERVED
        self._reserved: list[_Reserved] = []

    def forget(self) -> None:
        """Take note that no number has a slot."""
        self._reserved.clear()

    @property
    def rules(self) -> str:
        """What has to be equal on all trainers that share the rows."""
        first_values = self._keys.rows.first_values(_KEYS_OF_CHECK).double().tolist()
        return f"{self._keys.state_dict()['settings']!r}, first values {first_values}"

    def rows_of(self, keys: Tensor) -> Tensor:
        """Return the rows that keys, int64 [n], have now, 0 for none: int64 [n]."""
        return self._keys.find(keys)

    def plan(self, oracle: Oracle, keys: Tensor | None, *, batch: int) -> Step | None:
        """Plan the next batch of the table's oracle, with slots for new keys if there is room.

        Args:
            oracle: plans the table.
            keys: int32 or int64 [n], on the CPU: what the batch looks up; None: nothing.
            batch: the batch that training is at.

        Raises:
            CapacityError: see `Oracle.plan`.
        """
        self._reserved = [entry for entry in self._reserved if entry.batch >= batch]
        if keys is None:
            return oracle.plan(torch.empty(0, dtype=torch.int64, device="cpu"))
        rows, new_keys = self._keys.coming(keys.long())
        rows = self._slots.in_range(rows)
        if self._reserved:  # a key of an earlier batch has its row by then
            awaited = torch.cat([entry.keys for entry in self._reserved])
            new_keys = new_keys[~torch.isin(new_keys, awaited)]
        count = new_keys.numel()
        if count:
            numbers = torch.arange(
                self._next_number, self._next_number + count, dtype=torch.int64, device="cpu"
            )
            try:
                step = oracle.plan(torch.cat([rows, numbers]))
            except CapacityError:
                step = None
            if step is not None:
                self._next_number += count
                self._reserved.append(_Reserved(step.batch, numbers, new_keys))
                return step
        return oracle.plan(rows)

    def free(self, oracle: Oracle, count: int, *, batch: int) -> bool:
        """Free reserved slots until at least `count` are free; return whether they are.

        Args:
            oracle: gives slots to the table's rows.
            count: number of slots.
            batch: the batch that training is at.
        """
        missing_count = count - oracle.unused
        for entry in self._reserved:
            if missing_count <= 0 or entry.batch > batch:
                break
            slots = oracle.slots_of(entry.numbers)
            is_there = slots >= 0
            # The home thread has written back what was there before.
            is_there[is_there.clone()] = self._slots.ready[slots[is_there]]
            numbers = entry.numbers[is_there][:missing_count]
            oracle.drop(numbers)
            missing_count -= numbers.numel()
        return missing_count <= 0
