"""Plans a retention: what to mark, what waits, what to delete (format §6.6, plan to announce)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from recpoint.catalog.retention.grace import GRACE_FLOOR_SECONDS, require_grace
from recpoint.catalog.retention.keep import Decision, RetentionPlan, plan
from recpoint.catalog.retention.marks import Marks
from recpoint.catalog.retention.rules import RetentionPolicy
from recpoint.catalog.retention.sweep import SweepPlan, plan_sweep
from recpoint.catalog.run import leases
from recpoint.catalog.run.deletions import read_deletion
from recpoint.catalog.run.facts import OnStep, gather, unwatched
from recpoint.catalog.run.representations import RunFacts
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks
from recpoint.errors import FormatError, StoreFull
from recpoint.format.naming import DELETION_KEY, PIN_KEY

__all__ = [
    "PrunePlan",
    "PruneRow",
    "plan_prune",
]


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
        for manifest, decided, reason in self.retention.decisions:
            action: Literal["keep", "mark", "wait", "delete"] = "keep"
            if manifest.key in delete:
                action = "wait" if self.held else "delete"
                reason = f"{reason}; held by a lease: {self.held[0]}" if self.held else reason
            elif manifest.key in waiting:
                action = "wait"
                seconds_left = self.grace_seconds - max(0.0, waiting[manifest.key])
                reason = f"{reason}; marked, {seconds_left / 3600:.1f} h of grace are left"
            elif decided == "drop":
                action = "mark"
            yield PruneRow(*manifest.name, manifest.key, action, reason, manifest.stored_bytes)


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
    reason = "readers without a lease may take that long"
    require_grace(grace_seconds, floor_seconds=grace_floor_seconds, why=reason)
    store_full: StoreFull | None = None
    try:
        clocks = Clocks.read(run.store if ask_store else None)
    except StoreFull as error:
        store_full, clocks = error, Clocks.read()
    lease_list = leases.read_leases(run, clocks)
    alive = [lease for lease in lease_list if lease.alive]
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
        expired_leases=tuple(
            lease.key for lease in lease_list if not lease.alive and store_full is None
        ),
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
    stored_names = {manifest.name for manifest in facts.manifests}
    return tuple(
        PIN_KEY.of(*name, label)
        for name, labels in facts.pins.items()
        if name not in stored_names
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
