"""Stages the jobs of all ranks, and of embedding servers, for tests, cut from whole tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from recpoint.catalog.run.run import Run
from recpoint.format.manifest import CacheUse
from recpoint.format.naming import shared_attempt
from recpoint.format.records import CheckpointRef
from tests.catalog_builder import Table
from tests.job_builder import Links, stage

__all__ = ["RankJobs", "ServerJobs"]


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
        """Return, for each table, the first row and the number of rows that a rank holds."""
        return [
            (sum(shares[:rank]) if shares[rank] else 0, shares[rank]) for shares in self._shares
        ]

    def attempt(self, step: int) -> str:
        """Return the attempt of a step's checkpoint, which all ranks share."""
        return shared_attempt(self._token, step, cut=step)

    def ref(self, step: int) -> CheckpointRef:
        """Return the reference to a step's checkpoint."""
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
        """Stage a checkpoint: a full at first, then increments with the rows `dirty`.

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


class ServerJobs:
    """A trainer of one rank whose first table is on embedding servers, which stage its rows.

    Row r is on server r modulo their number. All other tables are the rank's.

    Args:
        run: to which the checkpoints will belong; its newest generation is the trainer's.
        stagings: the staging area of the rank, then of each server.
        tables: the whole tables.
    """

    def __init__(self, run: Run, stagings: Sequence[Path], tables: Sequence[Table]) -> None:
        self.run, self.stagings, self.tables = run, list(stagings), list(tables)
        self.servers = len(self.stagings) - 1
        self.generation = run.generation_numbers()[-1]
        self.links = [Links() for _ in self.stagings]

    def rows_of(self, server: int) -> Tensor:
        """Return the ids of the rows that a server holds, counted from 0."""
        return torch.arange(server, self.tables[0].rows, self.servers)

    def stage(
        self,
        step: int,
        *,
        dirty: Sequence[Tensor] | None = None,
        samples: int = 0,
        slot: int = 0,
        held: dict[int, Tensor] | None = None,
        cache: CacheUse | None = None,
    ) -> list[Path]:
        """Stage a checkpoint: of the rank, then of each server.

        Args:
            step: batches trained.
            dirty: ids in the whole tables; None: all rows.
            samples: see `job_builder.stage`; the rank samples the servers' table too.
            slot: index of the slot of each part.
            held: for some servers, other rows than `rows_of` gives.
            cache: what the rank's cache did.
        """
        shards = [(0, 0), *((0, table.rows) for table in self.tables[1:])]
        none = [torch.empty(0, dtype=torch.int64) for _ in self.tables[1:]]
        paths = []
        for number, staging in enumerate(self.stagings):
            of_server = number - 1
            rows = (held or {}).get(of_server, self.rows_of(of_server) if number else None)
            paths.append(
                stage(
                    self.run,
                    staging,
                    self.tables,
                    step=step,
                    generation=self.generation,
                    links=self.links[number],
                    dirty=dirty,
                    state={"step": step},
                    slot=slot,
                    samples=samples,
                    attempt=f"{step:032x}",
                    rank=number,
                    servers=self.servers,
                    shards=shards,
                    held=None if rows is None else [rows, *none],
                    cache=None if number else cache,
                )
            )
        return paths
