"""Retention, executed: mark, wait for the grace, delete; killed anywhere, finished by the next.

The steps are those of format §6.6; what is kept is decided by `catalog.retention.retention`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

from recpoint.catalog.records import leases
from recpoint.catalog.records.announcement import (
    TAKE_OVER_SECONDS,
    Announcement,
    announce,
    standing,
    take_over,
)
from recpoint.catalog.records.leases import Held
from recpoint.catalog.records.run_facts import OnStep, gather, leased_by, unwatched
from recpoint.catalog.retention.plan_record import leave_plan
from recpoint.catalog.retention.prune_plan import PrunePlan
from recpoint.catalog.retention.retention import Decision, deletion_order, needed_manifests
from recpoint.catalog.runs.representations import Representations, StoredManifest
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import Clocks, stamp_now
from recpoint.catalog.stores.io_scheduler import WriteBudget, WriteScheduler
from recpoint.catalog.sweeping.sweep import SweepResult, plan_sweep
from recpoint.catalog.sweeping.sweep import execute as execute_sweep
from recpoint.errors import RetentionRefused, StoreFull
from recpoint.format.naming import DELETION_KEY, EXPIRED_KEY
from recpoint.format.record_kinds import LEASE, MARK
from recpoint.format.retention_records import Mark

__all__ = ["PruneResult", "execute"]

_AT_ONCE = 8

#: Before so many deletions a retention makes sure that its announcement is still there.
_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class PruneResult:
    """What a retention did.

    Attributes:
        marked: keys of manifests that were marked.
        unmarked: keys of marks that were removed.
        deleted: keys of manifests that were deleted, in this order.
        spared: keys of manifests that turned out to be needed, with what needs them.
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
    """Do what a plan says (format §6.6, T2 to T6), and leave it for people to see.

    Killed anywhere, the next one goes on.

    What is to be deleted is looked at once more before it goes: what has come to be needed since
    the plan was made stays.

    Args:
        run: the run.
        made: of `plan_prune`.
        take_over_seconds: how old another retention's announcement has to be for this one to
            finish its work; less is safe only where no other can be at work.
        on_step: called after each object that was marked or removed, from this thread.

    Raises:
        RetentionRefused: another retention is deleting, or this one's announcement is gone.
        StoreFull: there is no room for a mark or the announcement; orphans were removed.
        StoreError: the store refuses or cannot be reached; what was not yet removed stays.
    """
    deleted: list[str] = []
    spared: dict[str, str] = {}
    full = made.store_full
    if full is None:
        try:
            _mark_and_delete(run, made, deleted, spared, take_over_seconds, on_step)
        except StoreFull as error:
            full = error
    # Their chunks are orphans now, and as old as what they belonged to. Also where the store takes
    # no marks: a sweep writes nothing, and may make the room that they need.
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
        deleted=tuple(deleted),
        spared=tuple(spared.items()),
        swept=swept,
    )


def _mark_and_delete(
    run: Run,
    made: PrunePlan,
    deleted: list[str],
    spared: dict[str, str],
    take_over_seconds: float,
    on_step: OnStep,
) -> None:
    leave_plan(run, made)
    for lease in made.adopt:
        leases.adopt(run, lease)
    _delete_all(run, [*_expired_still(run, made), *(EXPIRED_KEY.of(key) for key in made.unmark)])
    # One after another, in the order in which they may go: killed in between, none is marked that
    # a manifest without a mark needs.
    to_mark = (*made.mark, *made.remark)
    for number, decision in enumerate(to_mark, 1):
        _mark(run, decision)
        on_step("marking", number, len(to_mark))
    if not made.held:
        _delete(run, made, deleted, spared, take_over_seconds, on_step)


def _expired_still(run: Run, made: PrunePlan) -> list[str]:
    """Of the leases that had expired, those that nobody has renewed since."""
    if not made.expired_leases:
        return []
    there = leases.read_leases(run, Clocks.read(run.store))
    return [lease.key for lease in there if not lease.alive and lease.key in made.expired_leases]


def _store_full(run: Run, error: StoreFull, swept: SweepResult) -> StoreFull:
    """What to do about a store that has no room for a mark or an announcement."""
    count = len(swept.removed)
    next_step = (
        f"recpoint retain {run.url}: there is room now"
        if count
        else "free or add space outside the run, or by hand as docs/operations.md says under "
        f"Disk full: in the order of recpoint retain {run.url} --dry-run, then recpoint sweep"
    )
    return StoreFull(
        error.subject,
        found=f"{error.found}; {count} orphans were removed, {swept.removed_bytes} bytes",
        expected="room for marks and the announcement, without which nothing else may go",
        next_step=next_step,
    )


def _mark(run: Run, decision: Decision) -> None:
    manifest = decision.manifest
    mark = Mark(
        run=run.id,
        manifest=manifest.key,
        attempt=manifest.attempt,
        reason=decision.reason[:1024],
        stamp=stamp_now(),
    )
    run.records(MARK).put(mark, manifest.key)


def _delete(
    run: Run,
    made: PrunePlan,
    deleted: list[str],
    spared: dict[str, str],
    take_over_seconds: float,
    on_step: OnStep,
) -> None:
    """Finish what a killed retention has announced, then announce and delete what is doomed."""
    mine = _begin(run, made, take_over_seconds)
    if mine is None:
        return
    announced = set(mine.manifests)
    rest = tuple(key for key in made.delete if key not in announced)
    while True:
        try:
            left = _look_and_delete(run, mine, deleted, spared, on_step)
        except BaseException:
            # The announcement stays: a delete whose answer got lost may still arrive, and nobody
            # may be told meanwhile that what it named is pinned.
            mine.stop()
            raise
        if left is None or not (*left, *rest):
            return
        mine, rest = announce(run, (*left, *rest)), ()


