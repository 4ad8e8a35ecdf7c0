"""Rules which of the keys that have no row get one, when training looks them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from recpoint.embeddings.keyed.stored_state import LOOKUPS_PER_COLUMN
from recpoint.errors import SettingsError
from recpoint.kernels.key_sketch import DEPTH, MOST_COUNT, KeySketch

__all__ = ["Admission", "EachKey", "KeyGate", "Probability", "Seen"]

#: Columns of a sketch: as many as the table has rows, but not fewer.
_FEWEST_COLUMNS: Final = 1024
_COLUMNS_PER_ROW: Final = 4


class KeyGate(Protocol):
    """Admits keys to one table, and keeps what this needs."""

    def admitted(self, keys: Tensor, steps: int) -> Tensor:
        """Return the keys that get a row if they are looked up now: int64. Changes nothing.

        Args:
            keys: int64 [n], all different, ascending: keys without a row.
            steps: number of the table's optimizer steps so far.
        """

    def count(self, keys: Tensor) -> None:
        """Take note that keys without a row were looked up: int64 [n], all different."""

    def state_dict(self) -> dict[str, Any]:
        """Return the live state: name -> tensor or whole number."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
        """Return all keys."""
        return keys


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Admits a key when it is looked up for the nth time; until then it has no row.

    A lookup of several equal keys counts once. The counts are in a sketch (Estan and Varghese,
    SIGCOMM 2002) with 16 bytes for each row of the table. It may count too much, and then admits a
    key early. Old lookups fade: all counts are halved after eight times as many lookups of keys
    without a row as the table has rows.

    Args:
        times: at least 1, at most 255.

    Raises:
        SettingsError: `times` is out of range.
    """

    times: int

    def __post_init__(self) -> None:
        if type(self.times) is not int or not 1 <= self.times <= MOST_COUNT:
            raise SettingsError(
                "Seen(times=...)",
                found=f"{self.times!r:.200}",
                expected=f"a whole number from 1 to {MOST_COUNT}, which is the largest count",
                next_step="give another number of lookups",
            )

    def gate(self, capacity_rows: int) -> KeyGate:
        """Return a gate for a table of `capacity_rows`; see `Admission`."""
        return _SeenOften(self.times, capacity_rows)

    def settings(self) -> dict[str, Any]:
        """See `Admission`."""
        return {"rule": "Seen", "times": self.times}


class _SeenOften:
    """Counts the lookups of keys without a row.

    Args:
        times: see `Seen`.
        capacity_rows: rows of the table.
    """

    def __init__(self, times: int, capacity_rows: int) -> None:
        self._times = times
        self._columns = max(_FEWEST_COLUMNS, _COLUMNS_PER_ROW * capacity_rows)
        self.load_state_dict({})

    def admitted(self, keys: Tensor, steps: int) -> Tensor:
        """See `KeyGate`."""
        return keys[self._sketch.estimate(keys) >= self._times - 1]

    def count(self, keys: Tensor) -> None:
        """See `KeyGate`."""
        self._sketch.add(keys)
        self._added += keys.numel()
        lookups = LOOKUPS_PER_COLUMN * self._sketch.counts.shape[1]
        while self._added >= lookups:
            self._sketch.halve()
            self._added -= lookups

    def state_dict(self) -> dict[str, Any]:
        """See `KeyGate`."""
        return {"counts": self._sketch.counts, "added": self._added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over counts, also those of a table with another number of rows; {}: none."""
        counts = state.get("counts")
        if counts is None:
            counts = torch.zeros(DEPTH, self._columns, dtype=torch.uint8, device="cpu")
        self._sketch, self._added = KeySketch(counts.clone()), int(state.get("added", 0))


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
        """Return those of `keys` that are admitted after so many `steps`; see `KeyGate`."""
        words = _mixed(keys.numpy().astype(np.uint64)) + np.uint64(steps)
        unit = (_mixed(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return keys[torch.from_numpy(unit < self.share)]


@dataclass(frozen=True)
class _GateWithoutState:
    rule: EachKey | Probability

    def admitted(self, keys: Tensor, steps: int) -> Tensor:
        return self.rule.admitted(keys, steps)

    def count(self, keys: Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _mixed(words: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the SplitMix64 hash of each word: uint64 of the same shape."""
    words = words * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words ^ (words >> np.uint64(31))
