"""Adds up what ranks have measured, so that all decide alike when they agree on a checkpoint.

Each rank measures its own batches at the price on trial. When a checkpoint is due, all ranks hear
the sums of all, and add them in rank order.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import astuple
from typing import Final, NamedTuple

from recpoint.trainer_plugin.loss.price import LossPair, TrialSums
from recpoint.trainer_plugin.loss.ratio_interval import PairSums

__all__ = ["AgreedMeasurements", "RankMeasurements"]

#: Stands for a rank that has no first price to propose.
_NO_PRICE: Final = 1 << 20
_FLAGS: Final = 5  # integers before the sums
_SUMS: Final = 6  # numbers of a `PairSums`


class AgreedMeasurements(NamedTuple):
    """What all ranks have measured since the last agreement.

    Attributes:
        has_error: some rank cannot measure any more.
        has_failed: on some rank, a loss was infinite or NaN at the price on trial.
        stride: each so many batches all measure one.
        sums: the sums of all ranks.
    """

    has_error: bool
    has_failed: bool
    stride: int
    sums: TrialSums


class RankMeasurements:
    """What this rank has measured since ranks last agreed, and what they agreed on.

    Attributes:
        first_price: the first price that all ranks try; None: not all have proposed one.
        may_raise: whether a higher price than that on trial would save bits on some rank.
    """

    def __init__(self) -> None:
        self.first_price: float | None = None
        self.may_raise = True
        self._sums = TrialSums()
        self._has_failed = False

    def add(self, pair: LossPair) -> None:
        """Add a batch of this rank, measured at the price on trial."""
        self._sums.add(pair)

    def fail(self) -> None:
        """Take note that a loss was infinite or NaN."""
        self._has_failed = True

    def integers(
        self, *, has_error: bool, may_raise: bool, first_price: float | None, stride: int
    ) -> tuple[int, ...]:
        """Return what the other ranks hear, as integers of 64 bits.

        Args:
            has_error: this rank cannot measure any more.
            may_raise: a higher price than that on trial would save bits.
            first_price: the first price to try, a power of two; None: this rank proposes none.
            stride: each so many batches it would measure one.
        """
        exponent = _NO_PRICE if first_price is None else math.frexp(first_price)[1] - 1
        numbers = [
            float(number)
            for sums in (self._sums.even, self._sums.odd, self._sums.total)
            for number in astuple(sums)
        ]
        packed = struct.pack(f"<{len(numbers)}d", *numbers)
        return (
            *map(int, (has_error, self._has_failed, may_raise, exponent, stride)),
            *struct.unpack(f"<{len(numbers)}q", packed),
        )

    def agree(self, told: Sequence[Sequence[int]]) -> AgreedMeasurements:
        """Return what all ranks have measured, and begin anew.

        Args:
            told: what `integers` returned on each rank, in rank order.
        """
        errors, failures, raises, exponents, strides = zip(
            *(integers[:_FLAGS] for integers in told), strict=True
        )
        self.may_raise = any(raises)
        self.first_price = None if _NO_PRICE in exponents else math.ldexp(1.0, min(exponents))
        self._sums, self._has_failed = TrialSums(), False
        total = TrialSums()
        for integers in told:
            total.merge(_sums_of(integers[_FLAGS:]))
        return AgreedMeasurements(any(errors), any(failures), max(strides), total)


def _sums_of(packed: Sequence[int]) -> TrialSums:
    numbers = struct.unpack(f"<{len(packed)}d", struct.pack(f"<{len(packed)}q", *packed))
    even, odd, total = (
        PairSums(
            pairs=int(numbers[first]),
            x=numbers[first + 1],
            y=numbers[first + 2],
            xx=numbers[first + 3],
            xy=numbers[first + 4],
            yy=numbers[first + 5],
        )
        for first in range(0, 3 * _SUMS, _SUMS)
    )
    return TrialSums(even=even, odd=odd, total=total)
