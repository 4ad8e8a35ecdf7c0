"""Executes a retention: mark, wait for the grace, delete, sweep.

The steps are those of format §6.6; `catalog.retention.keep` decides what is kept. If a retention is
killed, the next one finishes its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recpoint.catalog.retention.delete import Deletions, delete_manifests
from recpoint.catalog.retention.keep import Decision
from recpoint.catalog.retention.plan import PrunePlan
from recpoint.catalog.retention.stored_plan import leave_plan
from recpoint.catalog.retention.sweep import SweepResult, plan_sweep
from recpoint.catalog.retention.sweep import execute as execute_sweep
from recpoint.catalog.run import leases
from recpoint.catalog.run.deletions import (
    TAKE_OVER_SECONDS,
)
from recpoint.catalog.run.facts import OnStep, unwatched
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks, stamp_now
from recpoint.catalog.store.deletes import delete_objects
from recpoint.errors import StoreFull
from recpoint.format.naming import EXPIRED_KEY
from recpoint.format.record_kinds import MARK
from recpoint.format.retention_records import Mark

__all__ = ["PruneResult", "execute"]


@dataclass(frozen=True, kw_only=True)
class PruneResult:
    """The outcome of a retention.

    Attributes:
        marked: keys of manifests that were marked.
        unmarked: keys of manifests whose marks were removed.
        deleted: keys of manifests that were deleted, in this order.
        spared: keys of manifests that were due and are needed now, each with what needs it.
        swept: chunks, uploads and the like that were removed.
    """

    marked: tuple[str, ...]
    unmarked: tuple[str, ...]
    deleted: tuple[str, ...]
    spared: tuple[tuple[str, str], ...]
    swept: SweepResult

    @property
    def removed_bytes(self) -> int:
        """Bytes freed."""
        return self.swept.removed_bytes


def execute(
    run: Run,
    made: PrunePlan,
    *,
    take_over_seconds: float = TAKE_OVER_SECONDS,
    on_step: OnStep = unwatched,
) -> PruneResult:
    """Execute a plan (format §6.6, mark to sweep), and store the plan for people to read.

    If it is killed, the next retention continues.

    Each manifest is checked again before it is deleted: one that is needed now stays.

    Args:
        run: the run.
        made: the plan from `plan_prune`.
        take_over_seconds: how old another retention's announcement must be for this one to finish
            its work; less is safe only if no other retention can be running.
        on_step: called after each object that was marked or removed, in this thread.

    Raises:
        RetentionRefused: another retention is deleting, or this one's announcement is gone.
        StoreFull: there is no room for a mark or the announcement; orphans were removed.
        StoreError: the store refuses or cannot be reached; what was not yet removed stays.
    """
    deletions = Deletions()
    full = made.store_full
    if full is None:
        try:
            leave_plan(run, made)
            _renew_leases_and_marks(run, made)
            _mark(run, (*made.mark, *made.remark), on_step)
            if not made.held:
                deletions = delete_manifests(
                    run, made, take_over_seconds=take_over_seconds, on_step=on_step
                )
        except StoreFull as error:
            full = error
    # The chunks of deleted manifests are orphans now, and old enough. If the store is full, the
    # sweep may make room for the marks: it writes nothing.
    orphans = plan_sweep(
        run,
        grace_seconds=made.orphans.grace_seconds,
        keep=made.orphans.keep,
        spare_newest=True,
        on_step=on_step,
    )
    swept = execute_sweep(run, orphans, on_step=on_step)
    if full is not None:
        raise _store_full(run, full, swept) from full
    return PruneResult(
        marked=tuple(decision.manifest.key for decision in made.mark),
        unmarked=made.unmark,
        deleted=deletions.deleted,
        spared=deletions.spared,
        swept=swept,
    )


def _renew_leases_and_marks(run: Run, made: PrunePlan) -> None:
    """Adopt leases from the future; remove expired leases, and marks of what is kept now."""
    for lease in made.adopt:
        leases.adopt(run, lease)
    unmarked = [EXPIRED_KEY.of(key) for key in made.unmark]
    delete_objects(run.store, [*_expired_still(run, made), *unmarked])


def _expired_still(run: Run, made: PrunePlan) -> list[str]:
    """Return the keys of the expired leases that were not renewed after the plan was made."""
    if not made.expired_leases:
        return []
    stored = leases.read_leases(run, Clocks.read(run.store))
    return [lease.key for lease in stored if not lease.alive and lease.key in made.expired_leases]


def _mark(run: Run, decisions: Sequence[Decision], on_step: OnStep) -> None:
    """Mark manifests one after another, in the order of deletion.

    So if it is killed in between, no marked manifest is needed by one without a mark.
    """
    for number, decision in enumerate(decisions, 1):
        manifest = decision.manifest
        mark = Mark(
            run=run.id,
            manifest=manifest.key,
            attempt=manifest.attempt,
            reason=decision.reason[:1024],
            stamp=stamp_now(),
        )
        run.records(MARK).put(mark, manifest.key)
        on_step("marking", number, len(decisions))


def _store_full(run: Run, error: StoreFull, swept: SweepResult) -> StoreFull:
    """Return the error for a store without room for marks or an announcement, and what to do."""
    count = len(swept.removed)
    next_step = (
        f"recpoint retain {run.url}: there is room now"
        if count
        else "free or add space outside the run, or by hand as docs/how-to/disk-full.md says: "
        f"in the order of recpoint retain {run.url} --dry-run, then recpoint sweep"
    )
    return StoreFull(
        error.subject,
        found=f"{error.found}; {count} orphans were removed, {swept.removed_bytes} bytes",
        expected="room for marks and the announcement, without which nothing else may be deleted",
        next_step=next_step,
    )
