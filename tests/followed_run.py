"""Builds a run for a follower, and checks bit for bit what the follower serves."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from recpoint import Follower
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.run import validations
from recpoint.catalog.run.run import Run
from recpoint.format.manifest import Manifest
from recpoint.format.validation import ValidationRecord
from tests.catalog_builder import Table, build, publish

__all__ = ["Trainer", "require", "validated"]


@dataclass
class Trainer:
    """Commits checkpoints, and remembers the tables at each."""

    run: Run
    tables: list[Table]
    generation: int = 1
    made: list[Manifest] = field(default_factory=list)
    at: dict[int, list[Tensor]] = field(default_factory=dict)
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def commit(self, step: int, *, full: bool = False, parent: Manifest | None = None) -> Manifest:
        """Train some rows and publish a checkpoint; its parent is the newest by default."""
        if parent is None and self.made and not full:
            parent = self.made[-1]
        dirty = []
        for table in self.tables:
            ids = (torch.rand(table.rows, generator=self.random) < 0.3).nonzero().flatten()
            table.train(ids, self.random)
            dirty.append(ids)
        dense = {"top.weight": torch.full((2, 2), float(step))}
        checkpoint = build(
            self.run,
            self.tables,
            step=step,
            generation=self.generation,
            parent=parent,
            dirty=dirty if parent else None,
            state={"model": {"tensors": dense, "extra": {}}},
        )
        self.made.append(publish(self.run, checkpoint))
        target = MemoryTarget()
        restore(self.run, target, Selection(step=step, generation=self.generation))
        self.at[step] = [target.tables[table.name].values for table in self.tables]
        return self.made[-1]


def require(follower: Follower, trainer: Trainer, step: int) -> None:
    """Require that the follower serves this step, bit for bit, dense layers too."""
    with follower.reading() as version:
        assert version.step == step
        assert bool((version.dense["top.weight"] == step).all())
        for table, values in zip(trainer.tables, trainer.at[step], strict=True):
            looked_up = version.lookup(table.name, torch.arange(table.rows))
            assert torch.equal(looked_up.view(torch.uint8), values.view(torch.uint8))


def validated(run: Run, manifest: Manifest, result: str) -> None:
    """Record the result of a validation of a sample: `passed`, or `failed` for one row."""
    finding = {"subject": "items", "row": 1, "what": "values"}
    finding |= {"found": "1", "expected": "2", "bound": "0"}
    record = ValidationRecord.model_validate(
        {
            "run": run.id,
            "checkpoint": manifest.ref.model_dump(),
            "level": "sample",
            "result": result,
            "links_read": 1,
            "chunks_read": 1,
            "bytes_read": 1,
            "rows_compared": 1,
            "worst_ppm": 0,
            "digests": [],
            "findings": [] if result == "passed" else [finding],
            "more_findings": 0,
            "evaluated_by": "",
            "started_ms": 1,
            "finished_ms": 2,
            "writer": "test",
        },
        strict=False,
    )
    validations.add_record(run, record)
