"""Deletes marked manifests under an announcement (format §6.6, announce to delete).

1. Announce the manifests, or take over what a killed retention announced.
2. Look again: find those that no reader, pin or kept checkpoint needs now.
3. Delete these in order. If a lease or a generation appears meanwhile, look again. If the
   announcement becomes too old, announce the remaining ones again.
4. Withdraw the announcement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from recpoint.catalog.retention.keep import deletion_order, needed_manifests
from recpoint.catalog.retention.plan import PrunePlan
from recpoint.catalog.run import leases
from recpoint.catalog.run.deletions import (
    Announcement,
    announce,
    standing,
    take_over,
)
from recpoint.catalog.run.facts import OnStep, gather, leased_by
from recpoint.catalog.run.leases import Held
from recpoint.catalog.run.representations import Representations, StoredManifest
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Clocks
from recpoint.catalog.store.deletes import delete_objects
from recpoint.errors import RetentionRefused
from recpoint.format.naming import DELETION_KEY, EXPIRED_KEY
from recpoint.format.record_kinds import LEASE

__all__ = ["Deletions", "delete_manifests"]

#: Before each batch of so many deletions a retention checks that its announcement still stands.
_BATCH = 8


class Deletions(NamedTuple):
    """What was deleted, in this order, and what stayed, each with what needs it; all are keys."""

    deleted: tuple[str, ...] = ()
    spared: tuple[tuple[str, str], ...] = ()


def delete_manifests(
    run: Run, made: PrunePlan, *, take_over_seconds: float, on_step: OnStep
) -> Deletions:
    """Finish the deletions that a killed retention has announced, then those of this plan.

    Args:
        run: the run.
        made: the plan.
        take_over_seconds: how old another retention's announcement must be.
        on_step: called after each manifest that was deleted.

    Raises:
        RetentionRefused: another retention is deleting, or this one's announcement is gone.
        StoreError: the store refuses or cannot be reached.
    """
    announcement = _begin(run, made, take_over_seconds)
    if announcement is None:
        return Deletions()
    announced = set(announcement.manifests)
    not_announced = tuple(key for key in made.delete if key not in announced)
    deleted: list[str] = []
    spared: dict[str, str] = {}
    while True:
        try:
            part = _delete_announced(run, announcement, on_step)
        except BaseException:
            # The announcement stays, because a delete whose answer was lost may still arrive;
            # until then nobody may pin what it named.
            announcement.stop()
            raise
        deleted += part.deleted
        spared |= part.spared
        if part.is_blocked or not (*part.remaining, *not_announced):
            return Deletions(tuple(deleted), tuple(spared.items()))
        announcement, not_announced = announce(run, (*part.remaining, *not_announced)), ()


def _begin(run: Run, made: PrunePlan, take_over_seconds: float) -> Announcement | None:
    # Read now, not from the plan: another retention may have ended or begun meanwhile.
    stored = standing(run, Clocks.read(run.store))
    if stored is None:
        return announce(run, made.delete) if made.delete else None
    if not made.delete and not stored.may_be_taken_over(take_over_seconds):
        return None  # another retention is at work, and this one has nothing to delete
    # If the announcement cannot be read, its content is unknown; the marks tell what to delete.
    named = made.delete or tuple(row.key for row in made.rows())[:1]
    if not named:
        return None
    announcement = take_over(run, stored, named, after_seconds=take_over_seconds)
    if stored.deletion is None and not made.delete:
        announcement.withdraw()
        return None
    return announcement


class _DoomedPart(NamedTuple):
    """The deletions under one announcement.

    Attributes:
        deleted: keys of the deleted manifests, in this order.
        spared: keys of the manifests that stayed, each with what needs it.
        remaining: keys of the manifests that there was no time for.
        is_blocked: nothing more may be deleted now.
    """

    deleted: tuple[str, ...]
    spared: dict[str, str]
    remaining: tuple[str, ...] = ()
    is_blocked: bool = False


def _delete_announced(run: Run, announcement: Announcement, on_step: OnStep) -> _DoomedPart:
    """Delete the announced manifests that nothing needs, then withdraw the announcement."""
    deleted: list[str] = []
    spared: dict[str, str] = {}
    while True:
        look = _look(run, announcement.manifests)
        spared |= look.spared
        if look.present is None:
            _leave(announcement)
            return _DoomedPart(tuple(deleted), spared, is_blocked=True)
        count = _delete_in_order(run, announcement, look.doomed, look.present, on_step)
        keys = tuple(manifest.key for manifest in look.doomed)
        deleted += keys[:count]
        remaining = keys[count:]
        if not remaining or announcement.is_spent:
            break
        # A new lease or generation has appeared: look again at what is needed.
    if remaining and not deleted:
        raise RetentionRefused(
            DELETION_KEY,
            found="reading all manifests took so long that the announcement is too old",
            expected="time left for deletions while the announcement counts",
            next_step=f"run it nearer to the store: recpoint retain {run.url}",
        )
    finished = set(announcement.manifests).difference(remaining)
    delete_objects(run.store, [EXPIRED_KEY.of(key) for key in finished])
    announcement.withdraw()
    return _DoomedPart(tuple(deleted), spared, remaining)


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


class _Look(NamedTuple):
    """The result of a look at what is needed now.

    Attributes:
        doomed: manifests that nothing needs, in order of deletion.
        spared: keys of the other announced manifests, each with what needs it.
        present: the leases and generations of that time; None: nothing may be deleted now.
    """

    doomed: Sequence[StoredManifest]
    spared: dict[str, str]
    present: _Present | None


def _look(run: Run, announced: tuple[str, ...]) -> _Look:
    """Find the announced manifests that nothing needs (format §6.6, look again)."""
    facts = gather(run)
    # After the manifests, which take long to read, so that a lease of that time is seen.
    lease_list = leases.read_leases(run, Clocks.read(run.store))
    alive = [lease for lease in lease_list if lease.alive]
    if any(lease.covers is None for lease in alive):
        return _Look((), {}, None)
    if facts.unreadable:
        reason = f"{facts.unreadable[0]} cannot be read"
        return _Look((), dict.fromkeys(announced, reason), None)
    needed = needed_manifests(replace(facts, leased=leased_by(alive)), frozenset(announced))
    stored = {manifest.key: manifest for manifest in facts.manifests}
    doomed = [stored[key] for key in announced if key in stored and key not in needed]
    doomed.sort(key=deletion_order(Representations(facts.manifests, facts.verdicts)))
    return _Look(doomed, dict(needed), _Present.of(lease_list, facts.generations))


def _delete_in_order(
    run: Run,
    announcement: Announcement,
    doomed: Sequence[StoredManifest],
    present: _Present,
    on_step: OnStep,
) -> int:
    """Delete manifests until time is up or a lease or generation appears; return how many."""
    for number, manifest in enumerate(doomed):
        if present.anybody_new(run):
            return number
        if number % _BATCH == 0:
            announcement.require_standing()
        # Checked last: however long the store took, no deletion begins after time is up.
        if announcement.is_spent:
            return number
        run.store.delete(manifest.key)
        on_step("deleting manifests", number + 1, len(doomed))
    return len(doomed)


def _leave(announcement: Announcement) -> None:
    """End an announcement without deleting; it stays if its deletions may have begun."""
    if announcement.taken_over:
        announcement.stop()  # the retention that made it may have deleted some manifests
    else:
        announcement.withdraw()