def _begin(run: Run, made: PrunePlan, take_over_seconds: float) -> Announcement | None:
    # Read now and not when the plan was made: who was at work then may have ended since, and
    # another may have begun.
    there = standing(run, Clocks.read(run.store))
    if there is None:
        return announce(run, made.delete) if made.delete else None
    if not made.delete and not there.may_be_taken_over(take_over_seconds):
        return None  # nothing to do beside whoever is at work
    # Of one that cannot be read nobody knows what it named: marks tell what is to go.
    named = made.delete or tuple(row.key for row in made.rows())[:1]
    if not named:
        return None
    mine = take_over(run, there, named, after_seconds=take_over_seconds)
    if there.deletion is None and not made.delete:
        mine.withdraw()
        return None
    return mine


def _look_and_delete(
    run: Run,
    mine: Announcement,
    deleted: list[str],
    spared: dict[str, str],
    on_step: OnStep,
) -> tuple[str, ...] | None:
    """Delete what was announced and is not needed, then the announcement (format T4, T5).

    Returns:
        What there was no time for; None: nothing may be deleted now.
    """
    before = len(deleted)
    while True:
        seen = _find_doomed(run, mine, spared)
        if seen is None:
            _leave(mine)
            return None
        left = _delete_seen(run, mine, seen, deleted, on_step)
        if not left or mine.is_spent:
            break
        # Somebody has come meanwhile: who that is, and what it needs, is looked at anew.
    if left and len(deleted) == before:
        raise RetentionRefused(
            DELETION_KEY,
            found="reading all manifests took so long that the announcement is too old",
            expected="time left to delete in",
            next_step=f"run it nearer to the store: recpoint retain {run.url}",
        )
    _delete_all(run, [EXPIRED_KEY.of(key) for key in set(mine.manifests).difference(left)])
    mine.withdraw()
    return left


class _Present(NamedTuple):
    """Who was there when retention looked: leases, as they were last written, and generations."""

    leases: frozenset[tuple[str, int]]
    generations: frozenset[int]

    @classmethod
    def of(cls, held: Iterable[Held], generations: Iterable[int]) -> Self:
        """What was found by reading all leases, and by listing the generations before that."""
        written = frozenset((lease.key, lease.modified_ms) for lease in held)
        return cls(written, frozenset(generations))

    def anybody_new(self, run: Run) -> bool:
        """Whether there is a lease or a generation that was not; two listings.

        Raises:
            StoreError: the store cannot be listed.
        """
        # Leases first: a trainer gives up its own when its generation is there.
        for _, info in run.records(LEASE).listed():
            if (info.key, info.modified_ms) not in self.leases:
                return True
        return not self.generations.issuperset(run.generation_numbers())


class _Seen(NamedTuple):
    """What a look has found: manifests that nothing needs, as they may go, and who was there."""

    doomed: Sequence[StoredManifest]
    present: _Present


def _find_doomed(run: Run, mine: Announcement, spared: dict[str, str]) -> _Seen | None:
    """Which of the announced manifests nothing needs (format T4); None: nothing may go now."""
    announced = mine.manifests
    facts = gather(run)
    # After the manifests, which take long to read: who comes meanwhile is seen.
    held = leases.read_leases(run, Clocks.read(run.store))
    alive = [lease for lease in held if lease.alive]
    if any(lease.covers is None for lease in alive):
        return None
    if facts.unreadable:
        spared.update((key, f"{facts.unreadable[0]} cannot be read") for key in announced)
        return None
    needed = needed_manifests(replace(facts, leased=leased_by(alive)), frozenset(announced))
    spared.update(needed)
    there = {manifest.key: manifest for manifest in facts.manifests}
    doomed = [there[key] for key in announced if key in there and key not in needed]
    doomed.sort(key=deletion_order(Representations(facts.manifests, facts.verdicts)))
    return _Seen(doomed, _Present.of(held, facts.generations))


def _delete_seen(
    run: Run, mine: Announcement, seen: _Seen, deleted: list[str], on_step: OnStep
) -> tuple[str, ...]:
    """Delete manifests (format T5) until time is up or somebody comes; returns what is left."""
    doomed = seen.doomed
    for number, manifest in enumerate(doomed):
        if seen.present.anybody_new(run):
            break
        if number % _BATCH == 0:
            mine.require_standing()
        # Last: whatever the store took its time for, no deletion begins when time is up.
        if mine.is_spent:
            break
        run.store.delete(manifest.key)
        deleted.append(manifest.key)
        on_step("deleting manifests", number + 1, len(doomed))
    else:
        return ()
    return tuple(manifest.key for manifest in doomed[number:])


def _leave(mine: Announcement) -> None:
    """Delete nothing now: what nobody has begun need not stay announced."""
    if mine.taken_over:
        mine.stop()  # it may have gone half its way
    else:
        mine.withdraw()


def _delete_all(run: Run, keys: list[str]) -> None:
    """Delete objects in any order, several at once."""
    with WriteScheduler(WriteBudget(_AT_ONCE)) as writes:
        for key in keys:
            writes.begin(writes.reserve(0), partial(run.store.delete, key))
        writes.finish()
