"""The order in which rows of a keyed table leave, by sorting all rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.key_order.shapes import outside, require_columns

__all__ = ["KeyOrder"]


class KeyOrder:
    """Says which rows leave next."""

    def __init__(self, slot_keys: Tensor, last_use: Tensor, uses: Tensor | None = None) -> None:
        require_columns(slot_keys, last_use, uses)
        self._keys, self._last_use, self._uses = slot_keys, last_use, uses
        self._states = [last_use] if uses is None else [last_use, uses]
        self._used: tuple[Tensor, list[Tensor]] | None = None

    def least(self, count: int, before: int) -> Tensor:
        """Return the slots of the least rows that were last used before the use `before`."""
        may_leave = (self._last_use >= 0) & (self._last_use < before)
        slots = may_leave.nonzero()[:, 0]
        columns = [self._keys[slots], self._last_use[slots]]
        if self._uses is not None:
            columns.append(self._uses[slots])
        # The last column is the first that is compared.
        order = np.lexsort([column.numpy() for column in columns])
        return slots[torch.from_numpy(order)][: max(count, 0)]

    def use(self, slots: Tensor, step: int) -> None:
        """Write that a lookup used these slots; 0 is left out."""
        self._require_slots(slots)
        slots = torch.unique(slots[slots > 0])
        self._used = (slots, [state[slots] for state in self._states])
        self._last_use[slots] = step
        if self._uses is not None:
            self._uses[slots] += 1

    def undo_use(self) -> None:
        """Write back what the last call of `use` found."""
        if self._used is not None:
            slots, earlier = self._used
            for state, entries in zip(self._states, earlier, strict=True):
                state[slots] = entries

    def join(self, slots: Tensor) -> None:
        """Take note that these slots got other keys."""
        self._require_slots(slots)

    def _require_slots(self, slots: Tensor) -> None:
        require_integers("slots", slots)
        for position, slot in enumerate(slots.tolist()):
            if not 0 <= slot < len(self._keys):
                raise outside(slots, position, len(self._keys))
