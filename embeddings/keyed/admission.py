"""Rules which of the keys that have no row get one, when training looks them up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from recpoint.errors import SettingsError
from recpoint.format.first_values import mixed

__all__ = ["Admission", "EachKey", "KeyGate", "Probability"]


class KeyGate(Protocol):
    """Admits keys to one table, and keeps what this needs."""

    def admitted(self, keys: Tensor, steps: int) -> Tensor:
        """Return which keys get a row if they are looked up now: bool [n]. Changes nothing.

        Args:
            keys: int64 [n], all different: keys without a row.
            steps: number of the table's optimizer steps so far.
        """

    def count(self, keys: Tensor) -> None:
        """Take note that keys without a row were looked up: int64 [n], all different."""

    def state_dict(self) -> dict[str, Any]:
        """Return the live state: name -> tensor or whole number."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""


class Admission(Protocol):
    """A rule which keys get rows; equal lookups and steps always give equal answers."""

    def gate(self, capacity_rows: int) -> KeyGate:
        """Return a gate for a table of that capacity."""

    def settings(self) -> dict[str, Any]:
        """Return the rule's name and numbers, as a checkpoint stores them."""


@dataclass(frozen=True)
class EachKey:
    """Admits each key when it is first looked up."""

    def gate(self, capacity_rows: int) -> KeyGate:
        """See `Admission`."""
        return _GateWithoutState(self)

    def settings(self) -> dict[str, Any]:
        """See `Admission`."""
        return {"rule": "EachKey"}

    def admitted(self, keys: Tensor, steps: int) -> Tensor:
        """Return True for each key."""
        return torch.ones(len(keys), dtype=torch.bool, device="cpu")


@dataclass(frozen=True, kw_only=True)
class Probability:
    """Admits a share of the lookups of keys without a row, by a hash of key and step.

    A key that is looked up in n steps is admitted with probability 1 - (1 - share)**n, so frequent
    keys get rows and most rare keys get none. No generator is drawn from.

    Args:
        share: above 0, at most 1.

    Raises:
        SettingsError: the share is out of range.
    """

    share: float

    def __post_init__(self) -> None:
        if not (isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise SettingsError(
                "Probability(share=...)",
                found=f"{self.share!r:.200}",
                expected="a number above 0, at most 1",
                next_step="give another share",
            )

    def gate(self, capacity_rows: int) -> KeyGate:
        """Return a gate for a table of `capacity_rows`; see `Admission`."""
        return _GateWithoutState(self)

    def settings(self) -> dict[str, Any]:
        """See `Admission`."""
        return {"rule": "Probability", "share": float(self.share)}

    def admitted(self, keys: Tensor, steps: int) -> Tensor:
        """Return which of `keys` are admitted after so many `steps`: bool [n]; see `KeyGate`."""
        words = mixed(keys.numpy().astype(np.uint64)) + np.uint64(steps)
        unit = (mixed(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return torch.from_numpy(unit < self.share)


@dataclass(frozen=True)
class _GateWithoutState:
    rule: EachKey | Probability

    def admitted(self, keys: Tensor, steps: int) -> Tensor:
        return self.rule.admitted(keys, steps)

    def count(self, keys: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
