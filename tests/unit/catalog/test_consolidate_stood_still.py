"""A consolidation that stands still, or is killed, as it commits names no chunk that is gone."""

from __future__ import annotations

import pytest

from recpoint.catalog import consolidate as consolidating
from recpoint.catalog.check import check
from recpoint.catalog.consolidate import commit_consolidation, consolidate
from recpoint.catalog.consolidate_plan import plan_consolidation
from recpoint.catalog.consolidate_rows import merge_part
from recpoint.catalog.run import Run
from recpoint.catalog.sweep import execute, plan_sweep
from recpoint.errors import CommitConflict, MissingLink, ObjectNotFound
from recpoint.format.manifest import Manifest
from recpoint.format.naming import CONSOLIDATED_PREFIX, attempt_prefix, manifest_key
from tests.catalog_builder import tables
from tests.consolidation import chain_of, merge, name_of, require_same, restored, trained
from tests.interposed_store import InterposedStore


@pytest.fixture
def links(run: Run) -> list[Manifest]:
    """A full at step 10 and increments up to step 14."""
    return trained(run, tables(rows=200), [10, 11, 12, 13, 14])


def stood_still(run: Run, links: list[Manifest], *, lost: list[Manifest]) -> Run:
    """Right before the create: meanwhile a sweep found it too old, and `lost` were let go of."""

    def meanwhile(call: str, key: str) -> None:
        if call == "create" and key.startswith(CONSOLIDATED_PREFIX):
            assert len(execute(run, plan_sweep(run, grace_seconds=0)).removed) > 1
            for manifest in lost:
                run.store.delete(manifest_key(manifest.step, 1))

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
        elif (call, key) == ("get", manifest_key(14, 1)) and len(looked) == 1:
            run.store.delete(key)

    monkeypatch.setattr(consolidating, "_LOOK_AGAIN_SECONDS", 0.0)
    with pytest.raises(MissingLink):
        commit_consolidation(Run.open(InterposedStore(run.store, after=let_go)), plan, entries)
    assert len(looked) == 2 and not run.consolidated()


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
