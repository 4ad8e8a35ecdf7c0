"""Counts of keys in a sketch, key by key: what the fast version must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.key_sketch.shapes import DEPTH, MOST_COUNT, require_counts

__all__ = ["KeySketch", "places_of"]

_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1


def places_of(key: int, width: int) -> list[int]:
    """Return the column of a key's count in each row. Stored sketches depend on this function."""
    word = (key & _WORD) * 0x9E3779B97F4A7C15 & _WORD
    for factor in (0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD):
        word = (word ^ word >> 32) * factor & _WORD
    first, step = word >> 32, word & _HALF | 1
    return [(first + row * step & _HALF) * width >> 32 for row in range(DEPTH)]


class KeySketch:
    """Counts keys in a tensor of counts."""

    def __init__(self, counts: Tensor) -> None:
        require_counts(counts)
        self.counts = counts

    def estimate(self, keys: Tensor) -> Tensor:
        """Return the count of each key: at least how often it was added."""
        require_integers("keys", keys)
        estimates = [
            min(int(self.counts[row, column]) for row, column in self._cells(key))
            for key in keys.tolist()
        ]
        return torch.tensor(estimates, dtype=torch.int64, device="cpu")

    def add(self, keys: Tensor) -> None:
        """Raise the counts of each key to its estimate before the call, and one."""
        estimates = self.estimate(keys).tolist()
        for key, estimate in zip(keys.tolist(), estimates, strict=True):
            for cell in self._cells(key):
                self.counts[cell] = max(int(self.counts[cell]), min(estimate + 1, MOST_COUNT))

    def halve(self) -> None:
        """Halve all counts; a count of 1 becomes 0."""
        self.counts.floor_divide_(2)

    def _cells(self, key: int) -> list[tuple[int, int]]:
        return list(enumerate(places_of(key, self.counts.shape[1])))
