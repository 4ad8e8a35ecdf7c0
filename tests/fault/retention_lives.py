"""What retention meets: processes that retain, pin, commit and restore, and can be killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.plan import plan_prune
from recpoint.catalog.retention.prune import execute
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.run import pins, publications
from recpoint.catalog.run.leases import reading
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.manifest import Manifest
from recpoint.format.naming import ManifestName
from recpoint.testing import die_at
from tests.catalog_builder import build, publish, tables
from tests.fault.lives import besides_of

__all__ = [
    "add",
    "filled",
    "pin_life",
    "publish_life",
    "reader_life",
    "retain_life",
    "retain_once",
    "retention_life",
    "trainer_life",
]


def retain_once(run: Run, last: int) -> None:
    """Mark and delete at once, and finish at once what a killed one began: nobody else retains."""
    policy = RetentionPolicy(keep_last=last, require_validated=False)
    made = plan_prune(run, policy, grace_seconds=0.0, grace_floor_seconds=0.0)
    execute(run, made, take_over_seconds=0.0)


def retain_life(
    *, url: str, last: int = 1, die: int | None = None, count_into: str | None = None
) -> None:
    """Retain twice: what the first marks, the second deletes."""
    die_at.install(die_at=die, count_into=count_into, besides=besides_of(url))
    run = Run.open(open_store(url))
    for _ in range(2):
        retain_once(run, last)


def filled(url: str, *, links: int = 3) -> Run:
    """A chain of `links`, the last of which is merged too, and a full that makes it unneeded."""
    run = Run.create(open_store(url))
    run.claim(None)
    parent: Manifest | None = None
    for step in range(10, 10 + 10 * links, 10):
        parent = add(run, step, parent)
    consolidate(run, plan_consolidation(run, ManifestName(10 * links, 1)))
    add(run, 40, None)
    return run


def add(run: Run, step: int, parent: Manifest | None) -> Manifest:
    """Commit a full, or an increment on `parent`."""
    dirty = None if parent is None else [torch.tensor([step % 40]), torch.tensor([0])]
    made = build(run, tables(seed=step), step=step, generation=1, parent=parent, dirty=dirty)
    return publish(run, made)


def pin_life(*, url: str, die: int | None = None, count_into: str | None = None) -> None:
    """Pin the checkpoint at step 20."""
    die_at.install(die_at=die, count_into=count_into, besides=besides_of(url))
    pins.pin(Run.open(open_store(url)), ManifestName(20, 1))


def publish_life(*, url: str, step: int, die: int | None = None) -> None:
    """Publish the checkpoint at `step`."""
    die_at.install(die_at=die)
    publications.publish(Run.open(open_store(url)), ManifestName(step, 1))


def trainer_life(*, url: str, checkpoints: int) -> None:
    """Commit checkpoints as fast as it goes: a full, then three increments, and so on."""
    run = Run.open(open_store(url))
    parent: Manifest | None = None
    for step in range(1, checkpoints + 1):
        parent = add(run, step, None if step % 4 == 1 else parent)


def retention_life(*, url: str, until: str) -> None:
    """Retain without a grace until the file `until` is there."""
    run = Run.open(open_store(url))
    while not os.path.exists(until):
        if run.manifest_names():
            retain_once(run, 2)


def reader_life(*, url: str, until: str, evidence: str) -> None:
    """Restore whenever there is a newer checkpoint, each time under a lease."""
    run = Run.open(open_store(url))
    seen: list[dict[str, Any]] = []
    last: list[ManifestName] = []
    while not os.path.exists(until):
        newest = run.live_line()[:1]
        if newest == last:
            continue
        last = newest
        with reading(run, purpose="restore") as lease:
            line = run.live_line()
            report = restore(run, MemoryTarget())
            seen.append(
                {
                    "leased": lease is not None,
                    "step": report.restored.step,
                    "newest_before": line[0].step,
                    "skipped": [str(skipped) for skipped in report.skipped],
                }
            )
    Path(evidence).write_text(json.dumps(seen))
