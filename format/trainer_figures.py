"""Describes what a trainer did and measured before a checkpoint, for people (format §4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import Field

from recpoint.format.records import HexFloat, Part

__all__ = ["CacheUse", "CheckedStripes", "CopiedAhead", "MeasuredLoss", "check_copied_ahead"]

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Positive = Annotated[int, Field(ge=1, lt=2**63)]


class CopiedAhead(Part):
    """Rows that a trainer copied before the stall of a checkpoint, and in it, with row states.

    A row that changed after it was copied was copied once more, and counts twice.
    """

    rows_before: _Positive
    bytes_before: _Positive
    rows_in_stall: _Count
    bytes_in_stall: _Count

    @property
    def share_before(self) -> float:
        """The share of the copied rows that were copied before the stall; above 0 up to 1."""
        return self.rows_before / (self.rows_before + self.rows_in_stall)


class MeasuredLoss(Part):
    """What rounding costs in loss, as a trainer had measured it by the cut; costs are shares of it.

    Attributes:
        increase: the most that it may cost.
        price: what one bit may cost; None: rows have one width.
        low, high: bounds of the cost, as shown for what is stored; both None: nothing was shown.
        predicted: cost by importances and errors; None: it was not computed for this price.
        batches: batches measured so far.
    """

    increase: HexFloat
    price: HexFloat | None
    low: HexFloat | None
    high: HexFloat | None
    predicted: HexFloat | None
    batches: _Count


class CacheUse(Part):
    """What the cache of a trainer's tables did since the checkpoint before, or since the start.

    Attributes:
        hits, misses: ids looked up whose rows were in their slots, and were not.
        fetched_rows, fetched_bytes: rows that entered a slot; bytes of those that the home had.
        written_rows, written_bytes: rows that were written back.
        wait_us: how long training waited for rows, in microseconds.
        window: batches that were planned ahead at the cut.
    """

    hits: _Count
    misses: _Count
    fetched_rows: _Count
    fetched_bytes: _Count
    written_rows: _Count
    written_bytes: _Count
    wait_us: _Count
    window: _Count

    @classmethod
    def joined(cls, found: Iterable[Self | None]) -> Self | None:
        """Return the sums of what several ranks' caches did, and the largest of their windows."""
        uses = [use for use in found if use is not None]
        if not uses:
            return None
        sums = {name: sum(getattr(use, name) for use in uses) for name in cls.model_fields}
        return cls(**sums | {"window": max(use.window for use in uses)})


class CheckedStripes(Part):
    """What a trainer found when it compared rows of embedding servers with their parity.

    It compared the stripes of the rows that the checkpoint took from the servers, after its cut.
    One stripe that did not fit would have ended the checkpoint.

    Attributes:
        fits: comparisons of a stripe, all of whose members fit each other.
        unknown: stripes that could not be compared, such as those of a server that was recovered.
    """

    fits: _Count
    unknown: _Count

    @classmethod
    def joined(cls, found: Iterable[Self | None]) -> Self | None:
        """Return the sums of what several ranks, or several checkpoints, found."""
        checks = [check for check in found if check is not None]
        if not checks:
            return None
        fits, unknown = sum(check.fits for check in checks), sum(check.unknown for check in checks)
        return cls(fits=fits, unknown=unknown)


def check_copied_ahead(copied: CopiedAhead | None, parts: int) -> None:
    """Check that no row was copied ahead if there are several parts, which cannot say so.

    Raises:
        ValueError: rows were.
    """
    if copied is not None and parts > 1:
        raise ValueError(f"rows copied ahead, of a checkpoint of {parts} parts")
