"""Retention, executed: mark, wait for the grace, delete; killed anywhere, finished by the next.

The steps are those of format §6.6; what is kept is decided by `recpoint.catalog.retention`.
"""

from __future__ import annotations

import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from recpoint.catalog import leases
from recpoint.catalog.create_only import create_or_read
from recpoint.catalog.elapsed import Clocks, stamp_now
from recpoint.catalog.plan_record import leave_plan
from recpoint.catalog.prune_plan import PrunePlan
from recpoint.catalog.representations import Representations
from recpoint.catalog.retention import Decision, deletion_order, needed_manifests
from recpoint.catalog.run import Run
from recpoint.catalog.run_facts import OnStep, gather, unwatched
from recpoint.catalog.sweep import SweepResult, plan_sweep
from recpoint.catalog.sweep import execute as execute_sweep
from recpoint.format.naming import DELETION_KEY, expired_key
from recpoint.format.records import MAX_RECORD_BYTES, pack_record
from recpoint.format.retention_records import Deletion, Mark

__all__ = ["PruneResult", "execute"]

_AT_ONCE = 8


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


def execute(run: Run, made: PrunePlan, *, on_step: OnStep = unwatched) -> PruneResult:
    """Do what a plan says (format §6.6, T2 to T6), and leave it for people to see.

    Killed anywhere, the next one goes on.

    What is to be deleted is looked at once more before it goes: what has come to be needed since
    the plan was made stays.

    Args:
        run: the run.
        made: of `plan_prune`.
        on_step: called after each object that was marked or removed, from this thread.

    Raises:
        StoreError: the store refuses or cannot be reached; what was not yet removed stays.
    """
    leave_plan(run, made)
    for lease in made.adopt:
        leases.adopt(run, lease)
    _delete_all(run, [*made.expired_leases, *(expired_key(key) for key in made.unmark)])
    # One after another, in the order in which they may go: killed in between, none is marked that
    # a manifest without a mark needs.
    to_mark = (*made.mark, *made.remark)
    for number, decision in enumerate(to_mark, 1):
        _mark(run, decision)
        on_step("marking", number, len(to_mark))
    deleted: list[str] = []
    spared: dict[str, str] = {}
    if not made.held:
        if made.unfinished:
            _delete_manifests(run, made.unfinished, deleted, spared, on_step)
        left = tuple(key for key in made.delete if key not in deleted)
        if left and _announce(run, left):
            _delete_manifests(run, left, deleted, spared, on_step)
    # Their chunks are orphans now, and as old as what they belonged to.
    orphans = plan_sweep(
        run,
        grace_seconds=made.orphans.grace_seconds,
        keep=made.orphans.keep,
        spare_newest=True,
    )
    return PruneResult(
        marked=tuple(decision.manifest.key for decision in made.mark),
        unmarked=made.unmark,
        deleted=tuple(deleted),
        spared=tuple(spared.items()),
        swept=execute_sweep(run, orphans, on_step=on_step),
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
    run.store.put(expired_key(manifest.key), pack_record(mark))


def _announce(run: Run, manifests: tuple[str, ...]) -> bool:
    """Say what is going to be deleted; False if another deletion is under way (format T3)."""
    deletion = Deletion(
        run=run.id,
        token=secrets.token_hex(16),
        host=socket.gethostname()[:255],
        pid=os.getpid(),
        manifests=manifests,
        stamp=stamp_now(),
    )
    data = pack_record(deletion)
    there = create_or_read(run.store, DELETION_KEY, data, max_bytes=MAX_RECORD_BYTES)
    return there is None or there == data


def _delete_manifests(
    run: Run,
    announced: tuple[str, ...],
    deleted: list[str],
    spared: dict[str, str],
    on_step: OnStep,
) -> None:
    """Delete what was announced and is not needed, then the announcement (format T4, T5)."""
    clocks = Clocks.read(run.store)
    alive = [lease for lease in leases.look(run, clocks) if lease.alive]
    if any(lease.covers is None for lease in alive):
        # A killed deletion may have gone half its way: its announcement stays for the next.
        return
    facts = gather(run, leases=alive)
    if facts.unreadable:
        spared.update((key, f"{facts.unreadable[0]} cannot be read") for key in announced)
        return
    needed = needed_manifests(facts, frozenset(announced))
    spared.update(needed)
    there = {manifest.key: manifest for manifest in facts.manifests}
    doomed = [there[key] for key in announced if key in there and key not in needed]
    order = deletion_order(Representations(facts.manifests, facts.verdicts))
    for number, manifest in enumerate(sorted(doomed, key=order), 1):
        run.store.delete(manifest.key)
        deleted.append(manifest.key)
        on_step("deleting manifests", number, len(doomed))
    _delete_all(run, [expired_key(key) for key in announced if key != DELETION_KEY])
    run.store.delete(DELETION_KEY)


def _delete_all(run: Run, keys: list[str]) -> None:
    """Delete objects in any order, several at once."""
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        for _ in pool.map(run.store.delete, keys):
            pass
