"""Builds runs with two chains for tests of retention, and sets the times of their objects."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.plan import PrunePlan, plan_prune
from recpoint.catalog.retention.prune import PruneResult, execute
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.run import leases
from recpoint.catalog.run.deletions import TAKE_OVER_SECONDS
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks, Store, now_ms
from recpoint.format.manifest import Manifest
from recpoint.format.naming import DELETION_KEY, EXPIRED_KEY, MANIFEST_KEY, ManifestName
from recpoint.format.records import pack_record, unpack_record
from recpoint.format.retention_records import Deletion, Mark, Stamp
from tests.catalog_builder import build, publish, tables

__all__ = [
    "HOUR",
    "LAST",
    "add",
    "age_file",
    "consolidated",
    "filled",
    "keys",
    "make_announcement_old",
    "make_old",
    "named",
    "planned",
    "require_tidy",
    "retain",
    "rewrite_lease",
    "rewrite_mark",
    "steps",
    "values",
]

HOUR = 3600.0
LAST = RetentionPolicy(keep_last=1, require_validated=False)


def filled(store: Store) -> Run:
    """Make a run with two chains of checkpoints: steps 10, 20, 30 and steps 40, 50."""
    run = Run.create(store)
    run.claim(None)
    parent: Manifest | None = None
    for step in (10, 20, 30):
        parent = add(run, step, parent)
    parent = None
    for step in (40, 50):
        parent = add(run, step, parent)
    return run


def add(run: Run, step: int, parent: Manifest | None, *, generation: int = 1) -> Manifest:
    dirty = None if parent is None else [torch.tensor([1, 2]), torch.tensor([0])]
    draft = build(
        run, tables(seed=step), step=step, generation=generation, parent=parent, dirty=dirty
    )
    return publish(run, draft)


def planned(
    run: Run, policy: RetentionPolicy = LAST, *, grace: float = 0.0, ask_store: bool = True
) -> PrunePlan:
    return plan_prune(
        run, policy, grace_seconds=grace, grace_floor_seconds=0.0, ask_store=ask_store
    )


def retain(run: Run, policy: RetentionPolicy = LAST, *, grace: float = 0.0) -> PruneResult:
    return execute(run, planned(run, policy, grace=grace))


def steps(run: Run) -> list[int]:
    return [name.step for name in run.manifest_names()]


def keys(run: Run) -> set[str]:
    return {info.key for info in run.store.list()}


def named(run: Run, step: int) -> str:
    return MANIFEST_KEY.of(step, 1)


def require_tidy(run: Run, expected_steps: list[int]) -> None:
    """Require exactly these checkpoints, that all restore, and that no other object is left."""
    assert steps(run) == expected_steps
    report = check(run, level="full")
    assert report.ok and report.findings == ()
    records = {"run.json", "generations/00000001.json", "retention.json"}
    records |= {named(run, step) for step in expected_steps}
    chunks = {c.key for step in expected_steps for c in run.manifest(step, 1).chunks}
    assert keys(run) == records | chunks


def consolidated(run: Run, step: int) -> None:
    consolidate(run, plan_consolidation(run, ManifestName(step, 1)))


def values(run: Run, step: int) -> list[torch.Tensor]:
    """Restore a checkpoint; return the values and row states of every table."""
    target = MemoryTarget()
    restore(run, target, Selection(step=step))
    tables = [target.tables[name] for name in sorted(target.tables)]
    parts = [part for table in tables for part in (table.values, *table.row_states)]
    return [part for part in parts if part is not None]


def age_file(run: Run, key: str, seconds: float) -> None:
    time_s = time.time() - seconds
    os.utime(Path(run.url) / key, (time_s, time_s))


def rewrite_mark(run: Run, step: int, **changes: object) -> None:
    key = EXPIRED_KEY.of(named(run, step))
    mark = unpack_record(Mark, run.store.get(key, max_bytes=1 << 20), name=key, next_step="")
    run.store.put(key, pack_record(mark.model_copy(update=changes)))


def rewrite_lease(run: Run, held: leases.Held, stamp: Stamp) -> None:
    assert held.lease is not None
    run.store.put(held.key, pack_record(held.lease.model_copy(update={"stamp": stamp})))


def make_announcement_old(
    run: Run, *, seconds: float = TAKE_OVER_SECONDS + 60, stamp: bool = True, file: bool = True
) -> None:
    """Make the announcement so old, by its stamp, by the store's time or both."""
    data = run.store.get(DELETION_KEY, max_bytes=1 << 20)
    announcement = unpack_record(Deletion, data, name=DELETION_KEY, next_step="")
    written_ms = int(now_ms() - (1000 * seconds if stamp else 0))
    old_stamp = Stamp(written_ms=written_ms, boot=None, boot_ms=0)
    run.store.put(DELETION_KEY, pack_record(announcement.model_copy(update={"stamp": old_stamp})))
    if file:
        age_file(run, DELETION_KEY, seconds)


def make_old(run: Run, seconds: float, *, boot: bool = True, files: bool = True) -> None:
    """Make every mark so old, by the wall clock and the other clocks that are asked for."""
    clocks = Clocks.read()
    for info in list(run.store.list("expired/")):
        data = run.store.get(info.key, max_bytes=1 << 20)
        mark = unpack_record(Mark, data, name=info.key, next_step="")
        stamp = Stamp(
            written_ms=int(clocks.wall_ms - 1000 * seconds),
            boot=None if boot else clocks.boot,
            boot_ms=0 if boot else clocks.boot_ms,
        )
        run.store.put(info.key, pack_record(mark.model_copy(update={"stamp": stamp})))
        if files:
            age_file(run, info.key, seconds)
