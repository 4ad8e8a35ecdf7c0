"""Measures retention over 10,000 checkpoints: the plan against one listing of the run's store.

The run of many weeks lies on a local disk: a checkpoint every ten minutes with three chunks, and
every fiftieth is a full. Each manifest has the time at which such a run would have stored it,
because rules of time use that time too. Measured are: one listing of everything; the plan (which
rules keep which checkpoints, what these need, a reason for each manifest) from known facts; and the
reading of those facts, which reads every manifest. All objects are small, because their contents do
not matter.
"""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.report import Report, alternate, ratio
from recpoint.catalog.retention.keep import plan
from recpoint.catalog.retention.rules import BestBy, RetentionPolicy
from recpoint.catalog.run.facts import gather
from recpoint.catalog.run.representations import Representations, RunFacts
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.local import LocalStore
from recpoint.format.manifest import Manifest
from recpoint.format.naming import METRIC_KEY, ManifestName, attempt_prefix
from recpoint.format.records import pack_record
from recpoint.format.retention_records import Metric
from tests.catalog_builder import build, tables

__all__ = ["KEYS", "run"]

KEYS = ("plan_seconds_10k", "vs_listing", "reading_seconds")

_FULL_EVERY = 50
_POLICY = RetentionPolicy(
    keep_last=20,
    keep_within_seconds=2 * 86400,
    keep_hourly=48,
    keep_daily=30,
    keep_weekly=12,
    keep_monthly=12,
    best_by=(BestBy("auc", "max", 5),),
    require_validated=False,
)


def run(*, smoke: bool) -> Report:
    """Measure listing, plan and facts, after the gate."""
    count = 600 if smoke else 10_000
    report = Report(
        name="retention", columns=("checkpoints", "objects", "listing s", "plan s", "reading s")
    )
    with tempfile.TemporaryDirectory(prefix="recpoint-retention-") as folder:
        run = _run(Path(folder) / "run", count)
        objects = sum(1 for _ in run.store.list())
        facts = gather(run, metrics=["auc"])
        _gate(facts, count)
        listing, planning = alternate(
            3 if smoke else 7,
            lambda: sum(1 for _ in run.store.list()),
            lambda: plan(facts, _POLICY),
        )
        (reading,) = alternate(2 if smoke else 3, lambda: gather(run, metrics=["auc"]))
    report.rows.append(
        (
            count,
            objects,
            report.timed("listing", listing),
            report.timed("plan", planning),
            report.timed("reading", reading),
        )
    )
    report.put("plan_seconds_10k", report.times["plan"])
    report.put("vs_listing", ratio(planning, listing))
    report.put("reading_seconds", report.times["reading"])
    report.notes = [
        "vs_listing: the plan alone, from known facts, over one listing of the whole store; "
        "reading the facts: every manifest, eight at a time, which each retention does, and its "
        "sweep once more"
    ]
    return report


def _gate(facts: RunFacts, count: int) -> None:
    """Check that the plan keeps what its rules say, and that everything it keeps restores.

    The rules are evaluated here again, in the plainest way, on the times that trainers stamped.
    """
    plan_made = plan(facts, _POLICY)
    whole = all(manifest.whole and manifest.state_whole for manifest in facts.manifests)
    if len(facts.manifests) != count or not whole:
        raise AssertionError("the run is not what was written")
    dropped_keys = {decision.manifest.key for decision in plan_made.dropped}
    remaining = Representations(
        manifest for manifest in facts.manifests if manifest.key not in dropped_keys
    )
    broken = [name for name in plan_made.kept if remaining.best(name) is None]
    if broken or not 0 < len(dropped_keys) < count:
        raise AssertionError(f"{len(dropped_keys)} dropped; {len(broken)} kept but do not restore")
    expected = _wanted(facts)
    if plan_made.kept.keys() != expected:
        raise AssertionError(
            f"{len(plan_made.kept.keys() - expected)} kept that no rule asks for, "
            f"{len(expected - plan_made.kept.keys())} not kept that one asks for"
        )


def _wanted(facts: RunFacts) -> set[ManifestName]:
    """Return the checkpoints that the rules of `_POLICY` keep."""
    taken_at = {
        manifest.name: datetime.fromtimestamp(manifest.taken_ms / 1e3, UTC)
        for manifest in facts.manifests
    }
    newest_first = sorted(taken_at, reverse=True)
    newest = taken_at[newest_first[0]]
    keep_time = timedelta(seconds=_POLICY.keep_within_seconds)
    kept_names = {*newest_first[: _POLICY.keep_last]}
    kept_names |= {name for name in newest_first if newest - taken_at[name] <= keep_time}
    for count, period in (
        (_POLICY.keep_hourly, "%Y-%m-%d %H"),
        (_POLICY.keep_daily, "%Y-%m-%d"),
        (_POLICY.keep_weekly, "%G-%V"),
        (_POLICY.keep_monthly, "%Y-%m"),
    ):
        latest: dict[str, ManifestName] = {}
        for name in newest_first:
            latest.setdefault(taken_at[name].strftime(period), name)
        kept_names |= {*list(latest.values())[:count]}
    for rule in _POLICY.best_by:
        values = facts.metrics[rule.metric]
        best = sorted(values, key=lambda name: (values[name], name), reverse=True)
        kept_names |= {*best[: rule.count]}
    return kept_names


def _run(directory: Path, count: int) -> Run:
    """Write manifests as an agent does, and chunks with their names and lengths."""
    run = Run.create(LocalStore(directory))
    run.claim(None)
    trained = tables()
    first = build(run, trained, step=0, generation=1, rows_per_chunk=1000).manifest
    dirty = [table.values.new_tensor([1, 2]).long() for table in trained]
    increment = build(
        run,
        trained,
        step=1,
        generation=1,
        parent=first,
        dirty=dirty,
        rows_per_chunk=1000,
    ).manifest
    parent: Manifest | None = None
    for step in range(count):
        parent = _add(directory, step, first if step % _FULL_EVERY == 0 else increment, parent)
        if step % 10 == 0:
            name = ManifestName(step, 1)
            metric = Metric(
                run=run.id,
                checkpoint=parent.ref,
                name="auc",
                value=(0.5 + (step * 7919 % 1000) / 2000).hex(),
                created_ms=parent.snapshot_ms,
            )
            _write(directory / METRIC_KEY.of(*name, "auc"), pack_record(metric))
    return run


def _add(directory: Path, step: int, like: Manifest, parent: Manifest | None) -> Manifest:
    attempt = f"{step:032x}"
    old = attempt_prefix(like.step, 1, like.attempt)
    new = attempt_prefix(step, 1, attempt)
    chunks = tuple(
        chunk.model_copy(update={"key": chunk.key.replace(old, new)}) for chunk in like.chunks
    )
    full = like.kind == "full" or parent is None
    manifest = like.model_copy(
        update={
            "step": step,
            "attempt": attempt,
            "chunks": chunks,
            "parent": None if full or parent is None else parent.ref,
            "base": None if full or parent is None else parent.base or parent.ref,
            "chain_length": 1 if full or parent is None else parent.chain_length + 1,
            "snapshot_ms": like.snapshot_ms + step * 600_000,
        }
    )
    for chunk in chunks:
        _write(directory / chunk.key, bytes(chunk.bytes))
    stored = directory / f"manifests/{step:012d}-00000001.json"
    _write(stored, pack_record(manifest))
    os.utime(stored, ns=(manifest.snapshot_ms * 10**6,) * 2)
    return manifest


def _write(path: Path, data: bytes) -> None:
    # Unlike a store, this does not fsync: durability of forty thousand files does not matter here.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
