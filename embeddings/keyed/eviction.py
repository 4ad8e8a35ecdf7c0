"""Rules which rows leave a table first, when keys need their slots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from recpoint.catalog.restore.keyed_rows import KEY, LAST_USE, USES
from recpoint.errors import SettingsError

__all__ = ["Eviction", "LeastRecent", "LeastUsed", "sorted_slots"]


def sorted_slots(slots: Tensor, row_states: Mapping[str, Tensor], rule: Eviction) -> Tensor:
    """Return slots in the order in which their rows leave, the first of them first.

    Args:
        slots: int64 [n]: slots that have keys.
        row_states: name -> int64 [rows].
        rule: compares the rows.
    """
    columns = [row_states[name][slots].numpy() for name in (*rule.states, KEY)]
    return slots[torch.from_numpy(np.lexsort(columns[::-1]))]


class Eviction(Protocol):
    """A rule which rows leave first.

    Attributes:
        states: names of the row states that the rule compares, the first of them first. Of rows
            that are equal in all of them, the one of the lower key leaves first.
        ttl_batches: see `LeastRecent`.
    """

    @property
    def states(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def ttl_batches(self) -> int | None: ...  # noqa: D102

    def settings(self) -> dict[str, Any]:
        """Return the rule's name and numbers, as a checkpoint stores them."""


@dataclass(frozen=True, kw_only=True)
class LeastRecent:
    """Evicts first the row that was looked up longest ago; of equal ones that of the lower key.

    Args:
        ttl_batches: a row that no training lookup has used for more than so many optimizer steps
            leaves, even if its slot is not needed. None: rows leave only if their slots are needed.

    Raises:
        SettingsError: `ttl_batches` is no whole number of at least 1.
    """

    ttl_batches: int | None = None

    def __post_init__(self) -> None:
        ttl = self.ttl_batches
        if ttl is not None and (type(ttl) is not int or ttl < 1):
            raise SettingsError(
                "LeastRecent(ttl_batches=...)",
                found=f"{ttl!r:.200}",
                expected="a whole number of at least 1, or None",
                next_step="give another number of optimizer steps",
            )

    @property
    def states(self) -> tuple[str, ...]:
        """See `Eviction`."""
        return (LAST_USE,)

    def settings(self) -> dict[str, Any]:
        """See `Eviction`."""
        return {"rule": "LeastRecent", "ttl_batches": self.ttl_batches}


@dataclass(frozen=True, kw_only=True)
class LeastUsed:
    """Evicts first the row that the fewest lookups used; of equal ones as `LeastRecent` does.

    A lookup of several equal keys is one use. A key that comes back begins again with one use.
    """

    @property
    def states(self) -> tuple[str, ...]:
        """See `Eviction`."""
        return (USES, LAST_USE)

    @property
    def ttl_batches(self) -> int | None:
        """See `Eviction`."""
        return None

    def settings(self) -> dict[str, Any]:
        """See `Eviction`."""
        return {"rule": "LeastUsed"}
