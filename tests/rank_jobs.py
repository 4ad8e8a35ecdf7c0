"""Stages the jobs of all ranks of a trainer for tests, cut from whole tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from recpoint.catalog.run.run import Run
from recpoint.format.naming import shared_attempt
from recpoint.format.records import CheckpointRef
from tests.catalog_builder import Table
from tests.job_builder import Links, stage

__all__ = ["RankJobs"]


class RankJobs:
    """A trainer of several ranks, with row-wise shards of each table and a state for each rank.

    Args:
        run: to which the checkpoints will belong; its newest generation is the trainer's.
        stagings: the staging area of each rank; ranks on one host share one.
        tables: the whole tables, which the ranks train together.
        shares: for each table, the number of rows of each rank, in order; None: nearly equal.
    """

    def __init__(
        self,
        run: Run,
        stagings: Sequence[Path],
        tables: Sequence[Table],
        shares: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.run, self.stagings, self.tables = run, list(stagings), list(tables)
        self.ranks = len(self.stagings)
        self.generation = run.generation_numbers()[-1]
        self._token = run.generation(self.generation).token
        self._links = [Links() for _ in self.stagings]
        self._shares = shares or [
            [(rank + 1) * table.rows // self.ranks - rank * table.rows // self.ranks
             for rank in range(self.ranks)]
            for table in tables
        ]  # fmt: skip

    def shards(self, rank: int) -> list[tuple[int, int]]:
        """Returns, for each table, the first row and the number of rows that a rank holds."""
        return [
            (sum(shares[:rank]) if shares[rank] else 0, shares[rank]) for shares in self._shares
        ]

    def attempt(self, step: int) -> str:
        """Returns the attempt of a step's checkpoint, which all ranks share."""
        return shared_attempt(self._token, step, cut=step)

    def ref(self, step: int) -> CheckpointRef:
        """Returns the reference to a step's checkpoint."""
        return CheckpointRef(step=step, generation=self.generation, attempt=self.attempt(step))

    def stage(
        self,
        step: int,
        *,
        dirty: Sequence[Tensor | None] | None = None,
        only: Sequence[int] | None = None,
        samples: int = 0,
        slot: int = 0,
    ) -> list[Path]:
        """Stages a checkpoint: a full at first, then increments with the rows `dirty`.

        Args:
            step: batches trained.
            dirty: ids in the whole tables; None: all rows.
            only: the ranks that stage; None: all ranks.
            samples: see `job_builder.stage`.
            slot: index of each rank's slot.
        """
        return [
            stage(
                self.run,
                self.stagings[rank],
                self.tables,
                step=step,
                generation=self.generation,
                links=self._links[rank],
                dirty=dirty,
                state={"rank": rank, "step": step},
                slot=slot,
                samples=samples,
                attempt=self.attempt(step),
                rank=rank,
                ranks=self.ranks,
                shards=self.shards(rank),
            )
            for rank in (range(self.ranks) if only is None else only)
        ]
