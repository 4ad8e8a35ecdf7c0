"""Builds a small run that has a record of every kind, and chunks of every kind."""

from __future__ import annotations

from pathlib import Path

import torch

from recpoint.catalog.check.validate import record, validate
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.persist import persist
from recpoint.catalog.run import deletions, leases, metrics, pins, publications
from recpoint.catalog.run.ends import tell_ended
from recpoint.catalog.run.rejections import leave_rejection
from recpoint.catalog.run.run import Run
from recpoint.errors import RanksMissing
from recpoint.format.naming import MANIFEST_KEY, ManifestName, parse_chunk_name
from recpoint.format.record_kinds import kind_of
from recpoint.format.records import CheckpointRef
from recpoint.format.rejections import Rejection
from tests.catalog_builder import Table, new_run
from tests.job_builder import Links, stage
from tests.rank_jobs import RankJobs
from tests.retained_run import LAST, retain

__all__ = ["STEPS", "every_record", "kind_name"]

#: The steps of the run's checkpoints. Step 30 has a consolidated manifest too.
STEPS = (10, 20, 30, 40)

_SAMPLES = 4


def every_record(folder: Path) -> Run:
    """Make a run of one table with a full, increments, and a record of every kind.

    Args:
        folder: gets the run, and the staging areas that it came from.
    """
    run = new_run(folder / "run")
    run.claim(None)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(24, 4, generator=generator)
    tables = [Table("items", values, (torch.rand(24, generator=generator),), bits=4)]
    links = Links()
    for step in STEPS:
        if step == STEPS[-1]:  # a second trainer goes on from step 30
            tell_ended(run, 1, step=30, reason="terminated")
            run.claim(run.manifest(30, 1).ref)
        dirty = None
        if links.parent is not None:
            ids = torch.randperm(24, generator=generator)[:6].sort().values
            tables[0].train(ids, generator)
            dirty = [ids]
        job = stage(
            run,
            folder / "staging",
            tables,
            step=step,
            generation=run.generation_numbers()[-1],
            links=links,
            dirty=dirty,
            state={"step": step, "top": torch.full((3,), float(step))},
            samples=_SAMPLES,
        )
        outcome = persist.persist_job(job)
        assert outcome.result == "committed", outcome.error
    consolidate(run, plan_consolidation(run, ManifestName(30, 1)))
    _beside(run, folder, tables)
    return run


def _beside(run: Run, folder: Path, tables: list[Table]) -> None:
    """Write the records that no restore needs."""
    record(run, validate(run, ManifestName(30, 1), level="full"))
    pins.pin(run, ManifestName(20, 1), label="release-7", who="ann@desk", why="served")
    metrics.record_metric(run, ManifestName(20, 1), "auc", 0.8125)
    publications.publish(run, ManifestName(30, 1), held=False, who="ann@desk", why="the newest")
    # Marks the own manifest of step 30, and leaves the plan.
    retain(run, LAST, grace=3600.0)
    replaced = CheckpointRef(step=35, generation=1, attempt="0c" * 16)
    leave_rejection(
        run,
        0,
        Rejection(checkpoint=replaced, error_type="StaleWriter", error="replaced", rejected_ms=1),
    )
    leases.HeldLease(run, purpose="restore", covers=[run.manifest(40, 2).ref])
    deletions.announce(run, (MANIFEST_KEY.of(35, 1),))
    job = RankJobs(run, [folder / "rank-0", folder / "rank-1"], tables).stage(
        50, only=[1], samples=_SAMPLES
    )
    try:
        persist.persist_job(job[0])
    except RanksMissing:  # rank 0 has stored nothing: the part stays
        pass


def kind_name(key: str) -> str:
    """Return the kind of an object, for tables: of a record, or of a chunk by its content."""
    if parse_chunk_name(key) is not None:
        content = key.rpartition("/")[2].split("-")[1]
        return f"chunk: {'rows' if content.startswith('t') else content}"
    kind = kind_of(key)
    assert kind is not None, key
    return str(kind.model.model_fields["format"].default).removeprefix("recpoint/")
