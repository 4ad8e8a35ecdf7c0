"""A consolidation that stands still, or is killed, as it commits names no chunk that is gone."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from recpoint.catalog.check.check import check
from recpoint.catalog.consolidate import commit as consolidating
from recpoint.catalog.consolidate.commit import commit_consolidation
from recpoint.catalog.consolidate.consolidate import consolidate
from recpoint.catalog.consolidate.merge import merge_part
from recpoint.catalog.consolidate.plan import plan_consolidation
from recpoint.catalog.retention import sweep as sweeping_module
from recpoint.catalog.retention.sweep import execute, plan_sweep
from recpoint.catalog.run.run import Run
from recpoint.errors import CommitConflict, MissingLink, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_KEY, MANIFEST_KEY, attempt_prefix
from tests.catalog_builder import tables
from tests.consolidation import chain_of, merge, name_of, require_same, restored, trained
from tests.interposed_store import InterposedStore
from tests.polling import PATIENCE_SECONDS
from tests.retained_run import HOUR


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 14."""
    return trained(run, tables(rows=200), [10, 11, 12, 13, 14])


def stood_still(run: Run, links: list[Manifest], *, lost: list[Manifest]) -> Run:
    """Right before the create: meanwhile a sweep found it too old, and `lost` were let go of."""

    def meanwhile(call: str, key: str) -> None:
        if call == "create" and key.startswith(CONSOLIDATED_KEY.prefix):
            assert len(execute(run, plan_sweep(run, grace_seconds=0)).removed) > 1
            for manifest in lost:
                run.store.delete(MANIFEST_KEY.of(manifest.step, 1))

    return Run.open(InterposedStore(run.store, before=meanwhile))


@pytest.mark.parametrize("merged", [None, 3])
def test_what_a_sweep_took_before_the_commit_is_written_again(
    run: Run, links: list[Manifest], merged: int | None
) -> None:
    before, _ = restored(run, links[-1])
    assert merge(stood_still(run, links, lost=[]), links[-1], merged).outcome == "created"
    after, report = restored(run, links[-1])
    require_same(before, after)
    assert report.passed_over == () and report.chain_length == (1 if merged is None else 3)
    assert check(run, level="full").findings == ()


def test_where_the_sources_are_gone_too_it_fails(run: Run, links: list[Manifest]) -> None:
    newer = trained(run, tables(rows=200, seed=5), [20])
    with pytest.raises(ObjectNotFound, match="manifests/"):
        merge(stood_still(run, links, lost=links[::-1]), links[-1])
    assert name_of(newer[-1]) == run.live_line()[0]
    restored(run, newer[-1])


