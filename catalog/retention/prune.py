"""Plans and executes a retention: marks manifests, waits for the grace, deletes."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, NamedTuple, Self

from recpoint.catalog.retention.keep import (
    Decision,
    RetentionPlan,
    RetentionPolicy,
    deletion_order,
    needed_manifests,
    plan,
)
from recpoint.catalog.retention.sweep import SweepPlan, SweepResult, plan_sweep
from recpoint.catalog.retention.sweep import execute as execute_sweep
from recpoint.catalog.run import leases
from recpoint.catalog.run.deletions import (
    TAKE_OVER_SECONDS,
    Announcement,
    announce,
    standing,
    take_over,
)
from recpoint.catalog.run.facts import OnStep, gather, leased_by, unwatched
from recpoint.catalog.run.leases import Held
from recpoint.catalog.run.pins import read_deletion
from recpoint.catalog.run.representations import Representations, RunFacts, StoredManifest
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks, ObjectInfo, now_ms, stamp_now
from recpoint.catalog.store.scheduler import ReadScheduler, WriteBudget, WriteScheduler
from recpoint.errors import (
    FormatError,
    ObjectNotFound,
    RetentionRefused,
    SettingsError,
    StoreError,
    StoreFull,
)
from recpoint.format.naming import DELETION_KEY, EXPIRED_KEY, PIN_KEY
from recpoint.format.record_kinds import LEASE, MARK, PLAN
from recpoint.format.retention_records import (
    MAX_PLANNED,
    Mark,
    Plan,
    PlannedManifest,
    PlannedRules,
    RuleBest,
)

__all__ = [
    "GRACE_FLOOR_SECONDS",
    "PlanWatch",
    "PrunePlan",
    "PruneResult",
    "execute",
    "leave_plan",
    "marked",
    "plan_prune",
    "require_grace",
]


# Checks the grace: younger objects may still be read or written.


#: Longer than any restore without a lease, and than any upload of a chunk.
GRACE_FLOOR_SECONDS: Final = 3600.0


def require_grace(
    grace_seconds: float, *, floor_seconds: float = GRACE_FLOOR_SECONDS, why: str
) -> None:
    """Refuse a grace that is too short.

    Args:
        grace_seconds: the grace that the caller asked for.
        floor_seconds: the shortest allowed grace.
        why: why it must be that long, for the error.

    Raises:
        SettingsError: the grace is shorter.
    """
    if not grace_seconds >= floor_seconds:
        raise SettingsError(
            "grace_seconds",
            found=str(grace_seconds),
            expected=f"at least {floor_seconds:g}: {why}",
            next_step="give a longer grace; 86400 is a day",
        )


# Reads the marks of manifests that are to be deleted (format §6.6, mark).


def marked(run: Run) -> set[str]:
    """Return the keys of the manifests that have a mark; costs one listing and no reads."""
    return set(run.records(MARK).names())


class Marks:
    """The marks of a run; each is read once.

    Args:
        run: the run.
        clocks: the times of this host and the store, for the marks' ages.
    """

    def __init__(self, run: Run, clocks: Clocks) -> None:
        self._clocks = clocks
        self._infos: dict[str, ObjectInfo] = {}
        self._infos.update(run.records(MARK).listed())
        with ReadScheduler.of_records() as reads:
            read = reads.results(self._infos, partial(_read_mark, run))
            self._marks = dict(zip(self._infos, read, strict=True))

    @property
    def keys(self) -> Iterable[str]:
        """Keys of the manifests that have a mark, readable or not."""
        return self._infos.keys()

    def holds(self, decision: Decision) -> bool:
        """Tell whether this manifest has a mark, not an earlier manifest with the same key."""
        mark = self._marks.get(decision.manifest.key)
        return mark is not None and mark.attempt == decision.manifest.attempt

    def age_seconds(self, manifest: str) -> float:
        """Return the age of a mark that holds, in seconds; negative if it is from the future."""
        mark, info = self._marks[manifest], self._infos[manifest]
        assert mark is not None  # `holds` is true
        return self._clocks.age_seconds(mark.stamp, modified_ms=info.modified_ms)


def _read_mark(run: Run, manifest: str) -> Mark | None:
    try:
        return run.records(MARK).read(manifest)
    except (FormatError, ObjectNotFound):
        return None


# Plans a retention: what to mark, what waits, what to delete (format §6.6, plan to announce).


class Waiting(NamedTuple):
    """A marked manifest whose grace is not over."""

    decision: Decision
    age_seconds: float


class PruneRow(NamedTuple):
    """What a retention does with one manifest; `wait`: it is marked, but not deleted yet."""

    step: int
    generation: int
    key: str
    action: Literal["keep", "mark", "wait", "delete"]
    reason: str
    stored_bytes: int


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """What a retention would do now, found without writing.

    Attributes:
        retention: the manifests to keep and to drop, with the reasons.
        mark: manifests to mark now, newest first.
        unmark: keys of manifests whose marks to remove, because they are kept now or are gone.
        remark: manifests whose marks are from the future and are written anew.
        waiting: marked manifests whose grace is not over.
        delete: keys of manifests to delete now, newest first.
        unfinished: keys of manifests that an earlier retention was deleting when it was killed;
            they are deleted first.
        held: leases that protect everything from deletion.
        expired_leases: keys of leases that were not renewed in time.
        adopt: leases from the future, to be written anew.
        stray_pins: keys of pins of checkpoints that do not exist; nothing removes them.
        orphans: the sweep of objects that no manifest named when the plan was made.
        grace_seconds: how long a manifest stays marked.
        store_full: why the store could not tell its time, if it has no space left. Then no deletion
            is planned that needs the store's clock or another write.
    """

    retention: RetentionPlan
    mark: tuple[Decision, ...]
    unmark: tuple[str, ...]
    remark: tuple[Decision, ...]
    waiting: tuple[Waiting, ...]
    delete: tuple[str, ...]
    unfinished: tuple[str, ...]
    held: tuple[str, ...]
    expired_leases: tuple[str, ...]
    adopt: tuple[leases.Held, ...]
    stray_pins: tuple[str, ...]
    orphans: SweepPlan
    grace_seconds: float
    store_full: StoreFull | None

    def rows(self) -> Iterator[PruneRow]:
        """Yield a row for each manifest, newest first."""
        waiting = {wait.decision.manifest.key: wait.age_seconds for wait in self.waiting}
        delete = {*self.delete, *self.unfinished}
        for manifest, decided, why in self.retention.decisions:
            action: Literal["keep", "mark", "wait", "delete"] = "keep"
            if manifest.key in delete:
                action = "wait" if self.held else "delete"
                why = f"{why}; held by a lease: {self.held[0]}" if self.held else why
            elif manifest.key in waiting:
                action = "wait"
                left = self.grace_seconds - max(0.0, waiting[manifest.key])
                why = f"{why}; marked, {left / 3600:.1f} h of grace are left"
            elif decided == "drop":
                action = "mark"
            yield PruneRow(*manifest.name, manifest.key, action, why, manifest.stored_bytes)


def plan_prune(
    run: Run,
    policy: RetentionPolicy,
    *,
    grace_seconds: float,
    keep: Collection[str] = (),
    ask_store: bool = True,
    grace_floor_seconds: float = GRACE_FLOOR_SECONDS,
    on_step: OnStep = unwatched,
) -> PrunePlan:
    """Plan a retention: find what can be deleted; nothing is changed.

    Args:
        run: the run.
        policy: the rules.
        grace_seconds: how long a manifest stays marked, and the least age of orphans to remove.
        keep: attempts of jobs in a staging area, which an agent will finish.
        ask_store: ask the store for its time, which writes and removes a small object. Without it
            nothing is written, but a store whose clock is behind is not noticed.
        grace_floor_seconds: refuse a shorter grace.
        on_step: called after each manifest that was read, in this thread.

    Raises:
        SettingsError: the grace is below the floor.
        RetentionRefused, NothingValidated: see `recpoint.catalog.retention.keep.plan`.
        FormatError, GenerationRecordLost: the live line cannot be followed.
        StoreError: the store cannot be read.
    """
    why = "readers without a lease may take that long"
    require_grace(grace_seconds, floor_seconds=grace_floor_seconds, why=why)
    store_full: StoreFull | None = None
    try:
        clocks = Clocks.read(run.store if ask_store else None)
    except StoreFull as error:
        store_full, clocks = error, Clocks.read()
    held = leases.read_leases(run, clocks)
    alive = [lease for lease in held if lease.alive]
    metrics = [rule.metric for rule in policy.best_by]
    facts = gather(run, metrics=metrics, leases=alive, on_step=on_step)
    retention = plan(facts, policy)
    marks = Marks(run, clocks)
    dropped = {decision.manifest.key: decision for decision in retention.dropped}
    marked = {key: decision for key, decision in dropped.items() if marks.holds(decision)}
    ages = {key: marks.age_seconds(key) for key in marked}
    deletion = _unfinished(run)
    return PrunePlan(
        retention=retention,
        mark=tuple(decision for key, decision in dropped.items() if key not in marked),
        unmark=tuple(key for key in marks.keys if key not in marked),
        remark=tuple(marked[key] for key, age in ages.items() if age < 0),
        waiting=tuple(
            Waiting(marked[key], age) for key, age in ages.items() if age < grace_seconds
        ),
        delete=tuple(
            key
            for key, age in ages.items()
            if age >= max(0.0, grace_seconds) and store_full is None
        ),
        unfinished=deletion,
        held=tuple(lease.who for lease in alive if lease.covers is None),
        expired_leases=tuple(lease.key for lease in held if not lease.alive and store_full is None),
        adopt=tuple(lease for lease in alive if lease.from_the_future),
        stray_pins=_stray_pins(facts),
        orphans=plan_sweep(
            run,
            grace_seconds=grace_seconds,
            keep=keep,
            spare_newest=True,
            ask_store=ask_store,
            on_step=on_step,
        ),
        grace_seconds=grace_seconds,
        store_full=store_full,
    )


def _stray_pins(facts: RunFacts) -> tuple[str, ...]:
    there = {manifest.name for manifest in facts.manifests}
    return tuple(
        PIN_KEY.of(*name, label)
        for name, labels in facts.pins.items()
        if name not in there
        for label in labels
    )


def _unfinished(run: Run) -> tuple[str, ...]:
    try:
        deletion = read_deletion(run)
    except FormatError:
        return (DELETION_KEY,)  # its content is unknown; the marks tell what to delete
    if deletion is None:
        return ()
    return deletion.manifests if deletion.run == run.id else (DELETION_KEY,)


# Stores the plan of a run's newest retention for people to read: rules, deletions, reasons (§6.6).


_LOG = logging.getLogger("recpoint.retention")

_ACTIONS = ("keep", "mark", "wait", "delete")
_MOST_RULES = 100
_MOST_MS = 2**53 - 1


def leave_plan(run: Run, made: PrunePlan) -> None:
    """Store a retention's plan before it is executed; if the store refuses, log it.

    Args:
        run: the run.
        made: the plan from `plan_prune`.
    """
    rows = list(made.rows())
    count = {action: sum(row.action == action for row in rows) for action in _ACTIONS}
    record = Plan(
        run=run.id,
        rules=_rules(made.retention.policy),
        grace_ms=_ms(made.grace_seconds),
        keep=count["keep"],
        mark=count["mark"],
        wait=count["wait"],
        delete=count["delete"],
        manifests=tuple(
            PlannedManifest(manifest=row.key, action=row.action, reason=row.reason[:1024])
            for row in _newest_rows(rows)
        ),
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        planned_ms=now_ms(),
    )
    try:
        run.records(PLAN).put(record)
    except StoreError as error:
        # Nothing depends on the record, and a retention that frees a full store must go on.
        _LOG.info("the plan of this retention could not be stored: %s", error)


class PlanWatch:
    """Watches a run's stored plan, and reads each new one once.

    Args:
        run: the run.

    Attributes:
        error: why the stored plan cannot be read; None if it can be, or there is none.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: ObjectInfo | None = None
        self._plan: Plan | None = None
        self.error: FormatError | None = None

    def refresh(self) -> Plan | None:
        """Return the stored plan; None if there is none, or it cannot be read.

        Raises:
            StoreError: the store cannot be read.
        """
        # The listing tells whether the plan is new; it may be large, with a thousand manifests.
        info = next((info for _, info in self._run.records(PLAN).listed()), None)
        if info is None or info != self._seen:
            self._plan, self.error = None, None
            if info is not None:
                try:
                    self._plan = self._run.records(PLAN).read()
                except ObjectNotFound:
                    return None
                except FormatError as error:
                    self.error = error
            self._seen = info
        return self._plan


