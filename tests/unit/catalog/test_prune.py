"""Marking, waiting, deleting: what happens to a real run in a real store (format §6.6, §6.7)."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from recpoint.catalog import announcement, leases, pins
from recpoint.catalog.announcement import TAKE_OVER_SECONDS, announce, standing, take_over
from recpoint.catalog.check import check
from recpoint.catalog.consolidate import consolidate
from recpoint.catalog.consolidate_plan import plan_consolidation
from recpoint.catalog.elapsed import Clocks
from recpoint.catalog.lineage import ManifestName
from recpoint.catalog.prune import PruneResult, execute
from recpoint.catalog.prune_plan import PrunePlan, plan_prune
from recpoint.catalog.restore import MemoryTarget, restore
from recpoint.catalog.retention_rules import BestBy, RetentionPolicy
from recpoint.catalog.run import Run
from recpoint.catalog.store import open_store
from recpoint.catalog.store_contract import Store
from recpoint.catalog.sweep import execute as execute_sweep
from recpoint.catalog.sweep import plan_sweep
from recpoint.errors import (
    ChainError,
    NonFiniteValue,
    NothingToRestore,
    ObjectNotFound,
    RetentionRefused,
    SettingsError,
    StoreAccessDenied,
    StoreFull,
    StoreUnavailable,
)
from recpoint.format.manifest import Manifest
from recpoint.format.naming import (
    CHUNKS_PREFIX,
    DELETION_KEY,
    PLAN_KEY,
    expired_key,
    lease_key,
    manifest_key,
    metric_key,
    pin_key,
)
from recpoint.format.records import pack_record, unpack_record
from recpoint.format.retention_records import Deletion, Mark, Stamp
from tests.catalog_builder import build, copy_run, publish, tables
from tests.interposed_store import InterposedStore, unavailable
from tests.polling import until

HOUR = 3600.0
LAST = RetentionPolicy(keep_last=1, require_validated=False)


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A place on a local disk, and one on the real S3 server."""
    if request.param == "local":
        return open_store(str(tmp_path / "run"))
    return open_store(request.getfixturevalue("s3_run_url"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return filled(open_store(str(tmp_path / "run")))


def filled(store: Store) -> Run:
    """Two chains: 10, 20, 30 and 40, 50."""
    run = Run.create(store)
    run.claim(None)
    parent: Manifest | None = None
    for step in (10, 20, 30):
        parent = add(run, step, parent)
    parent = None
    for step in (40, 50):
        parent = add(run, step, parent)
    return run


def add(run: Run, step: int, parent: Manifest | None, *, generation: int = 1) -> Manifest:
    dirty = None if parent is None else [torch.tensor([1, 2]), torch.tensor([0])]
    made = build(
        run, tables(seed=step), step=step, generation=generation, parent=parent, dirty=dirty
    )
    return publish(run, made)


def planned(
    run: Run, policy: RetentionPolicy = LAST, *, grace: float = 0.0, ask_store: bool = True
) -> PrunePlan:
    return plan_prune(
        run, policy, grace_seconds=grace, grace_floor_seconds=0.0, ask_store=ask_store
    )


def retain(run: Run, policy: RetentionPolicy = LAST, *, grace: float = 0.0) -> PruneResult:
    return execute(run, planned(run, policy, grace=grace))


def steps(run: Run) -> list[int]:
    return [name.step for name in run.manifest_names()]


def keys(run: Run) -> set[str]:
    return {info.key for info in run.store.list()}


def named(run: Run, step: int) -> str:
    return manifest_key(step, 1)


def require_tidy(run: Run, left: list[int]) -> None:
    """Exactly these checkpoints are there, all of them restore, and nothing lies about."""
    assert steps(run) == left
    report = check(run, level="full")
    assert report.ok and report.findings == ()
    records = {"run.json", "generations/00000001.json", "retention.json"}
    records |= {named(run, step) for step in left}
    chunks = {c.key for step in left for c in run.manifest(step, 1).chunks}
    assert keys(run) == records | chunks


def test_marked_first_deleted_later(store: Store) -> None:
    run = filled(store)
    before = keys(run)
    first = retain(run)
    assert first.marked == tuple(named(run, step) for step in (30, 20, 10))
    assert first.deleted == () and first.removed_bytes == 0
    marks = {expired_key(named(run, step)) for step in (10, 20, 30)}
    assert keys(run) == before | marks | {PLAN_KEY}
    assert check(run, level="full").ok
    # A marked checkpoint counts and restores as before.
    assert steps(run) == [10, 20, 30, 40, 50] == [n.step for n in reversed(run.live_line())]
    assert restore(run, MemoryTarget(), step=30).restored.step == 30

    plan = planned(run)
    assert plan.mark == () and plan.delete == tuple(named(run, step) for step in (30, 20, 10))
    second = execute(run, plan)
    assert second.deleted == plan.delete and second.removed_bytes > 0
    require_tidy(run, [40, 50])
    third = planned(run)
    assert (third.mark, third.delete, third.unmark) == ((), (), ())


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
        for what in {what for what, _, _ in told}:
            counts = [(done, total) for name, done, total in told if name == what]
            assert counts == [(number, len(counts)) for number in range(1, len(counts) + 1)]
        return list(dict.fromkeys(what for what, _, _ in told))

    assert retained() == ["reading manifests", "marking"]
    assert retained() == ["reading manifests", "deleting manifests", "removing objects"]


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
    run.store.put(expired_key(named(run, 20)), b"damaged")
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
        pins.record_metric(run, ManifestName(step, 1), "auc", value)
    pins.record_metric(run, ManifestName(10, 1), "auc", 0.25)  # measured again
    run.store.put(metric_key(30, 1, "auc"), b"damaged")
    policy = RetentionPolicy(best_by=(BestBy("auc", "max"),), require_validated=False)
    assert [d.manifest.name.step for d in planned(run, policy).mark] == [30]
    policy = RetentionPolicy(best_by=(BestBy("auc", "min"),), require_validated=False)
    assert [d.manifest.name.step for d in planned(run, policy).mark] == [30, 20]
    with pytest.raises(NonFiniteValue):
        pins.record_metric(run, ManifestName(10, 1), "auc", float("nan"))
    with pytest.raises(ObjectNotFound):
        pins.record_metric(run, ManifestName(11, 1), "auc", 1.0)


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


def test_chunks_that_another_manifest_names_stay_when_theirs_goes(run: Run) -> None:
    # As a consolidation may leave it: 50 names a chunk that was written for 30 (format I1).
    old, newest = run.manifest(30, 1), run.manifest(50, 1)
    shared = old.chunks[0]
    run.store.delete(named(run, 50))
    kept = newest.model_copy(update={"chunks": (shared, *newest.chunks[1:])})
    run.store.put(named(run, 50), pack_record(kept))
    retain(run)
    retain(run)
    assert steps(run) == [40, 50]
    left = keys(run) & {chunk.key for chunk in old.chunks}
    assert left == {shared.key}


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


class TestPins:
    """A pin that was reported as set holds."""

    def test_it_keeps_the_checkpoint_and_its_chain(self, store: Store) -> None:
        run = filled(store)
        made = pins.pin(run, ManifestName(20, 1), label="release", who="ana", why="shipped")
        assert pins.pinned(run) == {ManifestName(20, 1): ("release",)}
        assert pins.read_pin(run, ManifestName(20, 1), "release") == made
        retain(run)
        retain(run)
        assert steps(run) == [10, 20, 40, 50]
        assert check(run, level="full").ok
        again = pins.pin(run, ManifestName(20, 1), label="release", who="bob")
        assert again.who == "ana"
        pins.unpin(run, ManifestName(20, 1), label="release")
        retain(run)
        retain(run)
        require_tidy(run, [40, 50])

    def test_it_rescues_what_is_marked_and_the_grace_begins_anew(self, run: Run) -> None:
        retain(run)
        make_old(run, 2 * HOUR)
        pins.pin(run, ManifestName(20, 1))
        assert keys(run) & {expired_key(named(run, s)) for s in (10, 20, 30)} == {
            expired_key(named(run, 30))
        }
        pins.unpin(run, ManifestName(20, 1))
        result = retain(run, grace=HOUR)
        assert result.deleted == (named(run, 30),) and steps(run) == [10, 20, 40, 50]

    def test_one_that_cannot_be_read_counts(self, run: Run) -> None:
        run.store.put(pin_key(30, 1, "pin"), b"damaged")
        assert planned(run).mark == ()

    def test_one_of_no_checkpoint_is_told_and_left(self, run: Run) -> None:
        key = pin_key(25, 1, "pin")
        run.store.put(key, b"of something that is gone")
        plan = planned(run)
        assert plan.stray_pins == (key,) and len(plan.mark) == 3
        execute(run, plan)
        assert key in keys(run)

    def test_two_pins_of_one_checkpoint_are_removed_one_by_one(self, run: Run) -> None:
        for label in ("ana", "bob"):
            pins.pin(run, ManifestName(10, 1), label=label)
        pins.unpin(run, ManifestName(10, 1), label="ana")
        assert pins.pinned(run) == {ManifestName(10, 1): ("bob",)}
        with pytest.raises(NothingToRestore, match="the pins bob"):
            pins.unpin(run, ManifestName(10, 1), label="ana")

    @pytest.mark.parametrize("label", ["", "A", "../x", "x" * 65, "a b"])
    def test_labels_that_no_key_can_hold(self, run: Run, label: str) -> None:
        with pytest.raises(SettingsError):
            pins.pin(run, ManifestName(10, 1), label=label)

    def test_no_pin_of_what_is_not_there_or_does_not_restore(self, run: Run) -> None:
        with pytest.raises(ObjectNotFound):
            pins.pin(run, ManifestName(11, 1))
        run.store.delete(named(run, 10))
        with pytest.raises(ChainError):
            pins.pin(run, ManifestName(30, 1))
        assert pins.pinned(run) == {}

    def test_too_late_once_the_deletion_is_announced(self, run: Run) -> None:
        retain(run)

        def pin(call: str, key: str) -> None:
            if call == "delete" and key.startswith("manifests/"):
                for step in (10, 20, 30):
                    # 30 may be gone already: then it is not there to be pinned.
                    with pytest.raises((RetentionRefused, ObjectNotFound)):
                        pins.pin(run, ManifestName(step, 1))

        execute(Run.open(InterposedStore(run.store, before=pin)), planned(run))
        require_tidy(run, [40, 50])

    def test_in_time_right_before_the_announcement(self, run: Run) -> None:
        retain(run)

        def pin(call: str, key: str) -> None:
            if (call, key) == ("create", DELETION_KEY):
                pins.pin(run, ManifestName(20, 1))

        result = execute(Run.open(InterposedStore(run.store, before=pin)), planned(run))
        assert result.deleted == (named(run, 30),)
        assert {key for key, _ in result.spared} == {named(run, 10), named(run, 20)}
        assert steps(run) == [10, 20, 40, 50] and check(run, level="full").ok

    def test_deleted_between_the_looks_of_the_pin(self, run: Run) -> None:
        retain(run)
        plan = planned(run)

        def delete(call: str, key: str) -> None:
            if (call, key) == ("create", pin_key(10, 1, "pin")):
                execute(run, plan)

        with pytest.raises((ObjectNotFound, ChainError)):
            pins.pin(Run.open(InterposedStore(run.store, before=delete)), ManifestName(10, 1))
        require_tidy(run, [40, 50])


class TestLeases:
    """Who reads is not deleted from under; who is dead is not waited for."""

    def test_nothing_is_deleted_while_everything_is_read(self, store: Store) -> None:
        run = filled(store)
        retain(run)
        with leases.reading(run, purpose="restore"):
            plan = planned(run)
            assert plan.held[0].startswith("restore by process ")
            assert execute(run, plan).deleted == ()
            assert steps(run) == [10, 20, 30, 40, 50]
        assert len(retain(run).deleted) == 3
        require_tidy(run, [40, 50])

    def test_a_running_consolidation_keeps_what_it_reads(self, run: Run) -> None:
        retain(run)  # marks it
        meanwhile: list[PruneResult] = []

        def delete(call: str, key: str) -> None:
            if call in ("put", "create") and key.startswith(CHUNKS_PREFIX) and not meanwhile:
                meanwhile.append(retain(run))

        reading = Run.open(InterposedStore(run.store, before=delete))
        consolidate(reading, plan_consolidation(reading, ManifestName(30, 1)))
        (result,) = meanwhile
        assert result.deleted == () and set(result.unmarked) == {
            named(run, s) for s in (10, 20, 30)
        }
        assert ManifestName(30, 1) in run.consolidated()
        retain(run)
        retain(run)
        require_tidy(run, [40, 50])

    def test_a_lease_that_comes_right_before_the_deletion_is_seen(self, run: Run) -> None:
        retain(run)
        held: list[leases.HeldLease] = []

        def begin(call: str, key: str) -> None:
            if (call, key) == ("create", DELETION_KEY):
                held.append(leases.HeldLease(run, purpose="restore"))

        result = execute(Run.open(InterposedStore(run.store, before=begin)), planned(run))
        assert result.deleted == () and steps(run) == [10, 20, 30, 40, 50]
        assert not planned(run).unfinished  # nothing was begun: it may be pinned as before
        held[0].release()
        retain(run)
        require_tidy(run, [40, 50])

    def test_a_lease_of_some_keeps_those_and_their_chains(self, run: Run) -> None:
        lease = leases.HeldLease(run, purpose="publish", covers=[run.manifest(20, 1).ref])
        retain(run)
        retain(run)
        assert steps(run) == [10, 20, 40, 50]
        lease.renew(covers=[run.manifest(10, 1).ref])
        retain(run)
        retain(run)
        assert steps(run) == [10, 40, 50]
        lease.release()
        retain(run)
        retain(run)
        require_tidy(run, [40, 50])

    def test_one_that_was_not_renewed_in_time_is_removed(self, run: Run) -> None:
        lease = leases.HeldLease(run, purpose="restore", ttl_seconds=60)
        retain(run)
        (found,) = leases.look(run, Clocks.read(run.store))
        rewrite_lease(run, found, Stamp(written_ms=now_ms() - 61_000, boot=None, boot_ms=0))
        assert planned(run).held  # the store says that it is young
        age_file(run, found.key, 61)
        plan = planned(run)
        assert plan.held == () and plan.expired_leases == (found.key,)
        lease.renew()  # between plan and deed: it is there to stay
        assert execute(run, plan).deleted == () and found.key in keys(run)
        rewrite_lease(run, found, Stamp(written_ms=now_ms() - 61_000, boot=None, boot_ms=0))
        age_file(run, found.key, 61)
        plan = planned(run)
        assert len(execute(run, plan).deleted) == 3
        lease.renew()  # its owner lives after all, and finds nothing missing that it may rely on
        assert planned(run).held

    def test_one_from_the_future_is_given_a_stamp_that_ends(self, run: Run) -> None:
        leases.HeldLease(run, purpose="restore", ttl_seconds=60)
        (found,) = leases.look(run, Clocks.read())
        rewrite_lease(run, found, Stamp(written_ms=now_ms() + 10**9, boot=None, boot_ms=0))
        plan = planned(run)
        assert plan.held and len(plan.adopt) == 1
        execute(run, plan)
        (adopted,) = leases.look(run, Clocks.read())
        assert adopted.lease is not None and adopted.lease.stamp.written_ms <= now_ms()
        assert planned(run).held and planned(run).adopt == ()

    def test_one_that_cannot_be_read_is_honoured_for_a_week(self, run: Run) -> None:
        key = lease_key("ab" * 16)
        run.store.put(key, b"damaged")
        retain(run)
        assert planned(run).held[0].startswith("unreadable")
        age_file(run, key, 8 * 24 * HOUR)
        assert planned(run).expired_leases == (key,)

    def test_who_may_not_write_reads_without(self, run: Run) -> None:
        def refuse(call: str, key: str) -> None:
            if call == "put":
                raise StoreAccessDenied(key, found="403", expected="200", next_step="ask")

        with leases.reading(
            Run.open(InterposedStore(run.store, before=refuse)), purpose="restore"
        ) as lease:
            assert lease is None

    def test_it_is_renewed_for_as_long_as_the_reader_reads(self, run: Run) -> None:
        puts: list[str] = []

        def refuse(call: str, key: str) -> None:
            if call == "put":
                puts.append(key)
                if len(puts) == 2:
                    raise unavailable(key)  # a renewal that fails is tried again

        def written_ms() -> int:
            (found,) = leases.look(run, Clocks.read())
            assert found.lease is not None
            return found.lease.stamp.written_ms

        store = InterposedStore(run.store, before=refuse)
        with leases.reading(Run.open(store), purpose="restore", renew_seconds=0.01):
            began_ms = written_ms()
            until(lambda: written_ms() > began_ms and len(puts) > 3)
        assert leases.look(run, Clocks.read()) == []
        threads = {thread.name for thread in threading.enumerate()}
        assert "recpoint-lease" not in threads  # or it could write it again


class TestAge:
    """A mark is as old as the clock says that makes it youngest."""

    @pytest.fixture
    def marked(self, run: Run) -> Run:
        retain(run, grace=HOUR)
        return run

    def test_all_clocks_have_to_agree(self, marked: Run) -> None:
        assert len(planned(marked, grace=HOUR).waiting) == 3
        make_old(marked, 2 * HOUR)
        assert len(planned(marked, grace=HOUR).delete) == 3

    def test_a_wall_clock_that_jumped_deletes_nothing(self, marked: Run) -> None:
        make_old(marked, 2 * HOUR, boot=False)
        assert planned(marked, grace=HOUR).delete == ()

    def test_a_store_whose_clock_stands_back_deletes_nothing(self, marked: Run) -> None:
        make_old(marked, 2 * HOUR, files=False)
        assert planned(marked, grace=HOUR).delete == ()

    def test_a_stamp_from_the_future_deletes_nothing_and_is_written_anew(self, marked: Run) -> None:
        make_old(marked, -2 * HOUR)
        plan = planned(marked, grace=HOUR)
        assert plan.delete == () and len(plan.remark) == 3
        execute(marked, plan)
        assert planned(marked, grace=HOUR).remark == ()
        make_old(marked, 2 * HOUR)
        assert len(retain(marked, grace=HOUR).deleted) == 3


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
        run.store.put(PLAN_KEY, b"")
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

    def test_two_retentions_at_once(self, run: Run) -> None:
        retain(run)
        plan = planned(run)
        told: list[str] = []

        def other(call: str, key: str) -> None:
            if call == "delete" and key.startswith("manifests/"):
                with pytest.raises(RetentionRefused) as refused:
                    execute(run, plan)
                told.append(refused.value.found)

        execute(Run.open(InterposedStore(run.store, before=other)), plan)
        who = f"process {os.getpid()} of {socket.gethostname()}"
        assert len(told) == 3 and all(who in found for found in told)
        require_tidy(run, [40, 50])

    def test_a_pin_is_refused_while_another_plan_knows_of_the_deletion(self, run: Run) -> None:
        # One has announced and looked, and deletes. Another was planned beside its announcement,
        # and meets a lease that has come since: it must not end what it did not begin.
        retain(run)
        plan = planned(run)
        struck: list[str] = []

        def other(call: str, key: str) -> None:
            if call == "delete" and key.startswith("manifests/") and not struck:
                struck.append(key)
                made = planned(run)
                assert set(made.unfinished) == set(plan.delete)
                with leases.reading(run, purpose="seed", covers=[run.manifest(10, 1).ref]):
                    with suppress(RetentionRefused):
                        execute(run, made)
                with pytest.raises(RetentionRefused, match="it is being deleted"):
                    pins.pin(run, ManifestName(10, 1))

        execute(Run.open(InterposedStore(run.store, before=other)), plan)
        assert struck
        require_tidy(run, [40, 50])

    def test_whose_announcement_was_taken_over_deletes_nothing_more(self, run: Run) -> None:
        retain(run)
        plan = planned(run)
        announced: list[str] = []

        def stalled(call: str, key: str) -> None:
            if (call, key) == ("create", DELETION_KEY):
                announced.append(key)
            elif (call, key) == ("get", DELETION_KEY) and len(announced) == 1:
                # It was away for so long that another has finished its work, but for a lease.
                announced.append(key)
                with leases.reading(run, purpose="seed", covers=[run.manifest(10, 1).ref]):
                    finished = execute(run, planned(run), take_over_seconds=0.0)
                assert finished.deleted == (named(run, 30), named(run, 20))
                pins.pin(run, ManifestName(10, 1))

        with pytest.raises(RetentionRefused, match="gone, or another's is there"):
            execute(Run.open(InterposedStore(run.store, before=stalled)), plan)
        assert steps(run) == [10, 40, 50] and check(run, level="full").ok
        assert pins.pinned(run) == {ManifestName(10, 1): ("pin",)}

    def test_an_announcement_that_is_another_by_now_is_left(self, run: Run) -> None:
        mine = announce(run, (named(run, 10),))
        there = standing(run, Clocks.read(run.store))
        assert there is not None
        other = take_over(run, there, (), after_seconds=0.0)
        mine.withdraw()
        assert DELETION_KEY in keys(run)
        with pytest.raises(RetentionRefused):
            mine.require_standing()
        other.require_standing()
        other.withdraw()
        assert DELETION_KEY not in keys(run)

    def test_a_killed_one_is_finished_when_its_announcement_is_old(self, run: Run) -> None:
        retain(run)
        announce(run, (named(run, 30), named(run, 20)))
        for stamp_old, file_old in ((True, False), (False, True)):
            make_announcement_old(run, stamp=stamp_old, file=file_old)
            with pytest.raises(RetentionRefused, match=r"at work, or was killed.*in \d+ minutes"):
                retain(run)
        make_announcement_old(run)
        assert retain(run).deleted == tuple(named(run, step) for step in (30, 20, 10))
        require_tidy(run, [40, 50])

    def test_an_announcement_from_the_future_is_as_old_as_the_store_says(self, run: Run) -> None:
        retain(run)
        announce(run, (named(run, 30),))
        make_announcement_old(run, seconds=-24 * HOUR, file=False)
        with pytest.raises(RetentionRefused, match="at work, or was killed"):
            retain(run)
        age_file(run, DELETION_KEY, TAKE_OVER_SECONDS + 60)
        assert len(retain(run).deleted) == 3

    @pytest.mark.parametrize("marked", [True, False])
    def test_an_announcement_that_cannot_be_read(self, run: Run, marked: bool) -> None:
        if marked:
            retain(run)
        run.store.put(DELETION_KEY, b"damaged")
        if marked:
            with pytest.raises(RetentionRefused, match="it cannot be read"):
                retain(run)
        age_file(run, DELETION_KEY, TAKE_OVER_SECONDS + 60)
        result = retain(run)
        assert len(result.deleted) == (3 if marked else 0)
        assert DELETION_KEY not in keys(run)

    def test_what_takes_long_is_announced_again_and_looked_at_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = Run.create(open_store(str(tmp_path / "many")))
        run.claim(None)
        for step in range(10, 120, 10):
            add(run, step, None)
        retain(run)
        plan = planned(run)
        assert len(plan.delete) == 10
        gone: list[str] = []

        def slow(call: str, key: str) -> None:
            if call == "delete" and key.startswith("manifests/"):
                gone.append(key)
                # The time for one announcement is over.
                monkeypatch.setattr(announcement, "_WORKING_SECONDS", 0.0)
            elif (call, key) == ("create", DELETION_KEY) and gone:
                monkeypatch.undo()
                pins.pin(run, ManifestName(10, 1))

        result = execute(Run.open(InterposedStore(run.store, before=slow)), plan)
        assert len(gone) == 9 and named(run, 10) in dict(result.spared)
        assert steps(run) == [10, 110] and DELETION_KEY not in keys(run)


def consolidated(run: Run, step: int) -> None:
    consolidate(run, plan_consolidation(run, ManifestName(step, 1)))


def values(run: Run, step: int) -> list[torch.Tensor]:
    """Values and row states of every table, as they are restored."""
    target = MemoryTarget()
    restore(run, target, step=step)
    tables = [target.tables[name] for name in sorted(target.tables)]
    parts = [part for table in tables for part in (table.values, *table.row_states)]
    return [part for part in parts if part is not None]


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


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def age_file(run: Run, key: str, seconds: float) -> None:
    when = time.time() - seconds
    os.utime(Path(run.url) / key, (when, when))


def rewrite_mark(run: Run, step: int, **changes: object) -> None:
    key = expired_key(named(run, step))
    mark = unpack_record(Mark, run.store.get(key, max_bytes=1 << 20), name=key, next_step="")
    run.store.put(key, pack_record(mark.model_copy(update=changes)))


def rewrite_lease(run: Run, held: leases.Held, stamp: Stamp) -> None:
    assert held.lease is not None
    run.store.put(held.key, pack_record(held.lease.model_copy(update={"stamp": stamp})))


def make_announcement_old(
    run: Run, *, seconds: float = TAKE_OVER_SECONDS + 60, stamp: bool = True, file: bool = True
) -> None:
    """Let the announcement be so old, by its stamp, by the store's time or both."""
    data = run.store.get(DELETION_KEY, max_bytes=1 << 20)
    there = unpack_record(Deletion, data, name=DELETION_KEY, next_step="")
    written_ms = int(now_ms() - (1000 * seconds if stamp else 0))
    made = Stamp(written_ms=written_ms, boot=None, boot_ms=0)
    run.store.put(DELETION_KEY, pack_record(there.model_copy(update={"stamp": made})))
    if file:
        age_file(run, DELETION_KEY, seconds)


def make_old(run: Run, seconds: float, *, boot: bool = True, files: bool = True) -> None:
    """Let every mark have been written so long ago, by the wall clock and the ones asked for."""
    clocks = Clocks.read()
    for info in list(run.store.list("expired/")):
        data = run.store.get(info.key, max_bytes=1 << 20)
        mark = unpack_record(Mark, data, name=info.key, next_step="")
        stamp = Stamp(
            written_ms=int(clocks.wall_ms - 1000 * seconds),
            boot=None if boot else clocks.boot,
            boot_ms=0 if boot else clocks.boot_ms,
        )
        run.store.put(info.key, pack_record(mark.model_copy(update={"stamp": stamp})))
        if files:
            age_file(run, info.key, seconds)
