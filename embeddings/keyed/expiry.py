"""Finds rows that no lookup has used for a number of steps, without reading all rows in each step.

One pass over the table finds the rows that may expire in the next steps. Until these are over, only
those rows are looked at, because the last use of a row never goes back.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["Expiry"]

#: One pass serves a 64th of the time to live.
_PASSES_IN_A_LIFE: Final = 64


class Expiry:
    """The rows of one table whose time to live is over.

    Args:
        ttl_batches: a row expires in the first step that is more than so many after its last use.
    """

    def __init__(self, ttl_batches: int) -> None:
        self._ttl_batches = ttl_batches
        self.forget()

    def forget(self) -> None:
        """Take note that other rows are in the table now: the next call passes over all of them."""
        self._next_pass = self._looked_at = -1
        #: Slots by the last use that they had in the pass, and that last use.
        self._candidates = self._uses_seen = torch.empty(0, dtype=torch.int64, device="cpu")

    def expired(self, last_use: Tensor, steps: int) -> Tensor:
        """Return the slots of rows that have expired; none if this step was asked for before.

        Args:
            last_use: int64 [capacity + 1]: the step of each row's last use; -1: the slot is free.
            steps: the current step; it never goes back between two calls of `forget`.
        """
        if steps == self._looked_at:
            return self._candidates[:0]
        self._looked_at = steps
        oldest = steps - self._ttl_batches
        if steps >= self._next_pass:
            self._pass_over(last_use, steps)
        due = int(torch.searchsorted(self._uses_seen, oldest))
        slots = self._candidates[:due]
        self._candidates, self._uses_seen = self._candidates[due:], self._uses_seen[due:]
        # A row that was used since expires after the next pass.
        used = last_use[slots]
        return slots[(used >= 0) & (used < oldest)]

    def _pass_over(self, last_use: Tensor, steps: int) -> None:
        steps_served = max(self._ttl_batches // _PASSES_IN_A_LIFE, 1)
        self._next_pass = steps + steps_served
        newest = self._next_pass - 1 - self._ttl_batches
        candidates = torch.nonzero((last_use >= 0) & (last_use < newest)).view(-1)
        self._uses_seen, order = torch.sort(last_use[candidates], stable=True)
        self._candidates = candidates[order]