def _newest_rows(rows: list[PruneRow]) -> list[PruneRow]:
    """Return the newest rows in order, at most MAX_PLANNED; both kept ones and others have room."""
    going = [row for row in rows if row.action != "keep"]
    kept = len(rows) - len(going)
    most_going = max(MAX_PLANNED - kept, MAX_PLANNED // 2)
    left = {True: most_going, False: MAX_PLANNED - min(len(going), most_going)}
    newest = []
    for row in rows:
        goes = row.action != "keep"
        if left[goes] > 0:
            left[goes] -= 1
            newest.append(row)
    return newest


def _rules(policy: RetentionPolicy) -> PlannedRules:
    return PlannedRules(
        last=policy.keep_last,
        within_ms=_ms(policy.keep_within_seconds),
        hourly=policy.keep_hourly,
        daily=policy.keep_daily,
        weekly=policy.keep_weekly,
        monthly=policy.keep_monthly,
        best=tuple(
            RuleBest(metric=one.metric, direction=one.direction, count=one.count)
            for one in policy.best_by[:_MOST_RULES]
        ),
        require_validated=policy.require_validated,
    )


def _ms(seconds: float) -> int:
    return min(_MOST_MS, math.ceil(1000 * seconds))


# Executes a retention: mark, wait for the grace, delete. The next one finishes what a kill left.
#
# The steps are those of format §6.6; `catalog.retention.keep` decides what is kept.


#: Most deletions at once.
_AT_ONCE = 8

#: Before each batch of so many deletions a retention checks that its announcement still stands.
_BATCH = 8


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
    deleted: list[str] = []
    spared: dict[str, str] = {}
    full = made.store_full
    if full is None:
        try:
            _mark_and_delete(run, made, deleted, spared, take_over_seconds, on_step)
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
    # One after another, in the order of deletion: if it is killed in between, no marked manifest is
    # needed by one without a mark.
    to_mark = (*made.mark, *made.remark)
    for number, decision in enumerate(to_mark, 1):
        _mark(run, decision)
        on_step("marking", number, len(to_mark))
    if not made.held:
        _delete(run, made, deleted, spared, take_over_seconds, on_step)


def _expired_still(run: Run, made: PrunePlan) -> list[str]:
    """Return the keys of the expired leases that were not renewed after the plan was made."""
    if not made.expired_leases:
        return []
    there = leases.read_leases(run, Clocks.read(run.store))
    return [lease.key for lease in there if not lease.alive and lease.key in made.expired_leases]


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
    """Finish the deletions that a killed retention has announced, then announce and delete ours."""
    mine = _begin(run, made, take_over_seconds)
    if mine is None:
        return
    announced = set(mine.manifests)
    rest = tuple(key for key in made.delete if key not in announced)
    while True:
        try:
            left = _look_and_delete(run, mine, deleted, spared, on_step)
        except BaseException:
            # The announcement stays, because a delete whose answer was lost may still arrive;
            # until then nobody may pin what it named.
            mine.stop()
            raise
        if left is None or not (*left, *rest):
            return
        mine, rest = announce(run, (*left, *rest)), ()


def _begin(run: Run, made: PrunePlan, take_over_seconds: float) -> Announcement | None:
    # Read now, not from the plan: another retention may have ended or begun meanwhile.
    there = standing(run, Clocks.read(run.store))
    if there is None:
        return announce(run, made.delete) if made.delete else None
    if not made.delete and not there.may_be_taken_over(take_over_seconds):
        return None  # another retention is at work, and this one has nothing to delete
    # If the announcement cannot be read, its content is unknown; the marks tell what to delete.
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
    """Delete the announced manifests that are not needed, then the announcement.

    These are the steps look again and delete of format §6.6.

    Returns:
        Keys of the manifests that there was no time for; None if nothing may be deleted now.
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
        # A new lease or generation has appeared: look again at what is needed.
    if left and len(deleted) == before:
        raise RetentionRefused(
            DELETION_KEY,
            found="reading all manifests took so long that the announcement is too old",
            expected="time left for deletions while the announcement counts",
            next_step=f"run it nearer to the store: recpoint retain {run.url}",
        )
    _delete_all(run, [EXPIRED_KEY.of(key) for key in set(mine.manifests).difference(left)])
    mine.withdraw()
    return left


class _Present(NamedTuple):
    """The leases, with the time of their last write, and generations when retention looked."""

    leases: frozenset[tuple[str, int]]
    generations: frozenset[int]

    @classmethod
    def of(cls, held: Iterable[Held], generations: Iterable[int]) -> Self:
        """Make it from all leases, and from the generations, which were listed before them."""
        written = frozenset((lease.key, lease.modified_ms) for lease in held)
        return cls(written, frozenset(generations))

    def anybody_new(self, run: Run) -> bool:
        """Tell whether there is a new lease or generation; costs two listings.

        Raises:
            StoreError: the store cannot be listed.
        """
        # Leases first: a trainer releases its lease after its generation exists.
        for _, info in run.records(LEASE).listed():
            if (info.key, info.modified_ms) not in self.leases:
                return True
        return not self.generations.issuperset(run.generation_numbers())


class _Seen(NamedTuple):
    """The result of a look: unneeded manifests in order of deletion, and who was there."""

    doomed: Sequence[StoredManifest]
    present: _Present


def _find_doomed(run: Run, mine: Announcement, spared: dict[str, str]) -> _Seen | None:
    """Find the announced manifests that nothing needs; None: delete nothing (§6.6, look again)."""
    announced = mine.manifests
    facts = gather(run)
    # After the manifests, which take long to read, so that a lease of that time is seen.
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
    """Delete manifests until time is up or a lease or generation appears; return the rest."""
    doomed = seen.doomed
    for number, manifest in enumerate(doomed):
        if seen.present.anybody_new(run):
            break
        if number % _BATCH == 0:
            mine.require_standing()
        # Checked last: however long the store took, no deletion begins after time is up.
        if mine.is_spent:
            break
        run.store.delete(manifest.key)
        deleted.append(manifest.key)
        on_step("deleting manifests", number + 1, len(doomed))
    else:
        return ()
    return tuple(manifest.key for manifest in doomed[number:])


def _leave(mine: Announcement) -> None:
    """End an announcement without deleting; it stays if its deletions may have begun."""
    if mine.taken_over:
        mine.stop()  # the retention that made it may have deleted some manifests
    else:
        mine.withdraw()


def _delete_all(run: Run, keys: list[str]) -> None:
    """Delete objects in any order, several at once."""
    with WriteScheduler(WriteBudget(_AT_ONCE)) as writes:
        for key in keys:
            writes.begin(writes.reserve(0), partial(run.store.delete, key))
        writes.finish()
