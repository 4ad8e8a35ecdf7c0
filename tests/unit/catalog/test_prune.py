"""Marking, waiting, deleting: what happens to a real run in a real store (format §6.6, §6.7)."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch

from recpoint.catalog.check.check import check
from recpoint.catalog.restore.order import Selection
from recpoint.catalog.restore.restore import MemoryTarget, restore
from recpoint.catalog.retention.plan import plan_prune
from recpoint.catalog.retention.prune import PruneResult, execute
from recpoint.catalog.retention.rules import BestBy, RetentionPolicy
from recpoint.catalog.retention.stored_plan import leave_plan
from recpoint.catalog.retention.sweep import execute as execute_sweep
from recpoint.catalog.retention.sweep import plan_sweep
from recpoint.catalog.run import leases, metrics, pins
from recpoint.catalog.run.run import Run
from recpoint.catalog.store.contract import Store, now_ms
from recpoint.catalog.store.store import open_store
from recpoint.errors import (
    NonFiniteValue,
    ObjectNotFound,
    RetentionRefused,
    SettingsError,
    StoreFull,
    StoreUnavailable,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    CONSOLIDATED_KEY,
    DELETION_KEY,
    EXPIRED_KEY,
    METRIC_KEY,
    PLAN_KEY,
    ManifestName,
)
from recpoint.format.records import pack_record
from tests.catalog_builder import build, copy_run, publish, tables
from tests.interposed_store import InterposedStore, unavailable
from tests.retained_run import (
    HOUR,
    LAST,
    add,
    consolidated,
    filled,
    keys,
    named,
    planned,
    require_tidy,
    retain,
    rewrite_mark,
    steps,
    values,
)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A place on a local disk, and one on the real S3 server."""
    if request.param == "local":
        return open_store(str(tmp_path / "run"))
    return open_store(request.getfixturevalue("s3_run_url"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return filled(open_store(str(tmp_path / "run")))


def test_marked_first_deleted_later(store: Store) -> None:
    run = filled(store)
    before = keys(run)
    first = retain(run)
    assert first.marked == tuple(named(run, step) for step in (30, 20, 10))
    assert first.deleted == () and first.removed_bytes == 0
    marks = {EXPIRED_KEY.of(named(run, step)) for step in (10, 20, 30)}
    assert keys(run) == before | marks | {PLAN_KEY}
    assert check(run, level="full").ok
    # A marked checkpoint counts and restores as before.
    assert steps(run) == [10, 20, 30, 40, 50] == [n.step for n in reversed(run.live_line())]
    assert restore(run, MemoryTarget(), Selection(step=30)).restored.step == 30

    in_grace = planned(run, grace=HOUR)
    assert in_grace.delete == () and len(in_grace.waiting) == 3
    plan = planned(run)
    assert plan.mark == () and plan.delete == tuple(named(run, step) for step in (30, 20, 10))
    second = execute(run, plan)
    assert second.deleted == plan.delete and second.removed_bytes > 0
    require_tidy(run, [40, 50])
    third = planned(run)
    assert (third.mark, third.delete, third.unmark) == ((), (), ())


def test_a_trainer_whose_clock_was_set_back_loses_nothing(store: Store) -> None:
    run = Run.create(store)
    run.claim(None)
    here_ms = now_ms()
    for step in (10, 20, 30, 40, 50, 60):
        made = build(run, tables(seed=step), step=step, generation=1)
        days_back = 30 if step > 30 else 0
        times = {"snapshot_ms": here_ms - days_back * 24 * 3_600_000}
        publish(run, replace(made, manifest=made.manifest.model_copy(update=times)))
    made_plan = planned(run, RetentionPolicy(keep_within_seconds=HOUR, require_validated=False))
    assert made_plan.mark == ()


def test_who_waits_is_told_of_each_object(run: Run) -> None:
    told: list[tuple[str, int, int]] = []

    def retained() -> list[str]:
        told.clear()
        made = plan_prune(
            run,
            LAST,
            grace_seconds=0.0,
            grace_floor_seconds=0.0,
            on_step=lambda *step: told.append(step),
        )
        execute(run, made, on_step=lambda *step: told.append(step))
        passes = []
        for what, same in groupby(told, key=lambda step: step[0]):
            counts = [(done, total) for _, done, total in same]
            assert counts == [(number, len(counts)) for number in range(1, len(counts) + 1)]
            passes.append(what)
        return passes

    # For orphans it looks once more at what is left.
    looks = ["reading manifests", "looking for orphans"]
    assert retained() == [*looks, "marking", "looking for orphans"]
    deleted = ["deleting manifests", "looking for orphans", "removing objects"]
    assert retained() == [*looks, *deleted]


def test_a_dry_run_writes_nothing_at_all(run: Run) -> None:
    retain(run)
    before = {info.key: info.modified_ms for info in run.store.list()}
    interposed = InterposedStore(run.store)
    plan = planned(Run.open(interposed), ask_store=False)
    assert len(plan.delete) == 3
    assert {info.key: info.modified_ms for info in run.store.list()} == before
    assert {call for call, _ in interposed.calls} <= {"get", "list", "list_unfinished"}


def test_what_a_rule_comes_to_keep_is_unmarked(run: Run) -> None:
    retain(run)
    result = retain(run, RetentionPolicy(keep_last=3, require_validated=False), grace=HOUR)
    assert set(result.unmarked) == {named(run, step) for step in (10, 20, 30)}
    assert not [key for key in keys(run) if key.startswith("expired/")]


def test_a_mark_of_another_attempt_or_damaged_is_none(run: Run) -> None:
    retain(run)
    rewrite_mark(run, 30, attempt="f" * 32)
    run.store.put(EXPIRED_KEY.of(named(run, 20)), b"damaged")
    plan = planned(run)
    assert plan.delete == (named(run, 10),)
    assert [d.manifest.name.step for d in plan.mark] == [30, 20]
    # 10 is still what the others depend on: it stays, and is marked anew with them.
    result = execute(run, plan)
    assert result.deleted == () and result.spared[0][0] == named(run, 10)
    retain(run)
    retain(run)
    require_tidy(run, [40, 50])


def test_a_grace_below_its_floor_is_refused(run: Run) -> None:
    for grace in (0.0, 3599.0, -1.0, float("nan")):
        with pytest.raises(SettingsError, match="grace_seconds"):
            plan_prune(run, LAST, grace_seconds=grace)
    assert len(plan_prune(run, LAST, grace_seconds=HOUR).mark) == 3


def test_best_by_a_recorded_metric(run: Run) -> None:
    for step, value in ((10, 0.5), (20, 0.75), (40, 0.625)):
        metrics.record_metric(run, ManifestName(step, 1), "auc", value)
    metrics.record_metric(run, ManifestName(10, 1), "auc", 0.25)  # measured again
    run.store.put(METRIC_KEY.of(30, 1, "auc"), b"damaged")
    policy = RetentionPolicy(best_by=(BestBy("auc", "max"),), require_validated=False)
    assert [d.manifest.name.step for d in planned(run, policy).mark] == [30]
    policy = RetentionPolicy(best_by=(BestBy("auc", "min"),), require_validated=False)
    assert [d.manifest.name.step for d in planned(run, policy).mark] == [30, 20]
    with pytest.raises(NonFiniteValue):
        metrics.record_metric(run, ManifestName(10, 1), "auc", float("nan"))
    with pytest.raises(ObjectNotFound):
        metrics.record_metric(run, ManifestName(11, 1), "auc", 1.0)


def test_superseded_checkpoints_go_and_their_generations_stay(run: Run) -> None:
    run.claim(run.manifest(20, 1).ref)
    add(run, 60, run.manifest(20, 1), generation=2)
    retain(run)
    result = retain(run)
    assert result.deleted == tuple(named(run, step) for step in (50, 40, 30))
    assert steps(run) == [10, 20, 60] and run.generation_numbers() == [1, 2]
    assert restore(run, MemoryTarget()).restored.step == 60


def test_orphans_go_but_not_what_the_trainer_may_still_commit(run: Run) -> None:
    old = build(run, tables(), step=45, generation=1)
    coming = build(run, tables(), step=60, generation=1)
    for made in (old, coming):
        for key, data in made.chunks.items():
            run.store.put(key, data)
    run.store.put("notes.txt", b"mine")
    plan = planned(run)
    assert plan.orphans.unrecognised == ("notes.txt",)
    assert plan.orphans.kept[0].reason == "its trainer may still commit it"
    retain(run)
    assert not keys(run) & set(old.chunks) and set(coming.chunks) <= keys(run)
    assert "notes.txt" in keys(run)


def test_nothing_goes_while_a_manifest_names_chunks_of_another_checkpoint(run: Run) -> None:
    old, newest = run.manifest(30, 1), run.manifest(50, 1)
    run.store.delete(named(run, 50))
    mixed = newest.model_copy(update={"chunks": (old.chunks[0], *newest.chunks[1:])})
    run.store.put(named(run, 50), pack_record(mixed))
    before = keys(run)
    with pytest.raises(RetentionRefused, match="cannot be read"):
        retain(run)
    assert keys(run) == before


class TestConsolidated:
    """Once a chain has been merged, its old links may go, and nobody misses them."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Run:
        """A chain of five, the fourth of which is merged into a full too."""
        run = Run.create(open_store(str(tmp_path / "run")))
        run.claim(None)
        parent: Manifest | None = None
        for step in (10, 20, 30, 40, 50):
            parent = add(run, step, parent)
        consolidated(run, 40)
        return run

    def test_the_old_links_go_and_every_bit_stays(self, run: Run) -> None:
        before = {step: values(run, step) for step in (40, 50)}
        policy = RetentionPolicy(keep_last=2, require_validated=False)
        first = retain(run, policy)
        assert first.marked == tuple(named(run, step) for step in (40, 30, 20, 10))
        second = retain(run, policy)
        assert second.deleted == first.marked and second.removed_bytes > 0
        assert steps(run) == [40, 50]
        assert keys(run).isdisjoint(first.marked)
        report = check(run, level="full")
        assert report.ok and report.findings == ()
        for step, tensors in before.items():
            assert all(map(torch.equal, values(run, step), tensors))
        # Training goes on as if nothing had happened.
        add(run, 60, run.manifest(50, 1))
        assert restore(run, MemoryTarget()).restored.step == 60
        retain(run, policy)
        retain(run, policy)
        assert steps(run) == [40, 50, 60] and check(run, level="full").ok

    def test_a_merged_full_that_no_reader_takes_replaces_no_link(self, run: Run) -> None:
        merged = run.read_manifest(run.representations()[ManifestName(40, 1)][0])
        assert merged.stands_for is not None
        key = CONSOLIDATED_KEY.of(40, 1, None)
        links = merged.stands_for.model_copy(update={"chain_length": 7})
        run.store.put(key, pack_record(merged.model_copy(update={"stands_for": links})))
        policy = RetentionPolicy(keep_last=2, require_validated=False)
        assert retain(run, policy).marked == (key,)
        assert retain(run, policy).deleted == (key,)
        assert steps(run) == [10, 20, 30, 40, 50]
        assert check(run, level="full").findings == ()

    def test_an_old_link_that_a_pin_needs_stays(self, run: Run) -> None:
        pins.pin(run, ManifestName(20, 1))
        for _ in range(2):
            retain(run)
        # 40 is not kept for itself, but 50 stands on its merged full.
        assert steps(run) == [10, 20, 40, 50] and named(run, 40) not in keys(run)
        assert check(run, level="full").ok

    def test_a_merged_full_of_what_no_rule_keeps_goes(self, run: Run) -> None:
        add(run, 60, None)
        for _ in range(2):
            retain(run)
        require_tidy(run, [60])

    def test_the_newest_keeps_the_chain_that_its_trainer_knows(self, run: Run) -> None:
        consolidated(run, 50)
        for _ in range(2):
            retain(run)
        # Its own manifest, its merged full, and what the former stands on.
        assert steps(run) == [40, 50] and len(run.representations()[ManifestName(50, 1)]) == 2
        add(run, 60, run.manifest(50, 1))
        assert restore(run, MemoryTarget()).restored.step == 60

    def test_a_merge_that_is_under_way_holds_its_sources(self, run: Run) -> None:
        add(run, 60, None)
        retain(run)
        done: list[PruneResult] = []

        def prune(call: str, key: str) -> None:
            if call == "put" and key.startswith("chunks/000000000030") and not done:
                done.append(retain(run))

        store = InterposedStore(run.store, before=prune)
        consolidated(Run.open(store), 30)
        assert done and set(done[0].deleted) == {
            "consolidated/000000000040-00000001-full.json",
            *(named(run, step) for step in (50, 40)),
        }
        assert steps(run) == [10, 20, 30, 60] and check(run, level="full").ok
        assert not [key for key in keys(run) if key.startswith("leases/")]


class TestStoreFull:
    """A store without room takes no marks: orphans go, and the rest is said."""

    @pytest.mark.parametrize("prefix", ["", "expired/", DELETION_KEY])
    def test_orphans_go_and_nothing_else(self, run: Run, prefix: str) -> None:
        if prefix == DELETION_KEY:
            retain(run)
        lease = leases.HeldLease(run, purpose="seed", covers=[run.manifest(50, 1).ref])
        old = build(run, tables(), step=45, generation=1)
        for key, data in old.chunks.items():
            run.store.put(key, data)
        before = keys(run) - {PLAN_KEY}

        def refuse(call: str, key: str) -> None:
            if call in ("put", "create") and key.startswith(prefix):
                raise StoreFull(key, found="ENOSPC", expected="room", next_step="free some")

        full = Run.open(InterposedStore(run.store, before=refuse))
        with pytest.raises(StoreFull, match=f"{len(old.chunks)} orphans.*there is room now"):
            retain(full)
        assert keys(run) - {PLAN_KEY} == before - set(old.chunks)
        with pytest.raises(StoreFull, match="0 orphans.*by hand.*--dry-run"):
            retain(full)
        assert keys(run) - {PLAN_KEY} == before - set(old.chunks)
        # What to let go of by hand is told all the same.
        dry = planned(full, ask_store=False)
        rows = [row.step for row in dry.rows() if row.action in ("mark", "delete")]
        assert rows == [30, 20, 10]
        lease.release()
        for step in rows:
            run.store.delete(named(run, step))
            assert all(health.restorable for health in check(run).checkpoints)
        for key in [key for key in keys(run) if key.startswith("expired/")]:
            run.store.delete(key)
        plan = plan_sweep(full, grace_seconds=0.0)
        assert len(execute_sweep(full, plan).removed) > 0
        leave_plan(run, planned(run))
        require_tidy(run, [40, 50])


class TestBetweenPlanAndDeed:
    """What has come to be needed since the plan was made stays."""

    def test_a_commit_on_top_of_what_is_doomed(self, run: Run) -> None:
        run.claim(run.manifest(30, 1).ref)  # a deliberate roll-back: 40 and 50 are superseded
        run.claim(None)
        add(run, 70, None, generation=3)
        retain(run)
        plan = planned(run)
        assert len(plan.delete) == 5
        add(run, 80, run.manifest(30, 1), generation=3)
        result = execute(run, plan)
        assert set(result.deleted) == {named(run, 40), named(run, 50)}
        assert {key for key, _ in result.spared} == {named(run, step) for step in (10, 20, 30)}
        assert restore(run, MemoryTarget()).restored.step == 80

    def test_a_manifest_that_cannot_be_read_any_more(self, run: Run) -> None:
        retain(run)
        plan = planned(run)
        run.store.put(named(run, 40), b"damaged")
        assert execute(run, plan).deleted == ()
        with pytest.raises(RetentionRefused, match="cannot be read"):
            planned(run)


class Interruption:
    """Raises at the `when`-th change of the store."""

    def __init__(self, when: int) -> None:
        self._left = when
        self.struck = False

    def __call__(self, call: str, key: str) -> None:
        if call in ("put", "create", "delete"):
            self._left -= 1
            if self._left == 0:
                self.struck = True
                raise unavailable(key)


@pytest.mark.parametrize("at", ["before", "after"])
def test_one_that_dies_anywhere_is_finished_by_the_next(tmp_path: Path, at: str) -> None:
    start = filled(open_store(str(tmp_path / "start")))
    pins.pin(start, ManifestName(20, 1))
    retain(start)
    pins.unpin(start, ManifestName(20, 1))
    for when in range(1, 200):
        run = copy_run(start, tmp_path / f"run-{when}")
        strike = Interruption(when)
        store = InterposedStore(run.store, **{at: strike})
        for _ in range(2):
            try:
                retain(Run.open(store))
            except StoreUnavailable:
                # Whatever was reached: what is left restores.
                assert all(health.restorable for health in check(run).checkpoints)
        retain(run)
        retain(run)
        require_tidy(run, [40, 50])
        if not strike.struck:
            break
    assert not strike.struck and when > 20
