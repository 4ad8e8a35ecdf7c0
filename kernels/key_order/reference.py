"""The order in which rows of a keyed table leave, by sorting all rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recpoint.kernels.key_order.shapes import require_columns, require_slots

__all__ = ["KeyOrder"]


class KeyOrder:
    """Says which rows leave next."""

    def __init__(self, slot_keys: Tensor, last_use: Tensor, uses: Tensor | None = None) -> None:
        require_columns(slot_keys, last_use, uses)
        self._keys, self._last_use, self._uses = slot_keys, last_use, uses

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
        require_slots(slots, len(self._keys))
        slots = torch.unique(slots[slots > 0])
        self._last_use[slots] = step
        if self._uses is not None:
            self._uses[slots] += 1

    def join(self, slots: Tensor) -> None:
        """Take note that these slots got other keys."""
        require_slots(slots, len(self._keys))
