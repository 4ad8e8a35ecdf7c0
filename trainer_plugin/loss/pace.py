"""Says which batches are measured, so that measurements take their share of the time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["MeasuringPace"]

#: The longest stride between measured batches.
_LONGEST: Final = 1 << 30


class MeasuringPace:
    """Adds up the time that measurements take, and says when the next one is due.

    One process goes by its clock. Ranks wait for each other in each batch: if each went by its own
    clock, training would wait for each of them in turn. So all measure the same batches, at one
    stride, on which they agree when they agree on a checkpoint. Until then, they measure the first
    batch only.

    Args:
        share: the most of the time that measurements take.
        in_step: whether this is one of several ranks.
        skips_first: whether the first batch that is trained is not measured.
        clock: seconds that only grow.

    Attributes:
        clock: as given.
        in_step: as given.
        stride: each so many batches the ranks measure one; None: they have not agreed on it.
    """

    def __init__(
        self,
        share: float,
        *,
        in_step: bool,
        skips_first: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.in_step = in_step
        self.stride: int | None = None
        self._share = share
        self._began: float | None = None  # clock at the first batch of this process
        self._batches = -int(skips_first)  # that began since then
        self._spent_seconds = self._last_seconds = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether a batch was measured in this process."""
        return self._began is not None

    @property
    def measured_share(self) -> float:
        """The share of the time since the first batch that measurements took."""
        elapsed = 0.0 if self._began is None else self.clock() - self._began
        return self._spent_seconds / elapsed if elapsed > 0 else 0.0

    def is_due(self) -> bool:
        """Whether the next batch is measured; the first one that may be always is."""
        self._batches += 1
        if not self._batches:
            return False
        if self._began is None:
            return True
        if self.in_step:
            return self.stride is not None and self._batches % self.stride == 0
        budget = self._share * (self.clock() - self._began)
        return self._spent_seconds + self._last_seconds <= budget

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Count the time of the block, which measures a batch."""
        began = self.clock()
        if self._began is None:
            self._began = began
        try:
            yield
        finally:
            self._last_seconds = self.clock() - began
            self._spent_seconds += self._last_seconds

    @property
    def wanted_stride(self) -> int:
        """The shortest stride at which measurements take their share of this rank's time."""
        if self._began is None or not self._batches:
            return _LONGEST
        seconds = self.clock() - self._began - self._spent_seconds
        if not self._share * seconds > 0:
            return _LONGEST
        # A measurement is a share of the time of a stride and of itself.
        stride = self._last_seconds * (1 / self._share - 1) / (seconds / self._batches)
        return max(1, min(math.ceil(stride), _LONGEST))
