"""Whoever comes while a retention deletes: nothing that they read or go on from goes any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.prune import PruneResult, execute
from recpoint.catalog.run import leases
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.store import open_store
from recpoint.format.naming import DELETION_KEY, ManifestName
from tests.interposed_store import InterposedStore
from tests.retained_run import filled, keys, named, planned, require_tidy, retain, steps


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return filled(open_store(str(tmp_path / "run")))


def deleting(run: Run, come: Callable[[], object]) -> PruneResult:
    """A retention that has marked 30, 20 and 10 deletes them; `come` is called after the first."""
    retain(run)
    plan = planned(run)
    assert plan.delete == tuple(named(run, step) for step in (30, 20, 10))
    there: list[str] = []

    def strike(call: str, key: str) -> None:
        if call == "delete" and key.startswith("manifests/") and not there:
            there.append(key)
            come()

    return execute(Run.open(InterposedStore(run.store, after=strike)), plan)


def test_what_a_trainer_was_told_to_restore_and_goes_on_from_stays(run: Run) -> None:
    def start() -> None:
        with leases.reading(run, purpose="restore"):
            run.claim(restore(run, MemoryTarget(), Selection(step=10)).restored)

    assert deleting(run, start).deleted == (named(run, 30), named(run, 20))
    assert run.live_line() == [ManifestName(10, 1)]
    assert restore(run, MemoryTarget()).restored.step == 10


def test_under_a_lease_of_everything_nothing_more_goes(run: Run) -> None:
    held: list[leases.HeldLease] = []
    result = deleting(run, lambda: held.append(leases.HeldLease(run, purpose="restore")))
    assert result.deleted == (named(run, 30),) and steps(run) == [10, 20, 40, 50]
    assert DELETION_KEY not in keys(run)  # all that was begun was done
    assert all(health.restorable for health in check(run).checkpoints)
    held[0].release()
    assert retain(run).deleted == (named(run, 20), named(run, 10))
    require_tidy(run, [40, 50])


@pytest.mark.parametrize("renewed", [False, True])
def test_what_a_lease_has_come_to_name_stays(run: Run, renewed: bool) -> None:
    covers = [run.manifest(10, 1).ref]
    if renewed:
        there = leases.HeldLease(run, purpose="follow", covers=[run.manifest(50, 1).ref])
        result = deleting(run, lambda: there.renew(covers=covers))
    else:
        result = deleting(run, lambda: leases.HeldLease(run, purpose="follow", covers=covers))
    assert result.deleted == (named(run, 30), named(run, 20))
    assert dict(result.spared).keys() == {named(run, 10)}


def test_what_is_no_lease_stops_nothing(run: Run) -> None:
    result = deleting(run, lambda: run.store.put("leases/notes.txt", b"mine"))
    assert len(result.deleted) == 3 and steps(run) == [40, 50]
