"""What a retention would do now: what to mark, what waits, what to delete (format §6.6, T1-T3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from recpoint.catalog.records import leases
from recpoint.catalog.records.pins import read_deletion
from recpoint.catalog.records.run_facts import OnStep, gather, unwatched
from recpoint.catalog.retention.grace import GRACE_FLOOR_SECONDS, require_grace
from recpoint.catalog.retention.marks import Marks
from recpoint.catalog.retention.retention import Decision, RetentionPlan, plan
from recpoint.catalog.retention.retention_rules import RetentionPolicy
from recpoint.catalog.runs.representations import RunFacts
from recpoint.catalog.runs.run import Run
from recpoint.catalog.stores.elapsed import Clocks
from recpoint.catalog.sweeping.sweep import SweepPlan, plan_sweep
from recpoint.errors import FormatError, StoreFull
from recpoint.format.naming import DELETION_KEY, PIN_KEY

__all__ = ["PrunePlan", "PruneRow", "Waiting", "plan_prune"]


class Waiting(NamedTuple):
    """A marked manifest whose grace is not over."""

    decision: Decision
    age_seconds: float


class PruneRow(NamedTuple):
    """What becomes of one manifest; `wait`: it is marked, and may not be deleted yet."""

    step: int
    generation: int
    key: str
    action: Literal["keep", "mark", "wait", "delete"]
    reason: str
    stored_bytes: int


@dataclass(frozen=True, kw_only=True)
class PrunePlan:
    """What a retention would do now. Made by reading alone.

    Attributes:
        retention: what is kept and what is not, with the reasons.
        mark: manifests that get a mark now, newest first.
        unmark: marks that go: of what is kept now, or is not there any more.
        remark: marks from the future, which are written anew.
        waiting: marked manifests that stay for now.
        delete: keys of manifests that go now, newest first.
        unfinished: what an earlier retention was deleting when it was killed; goes first.
        held: leases that keep everything from being deleted.
        expired_leases: keys of leases that nobody has renewed in time.
        adopt: leases from the future.
        stray_pins: keys of pins of checkpoints that are not there; nothing removes them.
        orphans: what no manifest names, as far as it was there when the plan was made.
        grace_seconds: how long a manifest stays marked.
        store_full: the store refused to say its time for lack of space: nothing that needs its
            clock or another write is planned to be deleted.
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
        """All manifests, newest first."""
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
    """Find what can go; nothing is changed.

    Args:
        run: the run.
        policy: the rules.
        grace_seconds: how long a manifest stays marked, and how old orphans must be.
        keep: attempts that jobs in a staging area name: an agent will finish them.
        ask_store: ask the store for its time, which writes and removes a small object; without
            it, nothing at all is written, and a clock of the store that is behind is not noticed.
        grace_floor_seconds: refuse a shorter grace.
        on_step: called after each manifest that was read, from this thread.

    Raises:
        SettingsError: a grace below the floor.
        RetentionRefused: see `recpoint.catalog.retention.retention.plan`.
        FormatError, GenerationRecordLost: the live line cannot be followed.
        StoreError: the store cannot be read.
    """
    why = "readers without a lease have that long"
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
        return (DELETION_KEY,)  # nobody knows what it named; marks tell what is to go
    if deletion is None:
        return ()
    return deletion.manifests if deletion.run == run.id else (DELETION_KEY,)
