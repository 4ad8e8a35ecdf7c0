"""Counts of keys in a sketch on a CPU, in compiled passes over batches of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from recpoint.kernels.arguments import require_integers
from recpoint.kernels.key_sketch.shapes import require_counts
from recpoint.kernels.native import library

__all__ = ["KeySketch"]


class KeySketch:
    """Counts how often keys, which are any int64, were added. It never counts too few.

    Each call runs in the calling thread alone, and no two calls may run at once.

    Args:
        counts: uint8 [DEPTH, width] on the CPU: where the sketch keeps its counts, so that the
            caller can store and restore them. Zeros make an empty sketch.

    Raises:
        ValueError: a tensor of another form.
    """

    def __init__(self, counts: Tensor) -> None:
        require_counts(counts)
        self.counts = counts

    def estimate(self, keys: Tensor) -> Tensor:
        """Return the count of each key, 0 to MOST_COUNT: int64 [n].

        It is at least the number of calls of `add` with the key, or MOST_COUNT. It is more if other
        keys share all of its cells.

        Args:
            keys: int64 [n].

        Raises:
            ValueError: keys of another form.
        """
        require_integers("keys", keys)
        estimates = torch.empty_like(keys)
        library.estimate_counts(
            self.counts.data_ptr(), self.counts.shape[1], keys.data_ptr(), keys.shape[0],
            estimates.data_ptr(),
        )  # fmt: skip
        return estimates

    def add(self, keys: Tensor) -> None:
        """Raise the counts of each key to its estimate before the call, and one.

        So the order of the keys changes nothing, and a key that comes twice counts once.

        Args:
            keys: int64 [n].

        Raises:
            ValueError: keys of another form.
        """
        require_integers("keys", keys)
        estimates = torch.empty_like(keys)
        library.add_counts(
            self.counts.data_ptr(), self.counts.shape[1], keys.data_ptr(), keys.shape[0],
            estimates.data_ptr(),
        )  # fmt: skip

    def halve(self) -> None:
        """Halve all counts; a count of 1 becomes 0."""
        library.halve_counts(self.counts.data_ptr(), self.counts.numel())
