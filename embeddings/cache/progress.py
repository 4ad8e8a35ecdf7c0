"""Says at which batch a cache is, and counts what it has done."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["CacheStats", "Progress"]


@dataclass(kw_only=True)
class CacheStats:
    """What a cache has done since it was made.

    Attributes:
        batches: batches that were handed out.
        unplanned: batches for which there was no room before they were handed out.
        hits: ids looked up whose rows were in their slots.
        misses: ids looked up whose rows were not: no plan had them, because they belong to an
            evaluation, to a batch that the reader did not give, or to an unplanned one.
        fetched_rows: rows that entered a slot.
        written_rows: rows that were written back.
        fetched_bytes: bytes of rows and row states that came from the home. Rows that were never
            written come from nowhere: their first values are computed.
        written_bytes: bytes of rows and row states that were written back.
        waits: batches and lookups for which training waited.
        wait_seconds: how long it waited for them.
        window: batches that are planned and were not handed out yet.
        reduced_rows: rows of this trainer for which other trainers had gradients, too, counted for
            each step.
        reduced_at_once: those that the step waited for, because the next batch looks them up.
        lost_servers: embedding servers whose rows are being recovered; rank 0 counts them.
        lost_rows: rows and parity rows of these servers that are left to recover.
    """

    batches: int = 0
    unplanned: int = 0
    hits: int = 0
    misses: int = 0
    fetched_rows: int = 0
    written_rows: int = 0
    fetched_bytes: int = 0
    written_bytes: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    window: int = 0
    reduced_rows: int = 0
    reduced_at_once: int = 0
    lost_servers: int = 0
    lost_rows: int = 0


@dataclass(kw_only=True)
class Progress:
    """At which batch training is, and how far batches are planned.

    Attributes:
        batch: number of the batch that training is at; 1: before the first.
        planned: number of the last batch that is planned.
        expected: number of the last batch whose rows are known; `planned` or more.
        stats: what the cache has done.
    """

    batch: int = 1
    planned: int = 1
    expected: int = 1
    stats: CacheStats = field(default_factory=CacheStats)

    def plan_next(self) -> None:
        """Take note that the batch after `planned` is planned."""
        self.planned += 1
        self.expected = max(self.expected, self.planned)

    def forget_plans(self) -> None:
        """Take note that no batch after `batch` is planned."""
        self.planned = self.expected = self.batch

    def begin_anew(self) -> None:
        """Take note that no batch was handed out."""
        self.batch = self.planned = self.expected = 1