def test_what_was_seen_long_ago_is_looked_at_again(
    run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still after it had looked: its checkpoint was let go of meanwhile."""
    plan = plan_consolidation(run, name_of(links[-1]))
    entries = [entry for part in plan.parts for entry in merge_part(run, plan, part)]
    looked: list[str] = []

    def let_go(call: str, key: str) -> None:
        if call == "list" and key == attempt_prefix(*plan.target.name, plan.attempt):
            looked.append(key)
        elif (call, key) == ("get", MANIFEST_KEY.of(14, 1)) and len(looked) == 1:
            run.store.delete(key)

    monkeypatch.setattr(consolidating, "_LOOK_AGAIN_SECONDS", 0.0)
    with pytest.raises(MissingLink):
        commit_consolidation(Run.open(InterposedStore(run.store, after=let_go)), plan, entries)
    assert len(looked) == 2 and not run.consolidated()


def test_what_a_sweep_that_stood_still_takes_after_the_commit_is_written_again(
    run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked before a killed consolidation went on, and removes when that has committed."""
    monkeypatch.setattr(consolidating, "_SWEEPS_END_SECONDS", 2.0)
    plan = plan_consolidation(run, name_of(links[-1]))
    prefix = attempt_prefix(*plan.target.name, plan.attempt)
    for part in plan.parts:
        merge_part(run, plan, part)
    killed_at = time.time() - 2 * HOUR
    for path in Path(run.url, prefix).iterdir():
        os.utime(path, (killed_at, killed_at))
    looked, committed = threading.Event(), threading.Event()

    def stand_still(call: str, key: str) -> None:
        if call == "delete" and key.startswith(prefix):
            first = not looked.is_set()
            looked.set()
            assert committed.wait(PATIENCE_SECONDS)
            time.sleep(0.5 if first else 0.0)  # so that it comes after a look right after that

    def go_on(call: str, key: str) -> None:
        if call == "create" and key == plan.target.key:
            committed.set()

    sweeping = Run.open(InterposedStore(run.store, before=stand_still))
    with ThreadPoolExecutor(1) as pool:
        swept = pool.submit(lambda: execute(sweeping, plan_sweep(sweeping, grace_seconds=HOUR)))
        assert looked.wait(PATIENCE_SECONDS)
        merging = Run.open(InterposedStore(run.store, after=go_on))
        assert merge(merging, links[-1]).outcome == "created"
        assert len(swept.result().removed) > 0
    assert check(run, level="full").findings == ()
    assert restored(run, links[-1])[1].passed_over == ()


def test_a_sweep_that_stood_still_looks_again_before_it_removes(
    run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a look is good for: the consolidation is through with its last look."""
    monkeypatch.setattr(sweeping_module, "_LOOK_AGAIN_SECONDS", 0.5)
    plan = plan_consolidation(run, name_of(links[-1]))
    for part in plan.parts:
        merge_part(run, plan, part)
    planned = plan_sweep(run, grace_seconds=0)
    stood: list[str] = []

    def stand_still() -> set[str]:
        if not stood:  # as it asks what is staged, right before it removes
            stood.append(merge(run, links[-1]).outcome)
            time.sleep(0.6)
        return set()

    result = execute(run, replace(planned, keep=stand_still))
    assert stood == ["created"] and result.removed == ()
    assert "a manifest names it now" in result.spared[0].reason
    assert check(run, level="full").findings == ()


def test_a_sweep_that_has_looked_often_still_looks_again(
    run: Run, links: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where removing takes long it looks often, and each look is good for no longer."""
    monkeypatch.setattr(sweeping_module, "_LOOK_AGAIN_SECONDS", 0.5)
    monkeypatch.setattr(sweeping_module, "_SLOW_LOOKS", 1)
    plan = plan_consolidation(run, name_of(links[-1]))
    for part in plan.parts:
        merge_part(run, plan, part)
    planned = plan_sweep(run, grace_seconds=0)
    assert len(planned.objects) > 1
    looks: list[str] = []

    def stand_still() -> set[str]:
        looks.append(merge(run, links[-1]).outcome if len(looks) == 1 else "")
        time.sleep(0.6 if looks[-1] else 0.0)
        return set()

    def slowly(call: str, key: str) -> None:
        if call == "delete":
            time.sleep(0.6)

    sweeping = Run.open(InterposedStore(run.store, after=slowly))
    result = execute(sweeping, replace(planned, keep=stand_still))
    assert looks == ["", "created"] and len(result.removed) == 1
    assert "a manifest names it now" in result.spared[0].reason
    assert check(run, level="full").findings == ()


def test_one_that_is_there_with_a_gap_is_mended(run: Run, links: list[Manifest]) -> None:
    """Killed after it had created its manifest, and before it looked once more."""
    before, _ = restored(run, links[-1])
    plan = plan_consolidation(run, name_of(links[-1]))
    assert consolidate(run, plan).outcome == "created"
    (merged,) = chain_of(run, links[-1])
    for content in ("rows", "state"):
        run.store.delete(next(one.key for one in merged.chunks if one.content == content))
        assert check(run).findings != ()
        assert consolidate(run, plan).outcome == "already"
        assert check(run, level="full").findings == ()
    after, report = restored(run, links[-1])
    require_same(before, after)
    assert report.chain_length == 1
    assert consolidate(run, plan).read_bytes == 0


def test_one_of_other_sources_with_a_gap_is_no_success(run: Run, links: list[Manifest]) -> None:
    long = plan_consolidation(run, name_of(links[-1]))
    merge(run, links[2])
    assert merge(run, links[-1]).outcome == "created"
    there = chain_of(run, links[-1])[-1]
    assert consolidate(run, long).outcome == "already"
    run.store.delete(there.chunks[0].key)
    with pytest.raises(CommitConflict, match="is missing"):
        consolidate(run, long)
